// Arrays that Python owns.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace hicache {

// A C-contiguous array of int64, borrowed for the length of a call; its memory stays for as long as the array does.
class Int64s {
 public:
  Int64s() = default;
  Int64s(const Int64s&) = delete;
  Int64s& operator=(const Int64s&) = delete;
  ~Int64s() {
    if (view_.obj != nullptr) {
      PyBuffer_Release(&view_);
    }
  }

  // False, with a Python error, where it is something else.
  bool borrow(PyObject* array, const char* name) {
    if (PyObject_GetBuffer(array, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      return false;
    }
    const bool is_int64 = view_.itemsize == 8 && view_.format != nullptr &&
                          (view_.format[0] == 'l' || view_.format[0] == 'q') && view_.format[1] == '\0';
    if (view_.ndim != 1 || !is_int64) {
      PyErr_Format(PyExc_TypeError, "%s must be a one-dimensional int64 array", name);
      return false;
    }
    return true;
  }

  const std::int64_t* data() const { return static_cast<const std::int64_t*>(view_.buf); }
  Py_ssize_t size() const { return view_.shape[0]; }

 private:
  Py_buffer view_{};
};

// dst, src and sizes of a batch; false, with a Python error, where they do not fit together.
inline bool borrow_batch(PyObject* const* arrays, Int64s& dst, Int64s& src, Int64s& sizes) {
  if (!dst.borrow(arrays[0], "dst") || !src.borrow(arrays[1], "src") || !sizes.borrow(arrays[2], "sizes")) {
    return false;
  }
  if (dst.size() != sizes.size() || src.size() != sizes.size()) {
    PyErr_SetString(PyExc_ValueError, "dst, src and sizes must have the same length");
    return false;
  }
  return true;
}

}  // namespace hicache

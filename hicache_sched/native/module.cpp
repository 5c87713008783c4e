// The extension module `hicache_sched._native`: what of this folder Python can call.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

#include "copy.h"

namespace {

// A C-contiguous array of int64, borrowed from Python for the length of a call.
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

PyObject* copy_batch(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 3) {
    PyErr_SetString(PyExc_TypeError, "copy_batch(dst, src, sizes) takes three arrays");
    return nullptr;
  }
  Int64s dst, src, sizes;
  if (!dst.borrow(args[0], "dst") || !src.borrow(args[1], "src") || !sizes.borrow(args[2], "sizes")) {
    return nullptr;
  }
  if (dst.size() != sizes.size() || src.size() != sizes.size()) {
    PyErr_SetString(PyExc_ValueError, "dst, src and sizes must have the same length");
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  hicache::copy_batch(dst.data(), src.data(), sizes.data(), static_cast<std::size_t>(sizes.size()));
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"copy_batch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(copy_batch)), METH_FASTCALL,
     "copy_batch(dst, src, sizes): sizes[i] bytes from address src[i] to dst[i], without the GIL; int64 arrays."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "hicache_sched._native", nullptr, 0, methods, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }

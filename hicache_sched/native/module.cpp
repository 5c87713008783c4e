// The extension module `hicache_sched._native`: what of this folder Python can call.
#include "arrays.h"
#include "copy.h"
#include "core_type.h"
#include "cuda_plane_type.h"
#include "plane_type.h"
#include "planner_type.h"

namespace {

PyObject* copy_batch(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 3) {
    PyErr_SetString(PyExc_TypeError, "copy_batch(dst, src, sizes) takes three arrays");
    return nullptr;
  }
  hicache::Copies copies;
  {
    // Given back at once: the caller keeps the arrays, and a thread that the end of the interpreter catches without the
    // GIL has nothing to clean up.
    hicache::Int64s dst, src, sizes;
    if (!hicache::borrow_batch(args, dst, src, sizes)) {
      return nullptr;
    }
    copies = {dst.data(), src.data(), sizes.data(), static_cast<std::size_t>(sizes.size())};
  }
  Py_BEGIN_ALLOW_THREADS
  hicache::copy_batch(copies);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"copy_batch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(copy_batch)), METH_FASTCALL,
     "copy_batch(dst, src, sizes): sizes[i] bytes from address src[i] to dst[i], without the GIL; int64 arrays."},
    {"cuda_plane_device", hicache::cuda_plane_device, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "hicache_sched._native", nullptr, 0, methods, nullptr, nullptr,
                          nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && !(hicache::add_core_type(module) && hicache::add_planner_type(module) &&
                             hicache::add_plane_types(module))) {
    Py_CLEAR(module);
  }
  return module;
}

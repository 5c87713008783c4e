// A CUDA device for a native data plane, made by Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace hicache {

PyObject* cuda_plane_device(PyObject* module, PyObject* args);

}  // namespace hicache

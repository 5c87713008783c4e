// The Python types `Plane`, `Burst`, `Indices` and `Sleeper`.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace hicache {

bool add_plane_types(PyObject* module);  // false with a Python error

}  // namespace hicache

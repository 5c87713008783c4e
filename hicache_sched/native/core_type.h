// The Python type `Core`.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace hicache {

bool add_core_type(PyObject* module);  // false with a Python error

}  // namespace hicache

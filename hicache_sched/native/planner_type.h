// The Python type `Planner`.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

#include "planner.h"

namespace hicache {

bool add_planner_type(PyObject* module);  // false with a Python error

// The planner of a `Planner`, which lives as long as that; null, with a TypeError, of something else.
const std::shared_ptr<Planner>* planner_of(PyObject* object);

}  // namespace hicache

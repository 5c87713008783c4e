// What of C++ Python holds without a type of its own; and what every method of a type does.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <utility>

#include "core.h"
#include "plane_device.h"

namespace hicache {

template <typename T>
struct Name;
template <>
struct Name<Stream> {
  static constexpr const char* value = "hicache_sched.stream";
};
template <>
struct Name<Record> {
  static constexpr const char* value = "hicache_sched.record";
};
template <>
struct Name<Event> {
  static constexpr const char* value = "hicache_sched.event";
};
template <>
struct Name<PlaneDevice> {
  static constexpr const char* value = "hicache_sched.plane_device";
};
template <>
struct Name<Core> {
  static constexpr const char* value = "hicache_sched.calls";
};
template <>
struct Name<Operation> {
  static constexpr const char* value = "hicache_sched.operation";
};

template <typename T>
PyObject* wrap(std::shared_ptr<T> value) {
  if (!value) {
    Py_RETURN_NONE;
  }
  auto* held = new std::shared_ptr<T>(std::move(value));
  PyObject* capsule = PyCapsule_New(held, Name<T>::value, [](PyObject* self) {
    delete static_cast<std::shared_ptr<T>*>(PyCapsule_GetPointer(self, Name<T>::value));
  });
  if (capsule == nullptr) {
    delete held;
  }
  return capsule;
}

template <typename T>
const std::shared_ptr<T>* unwrap(PyObject* capsule) {
  return static_cast<const std::shared_ptr<T>*>(PyCapsule_GetPointer(capsule, Name<T>::value));
}

// -- methods ---------------------------------------------------------------------------------------------------------

inline bool check_count(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) {
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
  }
  return given == wanted;
}

template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace hicache

// `Core` for Python. Its methods are called with the GIL; those that block let go of it. Streams, recordings and
// operations are capsules. What is lost is for the caller to say: methods then return None or False. The threads that
// make calls know the core by a capsule of its own (`calls`), so that a Core which nobody refers to is collected.
#include "core_type.h"

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "arrays.h"
#include "capsules.h"
#include "core.h"
#include "emulated_plane.h"
#include "gil.h"
#include "graveyard.h"

namespace hicache {
namespace {

using CorePtr = std::shared_ptr<Core>;

constexpr double kBetweenSignals = 0.05;  // seconds after which a paced operation of the caller's looks for Ctrl-C
constexpr double kForEver = 1e9;

struct CoreObject {
  PyObject_HEAD
  CorePtr* core;
  bool may_block;  // whether putting something on a stream may block
};

// -- operations -------------------------------------------------------------------------------------------------------

// An inline operation whose owner has gone, by an exception at any place, is abandoned: its engine goes on.
struct OwnedOperation {
  std::shared_ptr<Operation> operation;
  std::weak_ptr<Core> core;
  ~OwnedOperation() {
    const auto alive = core.lock();
    if (alive && operation->is_inline) {
      alive->abandon(operation);
    }
  }
};

PyObject* wrap_operation(std::shared_ptr<Operation> operation, const CorePtr& core) {
  auto* owned = new OwnedOperation{std::move(operation), core};
  PyObject* capsule = PyCapsule_New(owned, Name<Operation>::value, [](PyObject* self) {
    delete static_cast<OwnedOperation*>(PyCapsule_GetPointer(self, Name<Operation>::value));
  });
  if (capsule == nullptr) {
    delete owned;
  }
  return capsule;
}

const std::shared_ptr<Operation>* operation_of(PyObject* capsule) {
  auto* owned = static_cast<OwnedOperation*>(PyCapsule_GetPointer(capsule, Name<Operation>::value));
  return owned == nullptr ? nullptr : &owned->operation;
}

// -- blocking --------------------------------------------------------------------------------------------------------

template <typename Block>
PyObject* blocking(Block block) {
  Outcome outcome;
  {
    WithoutGil without;
    outcome = block([&without] { return without.go_on(); });
  }
  if (outcome == Outcome::kInterrupted) {
    return nullptr;  // with the handler's error
  }
  return PyBool_FromLong(outcome == Outcome::kDone);
}

void empty(Core& core) {
  for (void* payload : core.take_garbage()) {
    Py_DECREF(static_cast<PyObject*>(payload));
  }
  graveyard.empty();
}

Core& core_of(PyObject* self) {
  Core& core = **reinterpret_cast<CoreObject*>(self)->core;
  empty(core);
  return core;
}

// Puts something on a stream. Where that was interrupted there is a Python error.
template <typename Put>
auto put(PyObject* self, Put do_put) {
  if (!reinterpret_cast<CoreObject*>(self)->may_block) {
    return do_put([] { return true; });
  }
  WithoutGil without;
  return do_put([&without] { return without.go_on(); });
}

bool engine_number(PyObject* object, int& number) {
  const long value = PyLong_AsLong(object);
  if (value < 0 || value >= kEngines) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_ValueError, "no such engine");
    }
    return false;
  }
  number = static_cast<int>(value);
  return true;
}

// -- methods ---------------------------------------------------------------------------------------------------------

PyObject* new_core(PyTypeObject* type, PyObject* args, PyObject*) {
  double bandwidths[kEngines];
  Py_ssize_t queue_depth = 0;
  if (!PyArg_ParseTuple(args, "(ddd)n", &bandwidths[0], &bandwidths[1], &bandwidths[2], &queue_depth)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    return nullptr;
  }
  auto* object = reinterpret_cast<CoreObject*>(self);
  object->may_block = queue_depth > 0;
  try {
    object->core = new CorePtr(std::make_shared<Core>(bandwidths, static_cast<std::size_t>(queue_depth)));
  } catch (const std::exception& error) {
    Py_DECREF(self);
    PyErr_Format(PyExc_RuntimeError, "cannot start the engines of an emulated device: %s", error.what());
    return nullptr;
  }
  return self;
}

void dealloc(PyObject* self) {
  auto* object = reinterpret_cast<CoreObject*>(self);
  if (object->core != nullptr) {
    Core& core = **object->core;
    core.stop();
    {
      const WithoutGil without;
      core.join();
    }
    core_of(self);
    delete object->core;
  }
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* new_stream(PyObject* self, PyObject* runs_inline) {
  const int is_inline = PyObject_IsTrue(runs_inline);
  return is_inline < 0 ? nullptr : wrap(core_of(self).new_stream(is_inline == 1));
}

PyObject* new_event(PyObject* self, PyObject*) { return wrap(core_of(self).new_event()); }

PyObject* record(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  Core& core = core_of(self);
  if (!check_count(num_args, 2)) {
    return nullptr;
  }
  const auto* stream = unwrap<Stream>(args[0]);
  const auto* event = stream == nullptr ? nullptr : unwrap<Event>(args[1]);
  if (event == nullptr) {
    return nullptr;
  }
  const bool is_there = put(self, [&](const GoOn& go_on) { return core.record(*stream, **event, go_on); });
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(is_there);
}

PyObject* latest(PyObject* self, PyObject* event) {
  const auto* held = unwrap<Event>(event);
  return held == nullptr ? nullptr : wrap(core_of(self).latest(**held));
}

PyObject* record_at_once(PyObject* self, PyObject* stream) {
  Core& core = core_of(self);
  const auto* held = unwrap<Stream>(stream);
  return held == nullptr ? nullptr : wrap(core.record_at_once(*held));
}

PyObject* record_all(PyObject* self, PyObject*) {
  const auto records = core_of(self).record_all();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(records.size()));
  for (std::size_t i = 0; list != nullptr && i < records.size(); ++i) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), wrap(records[i]));
  }
  return list;
}

PyObject* wait(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  Core& core = core_of(self);
  if (!check_count(num_args, 2)) {
    return nullptr;
  }
  const auto* stream = unwrap<Stream>(args[0]);
  const auto* record = stream == nullptr ? nullptr : unwrap<Record>(args[1]);
  if (record == nullptr) {
    return nullptr;
  }
  const bool waits = put(self, [&](const GoOn& go_on) { return core.wait(*stream, *record, go_on); });
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(waits);
}

// submit(stream, engine, work, is_call, duration, nbytes): work is called by the owner, or is (dst, src, sizes, ...).
PyObject* submit(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  Core& core = core_of(self);
  int engine = 0;
  if (!check_count(num_args, 6) || !engine_number(args[1], engine)) {
    return nullptr;
  }
  const auto* stream = unwrap<Stream>(args[0]);
  const double duration = PyFloat_AsDouble(args[4]);
  const Py_ssize_t nbytes = PyLong_AsSsize_t(args[5]);
  if (stream == nullptr || PyErr_Occurred()) {
    return nullptr;
  }
  auto operation = std::make_shared<Operation>();
  operation->stream = *stream;
  operation->is_call = PyObject_IsTrue(args[3]) == 1;
  operation->is_inline = (*stream)->runs_inline;
  operation->duration = duration;
  if (!operation->is_call) {
    Int64s dst, src, sizes;
    if (!PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) < 3) {
      PyErr_SetString(PyExc_TypeError, "copies must be a tuple of arrays: dst, src, sizes");
      return nullptr;
    }
    PyObject* arrays[] = {PyTuple_GET_ITEM(args[2], 0), PyTuple_GET_ITEM(args[2], 1), PyTuple_GET_ITEM(args[2], 2)};
    if (!borrow_batch(arrays, dst, src, sizes)) {
      return nullptr;
    }
    operation->copies = {dst.data(), src.data(), sizes.data(), static_cast<std::size_t>(sizes.size())};
  }
  operation->payload = Py_NewRef(args[2]);
  void* refusal = nullptr;
  const bool is_submitted =
      put(self, [&](const GoOn& go_on) { return core.submit(operation, engine, nbytes, go_on, refusal); });
  if (!is_submitted) {
    Py_DECREF(static_cast<PyObject*>(operation->payload));
    if (refusal != nullptr) {
      auto* error = static_cast<PyObject*>(refusal);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
      Py_DECREF(error);
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    Py_RETURN_NONE;
  }
  return wrap_operation(operation, *reinterpret_cast<CoreObject*>(self)->core);
}

PyObject* await_turn(PyObject* self, PyObject* operation) {
  Core& core = core_of(self);
  const auto* held = operation_of(operation);
  return held == nullptr ? nullptr : blocking([&](const GoOn& go_on) { return core.await_turn(*held, go_on); });
}

PyObject* abandon(PyObject* self, PyObject* operation) {
  const auto* held = operation_of(operation);
  if (held == nullptr) {
    return nullptr;
  }
  core_of(self).abandon(*held);
  core_of(self);
  Py_RETURN_NONE;
}

PyObject* complete_on(Core& core, PyObject* operation) {
  const auto* held = operation_of(operation);
  if (held == nullptr) {
    return nullptr;
  }
  bool is_complete = false;
  while (!is_complete) {
    {
      const WithoutGil without;
      is_complete = core.complete(*held, (*held)->is_inline ? kBetweenSignals : kForEver);
    }
    if (!is_complete && PyErr_CheckSignals() != 0) {
      return nullptr;
    }
  }
  empty(core);
  Py_RETURN_NONE;
}

PyObject* complete(PyObject* self, PyObject* operation) { return complete_on(core_of(self), operation); }

PyObject* complete_call(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  const auto* core = check_count(num_args, 2) ? unwrap<Core>(args[0]) : nullptr;
  return core == nullptr ? nullptr : complete_on(**core, args[1]);
}

PyObject* calls(PyObject* self, PyObject*) { return wrap(*reinterpret_cast<CoreObject*>(self)->core); }

PyObject* next_call(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  int number = 0;
  if (!check_count(num_args, 2) || !engine_number(args[1], number)) {
    return nullptr;
  }
  const auto* core = unwrap<Core>(args[0]);
  if (core == nullptr) {
    return nullptr;
  }
  std::shared_ptr<Operation> operation;
  {
    const WithoutGil without;
    operation = (*core)->next_call(number);
  }
  if (!operation) {
    Py_RETURN_NONE;
  }
  PyObject* call = static_cast<PyObject*>(operation->payload);
  PyObject* handle = wrap_operation(operation, *core);
  PyObject* pair = handle == nullptr ? nullptr : PyTuple_Pack(2, handle, call);
  Py_XDECREF(handle);
  return pair;
}

PyObject* is_done(PyObject* self, PyObject* record) {
  const auto* held = unwrap<Record>(record);
  return held == nullptr ? nullptr : PyBool_FromLong(core_of(self).is_done(*held));
}

PyObject* time_of(PyObject* self, PyObject* record) {
  const auto* held = unwrap<Record>(record);
  if (held == nullptr) {
    return nullptr;
  }
  if (!core_of(self).is_done(*held)) {
    Py_RETURN_NONE;
  }
  return PyFloat_FromDouble((*held)->time);
}

PyObject* length(PyObject* self, PyObject* stream) {
  const auto* held = unwrap<Stream>(stream);
  return held == nullptr ? nullptr : PyLong_FromSize_t(core_of(self).length(*held));
}

PyObject* block_on(PyObject* self, PyObject* record) {
  Core& core = core_of(self);
  const auto* held = unwrap<Record>(record);
  if (held == nullptr) {
    return nullptr;
  }
  PyObject* outcome = blocking([&](const GoOn& go_on) { return core.block_on(*held, go_on); });
  core_of(self);
  return outcome;
}

PyObject* hold(PyObject* self, PyObject* engine) {
  int number = 0;
  if (!engine_number(engine, number)) {
    return nullptr;
  }
  core_of(self).hold(number);
  Py_RETURN_NONE;
}

PyObject* is_held(PyObject* self, PyObject* engine) {
  int number = 0;
  return engine_number(engine, number) ? PyBool_FromLong(core_of(self).is_held(number)) : nullptr;
}

PyObject* step(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  int number = 0;
  if (!check_count(num_args, 2) || !engine_number(args[0], number)) {
    return nullptr;
  }
  const unsigned long long n = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  Core& core = core_of(self);
  PyObject* outcome = blocking([&](const GoOn& go_on) { return core.step(number, n, go_on); });
  core_of(self);
  return outcome;
}

PyObject* resume(PyObject* self, PyObject* engine) {
  int number = 0;
  if (!engine_number(engine, number)) {
    return nullptr;
  }
  core_of(self).resume(number);
  Py_RETURN_NONE;
}

PyObject* fail_next(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  int number = 0;
  if (!check_count(num_args, 2) || !engine_number(args[0], number)) {
    return nullptr;
  }
  core_of(self).fail_next(number, Py_NewRef(args[1]));
  Py_RETURN_NONE;
}

PyObject* trace_calls(PyObject* self, PyObject*) {
  core_of(self).trace_calls();
  Py_RETURN_NONE;
}

// (name, id of the event or 0, id of the stream or 0, name of the thread) of calls made without Python.
PyObject* take_traced(PyObject* self, PyObject*) {
  const auto calls = core_of(self).take_traced();
  PyObject* list = PyList_New(0);
  for (const TracedCall& call : calls) {
    PyObject* tuple =
        Py_BuildValue("(sLLs)", call.name, static_cast<long long>(call.event), static_cast<long long>(call.stream),
                      call.thread.c_str());
    if (tuple == nullptr || PyList_Append(list, tuple) != 0) {
      Py_XDECREF(tuple);
      Py_CLEAR(list);
      break;
    }
    Py_DECREF(tuple);
  }
  return list;
}

PyObject* trace_operations(PyObject* self, PyObject*) {
  core_of(self).trace_operations();
  Py_RETURN_NONE;
}

// (number of the engine, id of the stream, begin, end) of what the engines have done, with and without Python.
PyObject* take_operations(PyObject* self, PyObject*) {
  const auto operations = core_of(self).take_operations();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(operations.size()));
  for (std::size_t i = 0; list != nullptr && i < operations.size(); ++i) {
    const TracedOperation& operation = operations[i];
    PyObject* tuple = Py_BuildValue("(iLdd)", operation.engine, static_cast<long long>(operation.stream),
                                    operation.begin, operation.end);
    if (tuple == nullptr) {
      Py_CLEAR(list);
      break;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), tuple);
  }
  return list;
}

// The id by which calls made without Python name a stream or an event.
PyObject* id_of(PyObject*, PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, Name<Stream>::value)) {
    return PyLong_FromLongLong((*unwrap<Stream>(capsule))->id);
  }
  const auto* event = unwrap<Event>(capsule);
  return event == nullptr ? nullptr : PyLong_FromLongLong((*event)->id);
}

// By which a data plane knows an event; valid for as long as the event is there.
PyObject* address_of(PyObject*, PyObject* event) {
  const auto* held = unwrap<Event>(event);
  return held == nullptr ? nullptr : PyLong_FromVoidPtr(held->get());
}

// plane_device(h2d stream, index stream, name of the submitting thread, name of the observing one)
PyObject* plane_device(PyObject* self, PyObject* args) {
  PyObject *h2d = nullptr, *index = nullptr;
  const char *submitter = nullptr, *observer = nullptr;
  if (!PyArg_ParseTuple(args, "OOss", &h2d, &index, &submitter, &observer)) {
    return nullptr;
  }
  const auto* h2d_ptr = unwrap<Stream>(h2d);
  const auto* index_ptr = h2d_ptr == nullptr ? nullptr : unwrap<Stream>(index);
  if (index_ptr == nullptr) {
    return nullptr;
  }
  const CorePtr& core = *reinterpret_cast<CoreObject*>(self)->core;
  return wrap<PlaneDevice>(std::make_shared<EmulatedPlaneDevice>(core, *h2d_ptr, *index_ptr, submitter, observer));
}

PyObject* stop(PyObject* self, PyObject*) {
  core_of(self).stop();
  core_of(self);
  Py_RETURN_NONE;
}

PyObject* join(PyObject* self, PyObject*) {
  Core& core = core_of(self);
  {
    const WithoutGil without;
    core.join();
  }
  core_of(self);
  Py_RETURN_NONE;
}

PyObject* forget_threads(PyObject* self, PyObject*) {
  (*reinterpret_cast<CoreObject*>(self)->core)->forget_threads();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"new_stream", new_stream, METH_O, nullptr},
    {"new_event", new_event, METH_NOARGS, nullptr},
    {"record", fast(record), METH_FASTCALL, nullptr},
    {"latest", latest, METH_O, nullptr},
    {"record_at_once", record_at_once, METH_O, nullptr},
    {"record_all", record_all, METH_NOARGS, nullptr},
    {"wait", fast(wait), METH_FASTCALL, nullptr},
    {"submit", fast(submit), METH_FASTCALL, nullptr},
    {"await_turn", await_turn, METH_O, nullptr},
    {"abandon", abandon, METH_O, nullptr},
    {"complete", complete, METH_O, nullptr},
    {"calls", calls, METH_NOARGS, nullptr},
    {"is_done", is_done, METH_O, nullptr},
    {"time_of", time_of, METH_O, nullptr},
    {"length", length, METH_O, nullptr},
    {"block_on", block_on, METH_O, nullptr},
    {"hold", hold, METH_O, nullptr},
    {"is_held", is_held, METH_O, nullptr},
    {"step", fast(step), METH_FASTCALL, nullptr},
    {"resume", resume, METH_O, nullptr},
    {"fail_next", fast(fail_next), METH_FASTCALL, nullptr},
    {"trace_calls", trace_calls, METH_NOARGS, nullptr},
    {"take_traced", take_traced, METH_NOARGS, nullptr},
    {"trace_operations", trace_operations, METH_NOARGS, nullptr},
    {"take_operations", take_operations, METH_NOARGS, nullptr},
    {"plane_device", plane_device, METH_VARARGS, nullptr},
    {"stop", stop, METH_NOARGS, nullptr},
    {"join", join, METH_NOARGS, nullptr},
    {"forget_threads", forget_threads, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef functions[] = {
    {"next_call", fast(next_call), METH_FASTCALL, nullptr},
    {"complete_call", fast(complete_call), METH_FASTCALL, nullptr},
    {"id_of", id_of, METH_O, nullptr},
    {"address_of", address_of, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_core)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"hicache_sched._native.Core", sizeof(CoreObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_core_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    return false;
  }
  const bool is_added =
      PyModule_AddObjectRef(module, "Core", type) == 0 && PyModule_AddFunctions(module, functions) == 0;
  Py_DECREF(type);
  return is_added;
}

}  // namespace hicache

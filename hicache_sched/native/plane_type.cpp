// The native data plane for Python. Methods are called with the GIL; those that block let go of it.
#include "plane_type.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.h"
#include "capsules.h"
#include "gil.h"
#include "graveyard.h"
#include "plane.h"
#include "planner_type.h"

namespace hicache {
namespace {

using PlanePtr = std::shared_ptr<Plane>;

PyTypeObject* burst_type = nullptr;
PyTypeObject* indices_type = nullptr;
PyTypeObject* plane_type = nullptr;

// A Python object that holds one of C++.
template <typename T>
struct Holder {
  PyObject_HEAD
  T* value;
};

template <typename T>
T& held(PyObject* self) {
  return *reinterpret_cast<Holder<T>*>(self)->value;
}

template <typename T>
PyObject* hold(PyTypeObject* type, T* value) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    delete value;
    return nullptr;
  }
  reinterpret_cast<Holder<T>*>(self)->value = value;
  return self;
}

template <typename T>
void dealloc(PyObject* self) {
  delete reinterpret_cast<Holder<T>*>(self)->value;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Calls what may find no memory; false with a Python error where it did not. What ends a thread by unwinding goes on.
template <typename Function>
bool guarded(Function function) {
  try {
    function();
    return true;
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {  // more than any vector can hold
  }
  PyErr_NoMemory();
  return false;
}

bool as_int64(PyObject* number, std::int64_t& value) {
  value = PyLong_AsLongLong(number);
  return value != -1 || PyErr_Occurred() == nullptr;
}

const PlanePtr* plane_of(PyObject* object) {
  if (!Py_IS_TYPE(object, plane_type)) {
    PyErr_SetString(PyExc_TypeError, "it must be a Plane");
    return nullptr;
  }
  return &held<PlanePtr>(object);
}

// -- indices ---------------------------------------------------------------------------------------------------------

using OpShares = std::vector<OpShare>;

PyObject* new_indices(PyTypeObject* type, PyObject*, PyObject*) { return hold(type, new OpShares()); }

// add(pair, src address, src stride, src on device, the same of dst, num_tokens)
PyObject* add_indices(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  std::int64_t numbers[8];
  if (!check_count(num_args, 8)) {
    return nullptr;
  }
  for (int i = 0; i < 8; ++i) {
    if (!as_int64(args[i], numbers[i])) {
      return nullptr;
    }
  }
  const bool is_added = guarded([&] {
    held<OpShares>(self).push_back({static_cast<std::size_t>(numbers[0]),
                                    {numbers[1], numbers[2], numbers[3] != 0},
                                    {numbers[4], numbers[5], numbers[6] != 0},
                                    static_cast<std::size_t>(numbers[7])});
  });
  if (!is_added) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef indices_methods[] = {
    {"add", fast(add_indices), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot indices_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_indices)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<OpShares>)},
    {Py_tp_methods, indices_methods},
    {0, nullptr},
};

PyType_Spec indices_spec = {"hicache_sched._native.Indices", sizeof(Holder<OpShares>), 0, Py_TPFLAGS_DEFAULT,
                            indices_slots};

// -- bursts ----------------------------------------------------------------------------------------------------------

// set_up(ops, start, fence, events, indices): ops keep the indices alive, which are None where the owner is to submit
// it. Once; a second time, where the first was interrupted, does nothing.
PyObject* set_up(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  Burst& burst = *held<BurstPtr>(self);
  if (burst.is_set_up) {
    Py_RETURN_NONE;
  }
  if (!check_count(num_args, 5) || !as_int64(args[1], burst.start) || !as_int64(args[2], burst.fence)) {
    return nullptr;
  }
  Int64s events;
  if (!events.borrow(args[3], "events")) {
    return nullptr;
  }
  if (events.size() != static_cast<Py_ssize_t>(burst.num_layers) + 2) {
    PyErr_SetString(PyExc_ValueError, "events must be those of the ack's start, of each layer, and of its finish");
    return nullptr;
  }
  burst.events = events.data();
  burst.needs_owner = args[4] == Py_None;
  if (!burst.needs_owner) {
    if (!Py_IS_TYPE(args[4], indices_type)) {
      PyErr_SetString(PyExc_TypeError, "indices must be an Indices");
      return nullptr;
    }
    burst.shares = std::move(held<OpShares>(args[4]));
  }
  burst.ops = kept_alive(args[0]);
  burst.is_set_up = true;  // the last: from here on another thread may read the rest
  Py_RETURN_NONE;
}

// A plan and its bases, from src_offsets, dst_offsets, sizes, plane_ends, src_base and dst_base.
void fill(Copied& copied, const Int64s (&arrays)[6]) {
  const auto put = [&](std::vector<std::int64_t>& to, int i) {
    to.insert(to.end(), arrays[i].data(), arrays[i].data() + arrays[i].size());
  };
  Plan& plan = copied.plan;
  std::vector<std::int64_t>* all[] = {&plan.src_offsets, &plan.dst_offsets, &plan.sizes, &plan.plane_ends};
  for (int i = 0; i < 4; ++i) {
    all[i]->clear();
    put(*all[i], i);
  }
  plan.columns.resize(plan.plane_ends.size());
  plan.plane_bytes.clear();
  std::size_t first = 0;
  for (const std::int64_t end : plan.plane_ends) {
    const auto last = static_cast<std::size_t>(end);
    plan.plane_bytes.push_back(
        std::accumulate(plan.sizes.data() + first, plan.sizes.data() + last, std::int64_t{0}));
    first = last;
  }
  copied.bases.clear();
  put(copied.bases, 5);
  put(copied.bases, 4);
}

// set_plan(plane, src_offsets, dst_offsets, sizes, plane_ends, src_base, dst_base): of the owner's, who has checked it;
// bases are those of all layers, one behind the other.
PyObject* set_plan(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  static constexpr const char* kNames[] = {"src_offsets", "dst_offsets", "sizes",
                                           "plane_ends",  "src_base",    "dst_base"};
  Int64s arrays[6];
  if (!check_count(num_args, 7)) {
    return nullptr;
  }
  const PlanePtr* plane = plane_of(args[0]);
  if (plane == nullptr) {
    return nullptr;
  }
  for (int i = 0; i < 6; ++i) {
    if (!arrays[i].borrow(args[i + 1], kNames[i])) {
      return nullptr;
    }
  }
  std::shared_ptr<Copied> copied;
  if (!guarded([&] { fill(*(copied = (*plane)->new_copied()), arrays); })) {
    return nullptr;
  }
  held<BurstPtr>(self)->copied = std::move(copied);
  Py_RETURN_NONE;
}

template <bool (Progress::*Ask)() const>
PyObject* get_flag(PyObject* self, void*) {
  return PyBool_FromLong((held<BurstPtr>(self)->progress.*Ask)());
}

template <Mark mark>
PyObject* get_layers(PyObject* self, void*) {
  return PyLong_FromLongLong(held<BurstPtr>(self)->progress.layers(mark));
}

PyObject* get_progress_at(PyObject* self, void*) {
  return PyFloat_FromDouble(held<BurstPtr>(self)->progress.progress_at());
}

// A time, by reference as it is not to be read before the flag that says that it is there.
PyObject* time_or_none(bool is_there, const double& time) {
  return is_there ? PyFloat_FromDouble(time) : Py_NewRef(Py_None);
}

PyObject* times_of_layers(const Progress& progress, Mark mark) {
  const std::vector<double>& times = progress.times()->layers[mark];
  const auto count = std::min(static_cast<std::size_t>(progress.layers(mark)), times.size());
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
  for (std::size_t layer = 0; tuple != nullptr && layer < count; ++layer) {
    PyObject* time = PyFloat_FromDouble(times[layer]);
    if (time == nullptr) {
      Py_CLEAR(tuple);
    } else {
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(layer), time);
    }
  }
  return tuple;
}

// When it got where, as ProgressTimes has it; None where that was not kept.
PyObject* times_of(PyObject* self, PyObject*) {
  const Progress& progress = held<BurstPtr>(self)->progress;
  const Times* times = progress.times();
  if (times == nullptr) {
    Py_RETURN_NONE;
  }
  // Py_BuildValue lets go of what it was given where one of them is null.
  return Py_BuildValue("(NNNNN)", time_or_none(progress.has_begun(), times->begun),
                       time_or_none(progress.is_planned(), times->planned),
                       time_or_none(progress.is_submitted(), times->submitted), times_of_layers(progress, kEnqueued),
                       times_of_layers(progress, kLanded));
}

PyObject* get_num_bytes(PyObject* self, void*) { return PyLong_FromLongLong(held<BurstPtr>(self)->num_bytes); }

template <void (Progress::*Step)()>
PyObject* step(PyObject* self, PyObject*) {
  (held<BurstPtr>(self)->progress.*Step)();
  Py_RETURN_NONE;
}

template <Mark mark>
PyObject* advance(PyObject* self, PyObject* layers) {
  std::int64_t number;
  if (!as_int64(layers, number)) {
    return nullptr;
  }
  held<BurstPtr>(self)->progress.advance(mark, number);
  Py_RETURN_NONE;
}

template <Mark mark>
PyObject* want(PyObject* self, PyObject* layer) {
  std::int64_t number;
  return as_int64(layer, number) ? PyBool_FromLong(held<BurstPtr>(self)->progress.want(mark, number)) : nullptr;
}

PyObject* begin(PyObject* self, PyObject*) { return PyBool_FromLong(held<BurstPtr>(self)->progress.begin()); }

PyObject* give_up(PyObject* self, PyObject* unless_begun) {
  const int answer = PyObject_IsTrue(unless_begun);
  return answer < 0 ? nullptr : PyBool_FromLong(held<BurstPtr>(self)->progress.give_up(answer == 1));
}

PyObject* mark_ended(PyObject* self, PyObject*) {
  Burst& burst = *held<BurstPtr>(self);
  burst.progress.mark_ended();
  burst.release();
  graveyard.empty();
  Py_RETURN_NONE;
}

PyObject* int64_bytes(const std::int64_t* values, std::size_t count) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values),
                                   static_cast<Py_ssize_t>(count * sizeof(std::int64_t)));
}

// The indices of a burst that was refused, as they were read: (pair, op_ends, src, dst) of each pair, bytes of int64.
PyObject* read_indices(PyObject* self, PyObject*) {
  const Burst& burst = *held<BurstPtr>(self);
  PyObject* list = PyList_New(0);
  if (list == nullptr) {
    return nullptr;
  }
  for (const Joined& joined : burst.joined) {
    const auto count = static_cast<std::size_t>(joined.op_ends.back());
    const std::int64_t* values = burst.indices->data();
    PyObject* entry = Py_BuildValue("(nNNN)", static_cast<Py_ssize_t>(joined.pair),
                                    int64_bytes(joined.op_ends.data(), joined.op_ends.size()),
                                    int64_bytes(values + joined.src_at, count),
                                    int64_bytes(values + joined.dst_at, count));
    if (entry == nullptr || PyList_Append(list, entry) != 0) {
      Py_XDECREF(entry);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(entry);
  }
  return list;
}

// The plan of a burst that a device call failed, arrays as bytes: (src_offsets, dst_offsets, sizes, plane_ends,
// columns).
PyObject* plan_of(PyObject* self, PyObject*) {
  static_assert(sizeof(std::size_t) == sizeof(std::int64_t), "columns as int64");
  const std::shared_ptr<Copied> copied = held<BurstPtr>(self)->copied;
  if (copied == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "a burst has a plan from when it was planned until it has ended");
    return nullptr;
  }
  const Plan& plan = copied->plan;
  const auto bytes = [](const auto& values) {
    return int64_bytes(reinterpret_cast<const std::int64_t*>(values.data()), values.size());
  };
  // Py_BuildValue lets go of what it was given where one of them is null.
  return Py_BuildValue("(NNNNN)", bytes(plan.src_offsets), bytes(plan.dst_offsets), bytes(plan.sizes),
                       bytes(plan.plane_ends), bytes(plan.columns));
}

PyGetSetDef burst_getters[] = {
    {"enqueued", get_layers<kEnqueued>, nullptr, nullptr, nullptr},
    {"landed", get_layers<kLanded>, nullptr, nullptr, nullptr},
    {"begun", get_flag<&Progress::has_begun>, nullptr, nullptr, nullptr},
    {"planned", get_flag<&Progress::is_planned>, nullptr, nullptr, nullptr},
    {"submitted", get_flag<&Progress::is_submitted>, nullptr, nullptr, nullptr},
    {"finish_recorded", get_flag<&Progress::is_finish_recorded>, nullptr, nullptr, nullptr},
    {"progress_at", get_progress_at, nullptr, nullptr, nullptr},
    {"num_bytes", get_num_bytes, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef burst_methods[] = {
    {"set_up", fast(set_up), METH_FASTCALL, nullptr},
    {"set_plan", fast(set_plan), METH_FASTCALL, nullptr},
    {"begin", begin, METH_NOARGS, nullptr},
    {"give_up", give_up, METH_O, nullptr},
    {"mark_planned", step<&Progress::mark_planned>, METH_NOARGS, nullptr},
    {"advance_enqueued", advance<kEnqueued>, METH_O, nullptr},
    {"advance_landed", advance<kLanded>, METH_O, nullptr},
    {"mark_finish_recorded", step<&Progress::mark_finish_recorded>, METH_NOARGS, nullptr},
    {"mark_submitted", step<&Progress::mark_submitted>, METH_NOARGS, nullptr},
    {"mark_ended", mark_ended, METH_NOARGS, nullptr},
    {"want_enqueued", want<kEnqueued>, METH_O, nullptr},
    {"want_landed", want<kLanded>, METH_O, nullptr},
    {"times", times_of, METH_NOARGS, nullptr},
    {"read_indices", read_indices, METH_NOARGS, nullptr},
    {"plan", plan_of, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot burst_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<BurstPtr>)},
    {Py_tp_methods, burst_methods},
    {Py_tp_getset, burst_getters},
    {0, nullptr},
};

PyType_Spec burst_spec = {"hicache_sched._native.Burst", sizeof(Holder<BurstPtr>), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, burst_slots};

const BurstPtr* burst_of(PyObject* object) {
  if (!Py_IS_TYPE(object, burst_type)) {
    PyErr_SetString(PyExc_TypeError, "it must be a Burst");
    return nullptr;
  }
  return &held<BurstPtr>(object);
}

// -- sleeping --------------------------------------------------------------------------------------------------------

// A thread that waits for a layer, or to be woken; for one use.
struct Sleep {
  BurstPtr burst;
  Mark mark;
  std::int64_t layer;
  Waiter waiter;
  std::atomic<bool> woken{false};

  bool is_over() const { return woken || burst->progress.has(mark, layer); }
};

constexpr double kSpin = 30e-6;  // seconds; what putting a thread to sleep and waking it takes

// Sleeper(burst, landed, layer)
PyObject* new_sleeper(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* burst = nullptr;
  int landed = 0;
  long long layer = 0;
  if (!PyArg_ParseTuple(args, "OpL", &burst, &landed, &layer)) {
    return nullptr;
  }
  const BurstPtr* ptr = burst_of(burst);
  if (ptr == nullptr) {
    return nullptr;
  }
  auto* sleep = new Sleep();
  sleep->burst = *ptr;
  sleep->mark = landed != 0 ? kLanded : kEnqueued;
  sleep->layer = layer;
  return hold(type, sleep);
}

PyObject* wake_sleeper(PyObject* self, PyObject*) {
  auto& sleep = held<Sleep>(self);
  sleep.woken = true;
  sleep.waiter.wake();
  Py_RETURN_NONE;
}

// sleep(timeout): seconds, or None; returns once it is over, or raises what a signal handler raises.
PyObject* sleep(PyObject* self, PyObject* timeout) {
  auto& sleep = held<Sleep>(self);
  const double start = now();
  double until = std::numeric_limits<double>::infinity();
  if (timeout != Py_None) {
    const double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred()) {
      return nullptr;
    }
    until = start + seconds;
  }
  bool goes_on = true;
  {
    WithoutGil without;
    while (!sleep.is_over() && now() < start + kSpin) {
    }
    Progress& progress = sleep.burst->progress;
    if (!sleep.is_over() && progress.add(sleep.mark, sleep.layer, &sleep.waiter)) {
      while (goes_on && !sleep.is_over() && now() < until) {
        const bool undisturbed =
            std::isinf(until) ? sleep.waiter.sleep() : sleep.waiter.sleep_until(until) != Slept::kInterrupted;
        goes_on = undisturbed || sleep.is_over() || without.go_on();
      }
      progress.remove(&sleep.waiter);
    }
  }
  if (!goes_on) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef sleeper_methods[] = {
    {"wake", wake_sleeper, METH_NOARGS, nullptr},
    {"sleep", sleep, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot sleeper_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_sleeper)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Sleep>)},
    {Py_tp_methods, sleeper_methods},
    {0, nullptr},
};

PyType_Spec sleeper_spec = {"hicache_sched._native.Sleeper", sizeof(Holder<Sleep>), 0, Py_TPFLAGS_DEFAULT,
                            sleeper_slots};

// -- the plane -------------------------------------------------------------------------------------------------------

// Plane(device, planner, num_layers, dst_base, src_base, pools, max_layers, patience): bases are those of all layers,
// one behind the other; pools is what keeps their memory alive. The planner is None where the owner is to submit every
// burst.
PyObject* new_plane(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *device = nullptr, *planner = nullptr, *dst = nullptr, *src = nullptr, *pools = nullptr;
  Py_ssize_t num_layers = 0, max_layers = 0;
  double patience = 0;
  if (!PyArg_ParseTuple(args, "OOnOOOnd", &device, &planner, &num_layers, &dst, &src, &pools, &max_layers,
                        &patience)) {
    return nullptr;
  }
  const auto* device_ptr = unwrap<PlaneDevice>(device);
  if (device_ptr == nullptr) {
    return nullptr;
  }
  const std::shared_ptr<Planner> none;
  const auto* planner_ptr = planner == Py_None ? &none : planner_of(planner);
  Int64s dst_base, src_base;
  if (planner_ptr == nullptr || !dst_base.borrow(dst, "dst_base") || !src_base.borrow(src, "src_base")) {
    return nullptr;
  }
  if (max_layers < 1) {
    PyErr_SetString(PyExc_ValueError, "max_layers must be positive");
    return nullptr;
  }
  if (num_layers < 1 || dst_base.size() % num_layers != 0 || dst_base.size() != src_base.size()) {
    PyErr_SetString(PyExc_ValueError, "dst_base and src_base must have the same planes for each layer");
    return nullptr;
  }
  Bases bases;
  bases.num_layers = static_cast<std::size_t>(num_layers);
  bases.num_planes = static_cast<std::size_t>(dst_base.size() / num_layers);
  bases.dst.assign(dst_base.data(), dst_base.data() + dst_base.size());
  bases.src.assign(src_base.data(), src_base.data() + src_base.size());
  try {
    auto plane =
        std::make_shared<Plane>(*device_ptr, *planner_ptr, std::move(bases), kept_alive(pools),
                                static_cast<std::size_t>(max_layers), patience);
    return hold(type, new PlanePtr(std::move(plane)));
  } catch (const std::exception& error) {
    PyErr_Format(PyExc_OSError, "cannot make a data plane: %s", error.what());
    return nullptr;
  }
}

// new_burst(whether it keeps times)
PyObject* new_burst(PyObject* self, PyObject* keeps_times) {
  const int keeps = PyObject_IsTrue(keeps_times);
  if (keeps < 0) {
    return nullptr;
  }
  BurstPtr* burst = nullptr;
  const bool is_made = guarded([&] { burst = new BurstPtr(held<PlanePtr>(self)->new_burst(keeps == 1)); });
  return is_made ? hold(burst_type, burst) : nullptr;
}

// hand_over(burst, its id)
PyObject* hand_over(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  std::int64_t id;
  const BurstPtr* burst = check_count(num_args, 2) ? burst_of(args[0]) : nullptr;
  if (burst == nullptr || !as_int64(args[1], id)) {
    return nullptr;
  }
  if (!guarded([&] { held<PlanePtr>(self)->hand_over(*burst, id); })) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* pop_report(PyObject* self, PyObject* id) {
  std::int64_t number;
  if (!as_int64(id, number)) {
    return nullptr;
  }
  held<PlanePtr>(self)->pop_report(number);
  Py_RETURN_NONE;
}

// (kind, call, code, refusal, copy); None for one that is well.
PyObject* status_tuple(const Status& status) {
  static constexpr const char* kKinds[] = {"ok", "lost", "refused", "driver", "invalid", "given up", "stopped"};
  if (status.is_ok()) {
    Py_RETURN_NONE;
  }
  PyObject* refusal = status.refusal == nullptr ? Py_NewRef(Py_None) : static_cast<PyObject*>(status.refusal);
  PyObject* copy = status.copy == Status::kNoCopy ? Py_NewRef(Py_None) : PyLong_FromSize_t(status.copy);
  return Py_BuildValue("(ssiNN)", kKinds[status.kind], status.call, status.code, refusal, copy);
}

// (why, id of the burst, status); None where it was told to stop.
PyObject* stop_tuple(const Plane::Stop& stop) {
  static constexpr const char* kReasons[] = {"told", "needs owner", "interrupted", "failed", "over"};
  if (stop.why == Plane::Stop::kTold) {
    Py_RETURN_NONE;
  }
  return Py_BuildValue("(sLN)", kReasons[stop.why], static_cast<long long>(stop.burst->id), status_tuple(stop.status));
}

template <Plane::Stop (Plane::*Live)()>
PyObject* live(PyObject* self, PyObject*) {
  const PlanePtr plane = held<PlanePtr>(self);
  Plane::Stop stop;
  const bool is_well = guarded([&] {  // a burst for which there was no memory comes out interrupted the next time
    const WithoutGil without;
    stop = ((*plane).*Live)();
  });
  return is_well ? stop_tuple(stop) : nullptr;
}

PyObject* observe(PyObject* self, PyObject*) {
  const PlanePtr plane = held<PlanePtr>(self);
  const bool is_well = guarded([&] {  // what there was no memory to report is followed again the next time
    const WithoutGil without;
    plane->observe();
  });
  if (!is_well) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* report(PyObject* self, PyObject*) { return stop_tuple(held<PlanePtr>(self)->report()); }

template <void (Plane::*Tell)()>
PyObject* tell(PyObject* self, PyObject*) {
  ((*held<PlanePtr>(self)).*Tell)();
  Py_RETURN_NONE;
}

PyObject* let_go(PyObject* self, PyObject*) {
  held<PlanePtr>(self)->let_go();
  graveyard.empty();
  Py_RETURN_NONE;
}

PyObject* get_doorbell(PyObject* self, void*) { return PyLong_FromLong(held<PlanePtr>(self)->doorbell().fd()); }

PyObject* get_alarm(PyObject* self, void*) { return PyLong_FromLong(held<PlanePtr>(self)->alarm().fd()); }

PyObject* hear_alarm(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(held<PlanePtr>(self)->hear_alarm());
}

PyObject* hear_doorbell(PyObject* self, PyObject*) {
  held<PlanePtr>(self)->doorbell().silence();
  Py_RETURN_NONE;
}

PyObject* has_room_for(PyObject* self, PyObject* layers) {
  std::int64_t number;
  return as_int64(layers, number)
             ? PyBool_FromLong(held<PlanePtr>(self)->has_room_for(static_cast<std::size_t>(number)))
             : nullptr;
}

PyObject* make_room(PyObject* self, PyObject*) {
  const PlanePtr plane = held<PlanePtr>(self);
  if (plane->has_room_for(1)) {  // a thread that lets go of the GIL for a moment keeps those that wait for it from it
    Py_RETURN_NONE;
  }
  Status status;
  {
    const WithoutGil without;
    status = plane->make_room();
  }
  return status_tuple(status);
}

PyObject* submit_layers(PyObject* self, PyObject* burst) {
  const BurstPtr* ptr = burst_of(burst);
  if (ptr == nullptr) {
    return nullptr;
  }
  const PlanePtr plane = held<PlanePtr>(self);
  const BurstPtr kept = *ptr;
  Status status;
  const bool is_well = guarded([&] {
    const WithoutGil without;
    status = plane->submit_layers(kept);
  });
  return is_well ? status_tuple(status) : nullptr;
}

PyObject* add_layer(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  std::int64_t layer;
  const BurstPtr* burst = check_count(num_args, 2) ? burst_of(args[0]) : nullptr;
  if (burst == nullptr || !as_int64(args[1], layer)) {
    return nullptr;
  }
  if (!guarded([&] { held<PlanePtr>(self)->add_layer(*burst, layer); })) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyGetSetDef plane_getters[] = {
    {"doorbell_fd", get_doorbell, nullptr, nullptr, nullptr},
    {"alarm_fd", get_alarm, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef plane_methods[] = {
    {"new_burst", new_burst, METH_O, nullptr},
    {"hand_over", fast(hand_over), METH_FASTCALL, nullptr},
    {"submit", live<&Plane::submit>, METH_NOARGS, nullptr},
    {"observe", observe, METH_NOARGS, nullptr},
    {"next_report", live<&Plane::next_report>, METH_NOARGS, nullptr},
    {"report", report, METH_NOARGS, nullptr},
    {"leave_report", tell<&Plane::leave_report>, METH_NOARGS, nullptr},
    {"pop_report", pop_report, METH_O, nullptr},
    {"stop", tell<&Plane::stop>, METH_NOARGS, nullptr},
    {"abandon", tell<&Plane::abandon>, METH_NOARGS, nullptr},
    {"let_go", let_go, METH_NOARGS, nullptr},
    {"hear_doorbell", hear_doorbell, METH_NOARGS, nullptr},
    {"hear_alarm", hear_alarm, METH_NOARGS, nullptr},
    {"has_room_for", has_room_for, METH_O, nullptr},
    {"make_room", make_room, METH_NOARGS, nullptr},
    {"add_layer", fast(add_layer), METH_FASTCALL, nullptr},
    {"submit_layers", submit_layers, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot plane_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_plane)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<PlanePtr>)},
    {Py_tp_methods, plane_methods},
    {Py_tp_getset, plane_getters},
    {0, nullptr},
};

PyType_Spec plane_spec = {"hicache_sched._native.Plane", sizeof(Holder<PlanePtr>), 0, Py_TPFLAGS_DEFAULT, plane_slots};

PyTypeObject* add_type(PyObject* module, const char* name, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type != nullptr && PyModule_AddObjectRef(module, name, type) != 0) {
    Py_CLEAR(type);
  }
  return reinterpret_cast<PyTypeObject*>(type);  // a reference of this file's, for the life of the process
}

}  // namespace

bool add_plane_types(PyObject* module) {
  burst_type = add_type(module, "Burst", burst_spec);
  indices_type = add_type(module, "Indices", indices_spec);
  plane_type = add_type(module, "Plane", plane_spec);
  return burst_type != nullptr && indices_type != nullptr && plane_type != nullptr &&
         add_type(module, "Sleeper", sleeper_spec) != nullptr;
}

}  // namespace hicache

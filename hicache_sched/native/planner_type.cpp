// `Planner` for Python. Whoever has one plans one burst at a time.
#include "planner_type.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.h"
#include "gil.h"

namespace hicache {
namespace {

constexpr Py_ssize_t kPairNumbers = 5, kPlaneNumbers = 7;

struct PlannerObject {
  PyObject_HEAD
  std::shared_ptr<Planner>* planner;
  Plan* plan;  // the last one, for its memory
};

// Set once, by add_planner_type, and kept.
PyTypeObject* planner_type = nullptr;

// False, with a Python error, where the numbers are not those of pairs and of planes that follow them.
bool read_layouts(const Int64s& pairs, const Int64s& planes, std::vector<PairLayout>& layouts) {
  if (pairs.size() == 0 || pairs.size() % kPairNumbers != 0) {
    PyErr_Format(PyExc_ValueError, "pairs must have %zd numbers a pair, not %zd in all", kPairNumbers, pairs.size());
    return false;
  }
  if (planes.size() % kPlaneNumbers != 0) {
    PyErr_Format(PyExc_ValueError, "planes must have %zd numbers a plane, not %zd in all", kPlaneNumbers,
                 planes.size());
    return false;
  }
  for (const std::int64_t* it = pairs.data(); it != pairs.data() + pairs.size(); it += kPairNumbers) {
    layouts.push_back({it[0], it[1], it[2], it[3], it[4], {}});
  }
  const auto num_pairs = static_cast<long long>(layouts.size());
  long long last = 0;
  for (const std::int64_t* it = planes.data(); it != planes.data() + planes.size(); it += kPlaneNumbers) {
    const long long number = it[0];
    if (number < last || number >= num_pairs) {
      PyErr_Format(PyExc_ValueError, "planes must ascend by their pair, of which there are %lld: pair %lld after %lld",
                   num_pairs, number, last);
      return false;
    }
    last = number;
    layouts[static_cast<std::size_t>(number)].planes.push_back({{it[1], it[2], it[3]}, {it[4], it[5], it[6]}});
  }
  return true;
}

PyObject* new_planner(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *pairs_array, *planes_array;
  Int64s pairs, planes;
  if (!PyArg_ParseTuple(args, "OO", &pairs_array, &planes_array) || !pairs.borrow(pairs_array, "pairs") ||
      !planes.borrow(planes_array, "planes")) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    return nullptr;
  }
  auto* object = reinterpret_cast<PlannerObject*>(self);
  try {
    std::vector<PairLayout> layouts;
    if (read_layouts(pairs, planes, layouts)) {
      object->plan = new Plan;
      object->planner = new std::shared_ptr<Planner>(std::make_shared<Planner>(std::move(layouts)));
      return self;
    }
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception&) {
    PyErr_NoMemory();  // a pool as large as that
  }
  Py_DECREF(self);
  return nullptr;
}

void dealloc(PyObject* self) {
  auto* object = reinterpret_cast<PlannerObject*>(self);
  delete object->planner;
  delete object->plan;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The arrays of a share, held for as long as the burst is planned.
struct HeldShare {
  Int64s src, dst, op_ends;
};

// False, with a Python error, where `item` is not (pair, src, dst, op_ends) with indices of the same tokens.
bool read_share(PyObject* item, std::size_t num_pairs, HeldShare& held, Share& share) {
  if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4) {
    PyErr_SetString(PyExc_TypeError, "a share must be a tuple (pair, src, dst, op_ends)");
    return false;
  }
  share.pair = PyLong_AsSize_t(PyTuple_GET_ITEM(item, 0));
  if (PyErr_Occurred()) {
    return false;
  }
  if (share.pair >= num_pairs) {
    PyErr_Format(PyExc_ValueError, "there is no pair %zu, only %zu of them", share.pair, num_pairs);
    return false;
  }
  if (!held.src.borrow(PyTuple_GET_ITEM(item, 1), "src") || !held.dst.borrow(PyTuple_GET_ITEM(item, 2), "dst") ||
      !held.op_ends.borrow(PyTuple_GET_ITEM(item, 3), "op_ends")) {
    return false;
  }
  const Py_ssize_t num_tokens = held.src.size(), num_ops = held.op_ends.size();
  if (num_tokens == 0 || held.dst.size() != num_tokens) {
    PyErr_Format(PyExc_ValueError, "src and dst of pair %zu must have the same tokens, and some, not %zd and %zd",
                 share.pair, num_tokens, held.dst.size());
    return false;
  }
  if (num_ops == 0 || held.op_ends.data()[num_ops - 1] != num_tokens) {
    PyErr_Format(PyExc_ValueError, "op_ends of pair %zu must end with its %zd tokens", share.pair, num_tokens);
    return false;
  }
  share.src = held.src.data(), share.dst = held.dst.data(), share.op_ends = held.op_ends.data();
  share.num_ops = static_cast<std::size_t>(num_ops), share.num_tokens = static_cast<std::size_t>(num_tokens);
  return true;
}

template <typename T>
PyObject* as_bytes(const std::vector<T>& values) {
  static_assert(sizeof(T) == sizeof(std::int64_t), "int64 data");
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                   static_cast<Py_ssize_t>(values.size() * sizeof(T)));
}

PyObject* plan(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 1 || !PyTuple_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "plan(shares) takes a tuple of shares");
    return nullptr;
  }
  auto* object = reinterpret_cast<PlannerObject*>(self);
  Planner& planner = **object->planner;
  Plan& made = *object->plan;
  const auto num_shares = static_cast<std::size_t>(PyTuple_GET_SIZE(args[0]));
  bool is_planned = false;
  try {
    std::vector<HeldShare> held(num_shares);
    std::vector<Share> shares(num_shares);
    for (std::size_t i = 0; i < num_shares; ++i) {
      if (!read_share(PyTuple_GET_ITEM(args[0], static_cast<Py_ssize_t>(i)), planner.num_pairs(), held[i], shares[i])) {
        return nullptr;
      }
      if (i > 0 && shares[i].pair <= shares[i - 1].pair) {
        PyErr_SetString(PyExc_ValueError, "shares must ascend by their pair, one of each at most");
        return nullptr;
      }
    }
    const WithoutGil without;
    is_planned = planner.plan(shares, made);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  if (!is_planned) {
    Py_RETURN_NONE;
  }
  // Py_BuildValue lets go of what it was given where one of them is null.
  return Py_BuildValue("(NNNNN)", as_bytes(made.src_offsets), as_bytes(made.dst_offsets), as_bytes(made.sizes),
                       as_bytes(made.plane_ends), as_bytes(made.columns));
}

PyMethodDef methods[] = {
    {"plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(plan)), METH_FASTCALL,
     "plan(shares): arrays of a burst's plan, None where it is refused; without the GIL."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_planner)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"hicache_sched._native.Planner", sizeof(PlannerObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_planner_type(PyObject* module) {
  if (planner_type == nullptr) {
    planner_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return planner_type != nullptr &&
         PyModule_AddObjectRef(module, "Planner", reinterpret_cast<PyObject*>(planner_type)) == 0;
}

const std::shared_ptr<Planner>* planner_of(PyObject* object) {
  if (!Py_IS_TYPE(object, planner_type)) {
    PyErr_Format(PyExc_TypeError, "a planner must be a Planner, not %R", object);
    return nullptr;
  }
  return reinterpret_cast<PlannerObject*>(object)->planner;
}

}  // namespace hicache

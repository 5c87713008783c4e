// Python objects that C++ keeps alive, and lets go of where it may not touch them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <memory>

namespace hicache {

// Objects to be released by the next thread that comes along with the GIL and no lock. Nothing here blocks, so a forked
// child may use it, whatever its parent was at.
class Graveyard {
 public:
  void bury(PyObject* object) {
    auto* grave = new Grave{object, top_.load(std::memory_order_relaxed)};
    while (!top_.compare_exchange_weak(grave->next, grave, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  // With the GIL, and no lock held: what is released may call anything.
  void empty() {
    if (top_.load(std::memory_order_relaxed) == nullptr) {
      return;
    }
    Grave* grave = top_.exchange(nullptr, std::memory_order_acquire);
    while (grave != nullptr) {
      Grave* next = grave->next;
      Py_DECREF(grave->object);
      delete grave;
      grave = next;
    }
  }

 private:
  struct Grave {
    PyObject* object;
    Grave* next;
  };
  std::atomic<Grave*> top_{nullptr};
};

inline Graveyard graveyard;

// Keeps an object alive for as long as anybody has this; made with the GIL, gone without it.
inline std::shared_ptr<const void> kept_alive(PyObject* object) {
  return {Py_NewRef(object), [](PyObject* kept) { graveyard.bury(kept); }};
}

}  // namespace hicache

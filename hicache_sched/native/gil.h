// Letting go of the GIL, and taking it back.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

namespace hicache {

#if PY_VERSION_HEX >= 0x030d0000
inline bool is_finalizing() { return Py_IsFinalizing() != 0; }
#else
inline bool is_finalizing() { return _Py_IsFinalizing() != 0; }
#endif

// Once the interpreter ends, a thread that asks for the GIL is ended in the middle of these frames, before CPython
// 3.14; it sleeps instead, for the moment that is left.
inline void take_gil(PyThreadState* state) {
  while (is_finalizing()) {
    pause();
  }
  PyEval_RestoreThread(state);
}

class WithoutGil {
 public:
  // The thread that ends the interpreter keeps the GIL: it is the last that needs it.
  WithoutGil() : state_(is_finalizing() ? nullptr : PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(false) {  // where the thread is ended all the same, by unwinding
    if (state_ != nullptr) {
      take_gil(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // For a wait that a signal has interrupted: whether to go on, which Python's handlers say.
  bool go_on() {
    if (state_ == nullptr) {
      return true;
    }
    take_gil(state_);
    const bool goes_on = PyErr_CheckSignals() == 0;
    state_ = PyEval_SaveThread();
    return goes_on;
  }

 private:
  PyThreadState* state_;
};

}  // namespace hicache

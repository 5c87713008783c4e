// Whoever blocks does so here and not on a condition variable: a signal interrupts it, and a forked child can forget
// it.
#pragma once

#include <semaphore.h>

#include <ctime>

namespace hicache {

double now();  // seconds, as Python's time.monotonic

enum class Slept { kWoken, kInTime, kInterrupted };  // kInterrupted: a signal came first

class Waiter {
 public:
  Waiter() { sem_init(&semaphore_, 0, 0); }
  ~Waiter() { sem_destroy(&semaphore_); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  void wake() { sem_post(&semaphore_); }
  bool sleep() { return heard(sem_wait(&semaphore_) == 0); }  // false where a signal came first
  Slept sleep_until(double time);  // kInTime after a while, but at `time`, as of now(), at the latest

 private:
  // Whoever sleeps looks for himself afterwards, so that one wake-up does for all that came before it; else those that
  // he did not have to wait for would be slept through one by one.
  bool heard(bool was_woken) {
    while (was_woken && sem_trywait(&semaphore_) == 0) {
    }
    return was_woken;
  }

  sem_t semaphore_;
};

}  // namespace hicache

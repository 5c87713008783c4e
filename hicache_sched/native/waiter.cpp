#include "waiter.h"

#include <algorithm>
#include <cerrno>
#include <cmath>

namespace hicache {
namespace {

constexpr double kLongest = 1.0;  // seconds of one sleep: it is timed by a clock that can be set

}  // namespace

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

Slept Waiter::sleep_until(double time) {
  const double seconds = std::clamp(time - now(), 0.0, kLongest);
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += static_cast<time_t>(seconds);
  until.tv_nsec += static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  if (until.tv_nsec >= 1'000'000'000) {
    until.tv_nsec -= 1'000'000'000;
    ++until.tv_sec;
  }
  if (heard(sem_timedwait(&semaphore_, &until) == 0)) {
    return Slept::kWoken;
  }
  return errno == EINTR ? Slept::kInterrupted : Slept::kInTime;
}

}  // namespace hicache

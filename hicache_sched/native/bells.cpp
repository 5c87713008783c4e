#include "bells.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <system_error>

namespace hicache {
namespace {

constexpr double kShortest = 1e-9, kLongest = 1e9;  // seconds: 0 would unset it, and what time_t holds is finite

void set_timer(int fd, double seconds) {
  itimerspec time{};
  time.it_value.tv_sec = static_cast<time_t>(seconds);
  time.it_value.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  timerfd_settime(fd, 0, &time, nullptr);  // fails for what is no timer and no time only
}

}  // namespace

Bell::Bell(int fd, const char* what) : fd_(fd) {
  if (fd < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
}

Bell::~Bell() { close(fd_); }

Doorbell::Doorbell() : Bell(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd") {}

void Doorbell::ring() {
  // Fails only where the counter is full, and then it has been rung.
  [[maybe_unused]] const int ignored = eventfd_write(fd(), 1);
}

void Doorbell::silence() {
  eventfd_t count;
  [[maybe_unused]] const int ignored = eventfd_read(fd(), &count);  // fails where it has not rung
}

Alarm::Alarm() : Bell(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), "timerfd_create") {}

void Alarm::set(double seconds) { set_timer(fd(), std::clamp(seconds, kShortest, kLongest)); }

void Alarm::unset() { set_timer(fd(), 0); }

}  // namespace hicache

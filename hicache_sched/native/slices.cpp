#include "slices.h"

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace hicache {

#if defined(__linux__) && defined(SYS_sched_setattr)

namespace {

// The first version of the kernel's `struct sched_attr`, which glibc has from 2.41 on.
struct SchedAttr {
  std::uint32_t size;
  std::uint32_t policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t runtime;  // nanoseconds
  std::uint64_t deadline;
  std::uint64_t period;
};

constexpr std::uint64_t kShortest = 100'000;  // what the kernel takes shorter ones for

}  // namespace

void ask_for_short_slices() {
  SchedAttr attr{};
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0) != 0 || attr.policy != SCHED_OTHER) {
    return;  // somebody has decided how it is scheduled
  }
  attr.runtime = kShortest;
  syscall(SYS_sched_setattr, 0, &attr, 0);
}

#else

void ask_for_short_slices() {}

#endif

}  // namespace hicache

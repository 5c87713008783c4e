// A device, as the native data plane calls it. Nothing here knows Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy.h"

namespace hicache {

using Handle = std::int64_t;  // of an event; 0 for none

// How a call ended.
struct Status {
  enum Kind {
    kOk,
    kLost,     // every call on the device fails
    kRefused,  // the emulated device was told to: `refusal` is what it was told with
    kDriver,   // the driver's function `call` failed with `code`, and blames copy number `copy` if it blames one
    kInvalid,  // the burst's indices are not what they should be
    kGivenUp,  // somebody else has failed the burst
    kStopped,  // the process ends
  };
  static constexpr std::size_t kNoCopy = static_cast<std::size_t>(-1);

  Kind kind = kOk;
  const char* call = "";
  int code = 0;
  void* refusal = nullptr;
  std::size_t copy = kNoCopy;

  bool is_ok() const { return kind == kOk; }
};

// Values of int64 in memory of the device, to be brought to the host.
struct Read {
  std::int64_t* to;
  std::int64_t from;    // address
  std::int64_t stride;  // in values
  std::size_t count;
};

// The data plane's threads.
enum class Caller { kSubmitter, kObserver };

// Two threads may call at a time. What is put on a stream is kept alive by `memory` until it is done.
class PlaneDevice {
 public:
  virtual ~PlaneDevice() = default;
  virtual Status synchronize(Handle event, Caller caller) = 0;  // blocks until it has been reached
  virtual bool is_reached(Handle event) = 0;  // false also where that cannot be told
  virtual Status wait_on_index_stream(Handle event) = 0;  // order that stream behind it
  virtual Status wait_on_h2d_stream(Handle event) = 0;
  virtual Status record(Handle event) = 0;  // on the h2d stream
  // On the index stream; blocks.
  virtual Status read(const std::vector<Read>& reads, std::shared_ptr<const void> memory) = 0;
  // On the h2d stream.
  virtual Status copy(const Copies& copies, std::int64_t nbytes, std::shared_ptr<const void> memory) = 0;
};

}  // namespace hicache

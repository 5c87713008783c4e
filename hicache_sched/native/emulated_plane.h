// The emulated device, as the native data plane calls it. Nothing here knows Python.
#pragma once

#include <memory>
#include <string>

#include "core.h"
#include "plane_device.h"

namespace hicache {

// Events are known by their addresses. Calls are listed as made by the threads whose names are given.
class EmulatedPlaneDevice final : public PlaneDevice {
 public:
  EmulatedPlaneDevice(std::shared_ptr<Core> core, std::shared_ptr<Stream> h2d, std::shared_ptr<Stream> index,
                      std::string submitter, std::string observer)
      : core_(std::move(core)),
        h2d_(std::move(h2d)),
        index_(std::move(index)),
        submitter_(std::move(submitter)),
        observer_(std::move(observer)) {}

  Status synchronize(Handle event, Caller caller) override;
  bool is_reached(Handle event) override;
  Status wait_on_index_stream(Handle event) override;
  Status wait_on_h2d_stream(Handle event) override;
  Status record(Handle event) override;
  Status read(const std::vector<Read>& reads, std::shared_ptr<const void> memory) override;
  Status copy(const Copies& copies, std::int64_t nbytes, std::shared_ptr<const void> memory) override;

 private:
  Status operate(const std::shared_ptr<Stream>& stream, int engine, const Copies& copies, std::int64_t nbytes,
                 std::shared_ptr<const void> memory);

  const std::shared_ptr<Core> core_;
  const std::shared_ptr<Stream> h2d_, index_;
  const std::string submitter_, observer_;
};

}  // namespace hicache

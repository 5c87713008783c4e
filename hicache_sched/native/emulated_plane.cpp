#include "emulated_plane.h"

#include <utility>

namespace hicache {
namespace {

constexpr int kH2d = 1, kD2h = 2;

bool always() { return true; }  // a signal is not this thread's

Event& event_at(Handle event) { return *reinterpret_cast<Event*>(event); }

Status lost_unless(bool is_there) {
  Status status;
  status.kind = is_there ? Status::kOk : Status::kLost;
  return status;
}

// Reads as copies, with the arrays that describe them.
struct ReadCopies {
  std::vector<std::int64_t> dst, src, sizes;
  std::shared_ptr<const void> memory;

  void add(std::int64_t to, std::int64_t from, std::size_t values) {
    dst.push_back(to);
    src.push_back(from);
    sizes.push_back(static_cast<std::int64_t>(values * sizeof(std::int64_t)));
  }
};

}  // namespace

Status EmulatedPlaneDevice::synchronize(Handle event, Caller caller) {
  const std::string& name = caller == Caller::kSubmitter ? submitter_ : observer_;
  return lost_unless(core_->synchronize(event_at(event), always, name.c_str()) == Outcome::kDone);
}

bool EmulatedPlaneDevice::is_reached(Handle event) { return core_->query(event_at(event)); }

Status EmulatedPlaneDevice::wait_on_index_stream(Handle event) {
  return lost_unless(core_->wait_event(index_, event_at(event), always, submitter_.c_str()));
}

Status EmulatedPlaneDevice::wait_on_h2d_stream(Handle event) {
  return lost_unless(core_->wait_event(h2d_, event_at(event), always, submitter_.c_str()));
}

Status EmulatedPlaneDevice::record(Handle event) {
  return lost_unless(core_->record(h2d_, event_at(event), always, submitter_.c_str()));
}

Status EmulatedPlaneDevice::read(const std::vector<Read>& reads, std::shared_ptr<const void> memory) {
  auto copies = std::make_shared<ReadCopies>();
  copies->memory = std::move(memory);
  std::size_t values = 0;
  for (const Read& read : reads) {
    values += read.count;
    if (read.stride == 1) {
      copies->add(reinterpret_cast<std::int64_t>(read.to), read.from, read.count);
      continue;
    }
    const auto bytes = read.stride * static_cast<std::int64_t>(sizeof(std::int64_t));
    for (std::size_t i = 0; i < read.count; ++i) {
      copies->add(reinterpret_cast<std::int64_t>(read.to + i), read.from + static_cast<std::int64_t>(i) * bytes, 1);
    }
  }
  const Copies all{copies->dst.data(), copies->src.data(), copies->sizes.data(), copies->sizes.size()};
  const Status status = operate(index_, kD2h, all, static_cast<std::int64_t>(values * sizeof(std::int64_t)), copies);
  if (!status.is_ok()) {
    return status;
  }
  const auto done = core_->record_at_once(index_);
  return lost_unless(done != nullptr && core_->block_on(done, always) == Outcome::kDone);
}

Status EmulatedPlaneDevice::copy(const Copies& copies, std::int64_t nbytes, std::shared_ptr<const void> memory) {
  return operate(h2d_, kH2d, copies, nbytes, std::move(memory));
}

Status EmulatedPlaneDevice::operate(const std::shared_ptr<Stream>& stream, int engine, const Copies& copies,
                                    std::int64_t nbytes, std::shared_ptr<const void> memory) {
  auto operation = std::make_shared<Operation>();
  operation->stream = stream;
  operation->copies = copies;
  operation->memory = std::move(memory);
  Status status;
  if (!core_->submit(operation, engine, nbytes, always, status.refusal)) {
    status.kind = status.refusal == nullptr ? Status::kLost : Status::kRefused;
  }
  return status;
}

}  // namespace hicache

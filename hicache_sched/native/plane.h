// The native data plane: bursts from hand-out to landed, without Python.
//
// Threads: two of the owner's, which have no need of Python meanwhile, live in `submit` and in `observe`. `submit`
// takes bursts in the order of `hand_over` and makes every device call of theirs but the waits for landed layers, which
// `observe` makes. `submit` comes out where it needs its owner, who sees to that and calls again; `observe` leaves
// reports, in order, and goes on, so that it never waits for Python. A third thread sleeps in `next_report`; whoever
// deals with a report pops it. What else there is is called on any thread and does not block. A burst is everybody's;
// see progress.h for what of it may be asked when.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bells.h"
#include "plane_device.h"
#include "planner.h"
#include "progress.h"
#include "recycler.h"

namespace hicache {

// Token indices of a load op, in memory of the host or of the device.
struct Indices {
  std::int64_t address;
  std::int64_t stride;  // in values
  bool on_device;       // read in order of the index stream
};

// What a load op moves through one pair of pools.
struct OpShare {
  std::size_t pair;
  Indices src, dst;
  std::size_t num_tokens;
};

// A burst's indices joined, for one pair of pools.
struct Joined {
  std::size_t pair;
  std::vector<std::int64_t> op_ends;
  std::size_t src_at = 0, dst_at = 0;  // where in the burst's memory for indices
};

// The base addresses of every plane in each transfer layer, [num_layers, num_planes]; 0 where a layer has none.
struct Bases {
  std::size_t num_layers = 0, num_planes = 0;
  std::vector<std::int64_t> dst, src;
};

// What a burst copies, and between which addresses; kept until its copies have been made.
struct Copied {
  Plan plan;
  std::vector<std::int64_t> bases;  // dst, then src, of the plan's planes; none where those are all there are:
  std::shared_ptr<const Bases> all;
  std::shared_ptr<const void> pools;  // their memory
};

struct Burst {
  Burst(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<Waiter> observer, std::size_t layers, bool keeps_times)
      : progress(std::move(doorbell), std::move(observer), keeps_times ? std::make_unique<Times>(layers) : nullptr),
        num_layers(layers) {}

  Progress progress;
  const std::size_t num_layers;

  // Set before it is handed over.
  std::atomic<bool> is_set_up{false};  // else it is not to be begun, as its hand-out was interrupted
  bool needs_owner = false;  // its indices cannot be read here
  std::vector<OpShare> shares;
  std::shared_ptr<const void> ops;  // the memory of the indices
  Handle start = 0, fence = 0;
  const Handle* events = nullptr;  // the start of the ack, each layer, its finish: num_layers + 2
  std::int64_t id = 0;             // by which its owner knows it; from 1, in order
  double handed_over_at = 0;       // seconds; the plane's, with its mutex

  // The submitting thread's, and the owner's after that.
  std::vector<Joined> joined;
  std::shared_ptr<std::vector<std::int64_t>> indices;
  std::shared_ptr<Copied> copied;
  std::int64_t num_bytes = 0;

  // The observing thread's.
  bool has_failed_on_device = false;  // layers are not waited for any more
  bool is_followed = false;           // to its end: its events may be those of another burst soon

  // It has ended: let go of all that is large.
  void release() {
    ops = nullptr;
    joined.clear();
    indices = nullptr;
    copied = nullptr;
  }
};

using BurstPtr = std::shared_ptr<Burst>;

class Plane {
 public:
  // What the owner is told; no burst where a thread comes out because it was told to.
  struct Stop {
    enum Why {
      kTold,
      kNeedsOwner,   // submit: it has not begun and is the owner's to submit
      kInterrupted,  // submit: the owner was in the middle of it, of setting it up or of submitting it
      kFailed,       // submit, or a report: at the layer that is not enqueued, or has not landed
      kOver,         // a report: all that was submitted has landed, if it has begun
    };
    BurstPtr burst;
    Why why = kTold;
    Status status;
  };

  // pools: keeps the memory that is copied alive. max_layers: that may be in flight, see LayersInFlight in Python.
  // patience: seconds after which the alarm rings for what has not ended.
  Plane(std::shared_ptr<PlaneDevice> device, std::shared_ptr<Planner> planner, Bases bases,
        std::shared_ptr<const void> pools, std::size_t max_layers, double patience);

  std::shared_ptr<Copied> new_copied() const {
    auto copied = copied_->take();
    copied->all = bases_;
    copied->pools = pools_;
    return copied;
  }
  BurstPtr new_burst(bool keeps_times) const {
    return std::make_shared<Burst>(doorbell_, observer_, bases_->num_layers, keeps_times);
  }
  void hand_over(const BurstPtr& burst, std::int64_t id);  // a second time, where the first was interrupted
  Stop submit();       // blocks
  void observe();      // blocks
  Stop next_report();  // blocks; the same again until it is popped
  Stop report();       // the same at once, kTold where there is none, for somebody who deals with it or else calls
  void leave_report();
  void pop_report(std::int64_t id);  // if that burst's is the first
  void stop();     // those that block come out once there is nothing to do
  void abandon();  // they come out between two operations

  // For an owner who plans, on the submitting thread: submits a burst that has begun and knows what to copy. Blocks.
  Status submit_layers(const BurstPtr& burst);

  // Once the submitting thread has come out for good: only what is still being copied keeps the pools.
  void let_go() { pools_ = nullptr; }

  Doorbell& doorbell() const { return *doorbell_; }
  const Alarm& alarm() const { return alarm_; }
  std::int64_t hear_alarm();  // the id of the last burst that it has rung for, 0 if those have ended meanwhile

  // For an owner who submits on the submitting thread.
  bool has_room_for(std::size_t layers);
  Status make_room();  // blocks until one more layer may be submitted
  void add_layer(const BurstPtr& burst, std::int64_t layer) { in_flight_.emplace_back(burst, layer); }

 private:
  Status load(const BurstPtr& burst);
  Status plan(Burst& burst);
  Status join_indices(Burst& burst);
  Status follow(const BurstPtr& burst);
  bool await_enqueued(const Burst& burst, std::int64_t layer);
  void rest(const Burst& burst, std::int64_t layer, double pace);
  void add_report(Stop report);
  Stop first_report() const;
  void forget_landed();
  void unset_alarm_if_idle();
  BurstPtr first(const std::deque<BurstPtr>& queue) const;

  const std::shared_ptr<PlaneDevice> device_;
  const std::shared_ptr<Planner> planner_;
  const std::shared_ptr<const Bases> bases_;
  std::shared_ptr<const void> pools_;  // the submitting thread's
  const std::size_t max_layers_;
  const double patience_;
  const std::shared_ptr<Doorbell> doorbell_ = std::make_shared<Doorbell>();
  const std::shared_ptr<Waiter> observer_ = std::make_shared<Waiter>();
  Waiter submitter_, reporter_;
  std::atomic<bool> stopping_{false}, abandoned_{false};
  std::atomic<bool> has_observed_{false};  // there will be no more reports

  mutable std::mutex mutex_;  // of the queues and the alarm
  std::deque<BurstPtr> to_submit_, to_observe_;
  std::deque<Stop> reports_;
  Alarm alarm_;
  bool alarm_is_set_ = false;
  std::atomic<double> looked_at_{0};  // when somebody last asked for a report

  using Numbers = std::vector<std::int64_t>;
  const std::shared_ptr<Recycler<Copied>> copied_ =
      std::make_shared<Recycler<Copied>>([](Copied& copied) { copied.pools = nullptr; });
  const std::shared_ptr<Recycler<Numbers>> indices_ = std::make_shared<Recycler<Numbers>>([](Numbers&) {});

  // The submitting thread's.
  std::deque<std::pair<BurstPtr, std::int64_t>> in_flight_;
  std::vector<Read> reads_;
  std::vector<Share> shares_;
};

}  // namespace hicache

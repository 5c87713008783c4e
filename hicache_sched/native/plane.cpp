#include "plane.h"

#include <algorithm>

#include "slices.h"

namespace hicache {
namespace {

// Values of strided memory of the host, one behind the other.
void gather(std::int64_t* to, const Indices& from, std::size_t count) {
  const auto* values = reinterpret_cast<const std::int64_t*>(from.address);
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = values[static_cast<std::ptrdiff_t>(i) * from.stride];
  }
}

constexpr double kShortestRest = 1e-4, kLongestRest = 2e-3;  // seconds
constexpr double kTurn = 1e-3;  // seconds for which a report is left to somebody who looks

// What is read, where it goes, and both kept alive.
struct ReadMemory {
  std::shared_ptr<const void> from, to;
};

}  // namespace

Plane::Plane(std::shared_ptr<PlaneDevice> device, std::shared_ptr<Planner> planner, Bases bases,
             std::shared_ptr<const void> pools, std::size_t max_layers, double patience)
    : device_(std::move(device)),
      planner_(std::move(planner)),
      bases_(std::make_shared<Bases>(std::move(bases))),
      pools_(std::move(pools)),
      max_layers_(max_layers),
      patience_(patience) {}

void Plane::hand_over(const BurstPtr& burst, std::int64_t id) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (burst->id != id) {  // a second time it may be read meanwhile
      burst->id = id;
      burst->handed_over_at = now();
    }
    to_observe_.push_back(burst);
    try {
      to_submit_.push_back(burst);
    } catch (...) {  // no memory: nobody would ever mark it submitted
      to_observe_.pop_back();
      throw;
    }
    if (!alarm_is_set_) {
      alarm_.set(patience_);
      alarm_is_set_ = true;
    }
  }
  submitter_.wake();  // what that does wakes the observer
}

void Plane::stop() {
  stopping_ = true;
  submitter_.wake();
  observer_->wake();
  reporter_.wake();
}

void Plane::abandon() {
  abandoned_ = true;
  stop();
}

std::int64_t Plane::hear_alarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  alarm_.unset();
  alarm_is_set_ = false;
  std::int64_t last = 0;
  const double time = now();
  const auto look_at = [&](const Burst& burst) {
    const double left = burst.handed_over_at + patience_ - time;
    if (left <= 0) {
      last = std::max(last, burst.id);
    } else if (!alarm_is_set_) {
      alarm_.set(left);
      alarm_is_set_ = true;
    }
  };
  for (const Stop& report : reports_) {  // the owner has not ended it
    look_at(*report.burst);
  }
  for (const BurstPtr& burst : to_observe_) {
    look_at(*burst);
  }
  return last;
}

// With the mutex.
void Plane::unset_alarm_if_idle() {
  if (alarm_is_set_ && to_observe_.empty() && reports_.empty()) {
    alarm_.unset();
    alarm_is_set_ = false;
  }
}

BurstPtr Plane::first(const std::deque<BurstPtr>& queue) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue.empty() ? nullptr : queue.front();
}

// -- submitting ------------------------------------------------------------------------------------------------------

Plane::Stop Plane::submit() {
  while (true) {
    const bool stops = stopping_;  // asked before the queue is: what was handed over before the stop is served
    const BurstPtr burst = first(to_submit_);
    if (!burst || abandoned_) {
      if (stops || abandoned_) {
        return {};
      }
      submitter_.sleep();
      continue;
    }
    Progress& progress = burst->progress;
    if (!progress.is_submitted()) {
      if (progress.has_begun() || !(burst->is_set_up || progress.is_given_up())) {
        return {burst, Stop::kInterrupted, {}};
      }
      if (burst->needs_owner && !progress.is_given_up()) {
        return {burst, Stop::kNeedsOwner, {}};
      }
      if (progress.begin()) {
        const Status status = load(burst);
        if (!status.is_ok()) {
          return {burst, Stop::kFailed, status};
        }
      }
      progress.mark_submitted();
    } else {
      observer_->wake();  // it may have been handed over again when all was done
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    to_submit_.pop_front();
  }
}

Status Plane::load(const BurstPtr& burst) {
  const Status planned = plan(*burst);
  if (!planned.is_ok()) {
    return planned;
  }
  burst->progress.mark_planned();
  return submit_layers(burst);
}

// The indices are read on a stream of their own: on the h2d stream that would wait for every earlier burst to land. The
// thread waits for the start event rather than for the read, as a blocking event sleeps where a read may spin.
Status Plane::plan(Burst& burst) {
  const auto& shares = burst.shares;
  Status status;
  if (std::any_of(shares.begin(), shares.end(), [](const OpShare& share) { return share.dst.on_device; })) {
    status = device_->synchronize(burst.start, Caller::kSubmitter);
  }
  if (status.is_ok()) {
    status = device_->wait_on_index_stream(burst.start);
  }
  if (status.is_ok()) {
    status = join_indices(burst);
  }
  if (!status.is_ok()) {
    return status;
  }
  shares_.clear();
  for (const Joined& joined : burst.joined) {
    const auto num_tokens = static_cast<std::size_t>(joined.op_ends.back());
    shares_.push_back({joined.pair, burst.indices->data() + joined.src_at, burst.indices->data() + joined.dst_at,
                       joined.op_ends.data(), joined.op_ends.size(), num_tokens});
  }
  burst.copied = new_copied();
  const Plan& plan = burst.copied->plan;
  std::vector<std::int64_t>& bases = burst.copied->bases;
  if (!planner_->plan(shares_, burst.copied->plan)) {
    status.kind = Status::kInvalid;
    return status;
  }
  const std::size_t num_planes = plan.columns.size();
  const bool has_all = num_planes == bases_->num_planes;
  bases.resize(has_all ? 0 : 2 * bases_->num_layers * num_planes);
  burst.num_bytes = 0;
  for (std::size_t layer = 0, at = 0; layer < bases_->num_layers; ++layer) {
    for (std::size_t plane = 0; plane < num_planes; ++plane) {
      const std::size_t place = layer * bases_->num_planes + plan.columns[plane];
      burst.num_bytes += bases_->dst[place] != 0 ? plan.plane_bytes[plane] : 0;
      if (!has_all) {
        bases[at] = bases_->dst[place];
        bases[at + bases_->num_layers * num_planes] = bases_->src[place];
        ++at;
      }
    }
  }
  return status;
}

Status Plane::join_indices(Burst& burst) {
  std::vector<OpShare>& shares = burst.shares;
  std::stable_sort(shares.begin(), shares.end(), [](const OpShare& a, const OpShare& b) { return a.pair < b.pair; });
  std::size_t total = 0;
  for (const OpShare& share : shares) {
    total += 2 * share.num_tokens;
  }
  burst.indices = indices_->take();
  burst.indices->resize(std::max(total, burst.indices->size()));
  burst.joined.clear();
  reads_.clear();
  const auto bring = [&](const Indices& from, std::size_t to, std::size_t count) {
    std::int64_t* place = burst.indices->data() + to;
    if (from.on_device) {
      reads_.push_back({place, from.address, from.stride, count});
    } else {
      gather(place, from, count);
    }
  };
  std::size_t at = 0;
  for (auto share = shares.begin(); share != shares.end();) {
    const auto last =
        std::find_if(share, shares.end(), [&](const OpShare& other) { return other.pair != share->pair; });
    Joined joined;
    joined.pair = share->pair;
    std::int64_t end = 0;
    for (auto op = share; op != last; ++op) {
      joined.op_ends.push_back(end += static_cast<std::int64_t>(op->num_tokens));
    }
    joined.src_at = at;
    joined.dst_at = at + static_cast<std::size_t>(end);
    for (; share != last; ++share) {
      bring(share->src, at, share->num_tokens);
      bring(share->dst, at + static_cast<std::size_t>(end), share->num_tokens);
      at += share->num_tokens;
    }
    at += static_cast<std::size_t>(end);
    burst.joined.push_back(std::move(joined));
  }
  if (reads_.empty()) {
    return {};
  }
  return device_->read(reads_, std::make_shared<ReadMemory>(ReadMemory{burst.ops, burst.indices}));
}

Status Plane::submit_layers(const BurstPtr& burst) {
  Progress& progress = burst->progress;
  const std::shared_ptr<Copied> copied = burst->copied;
  const Plan& plan = copied->plan;
  const std::size_t num_planes = plan.columns.size(), num_layers = burst->num_layers;
  const bool has_own = !copied->bases.empty();
  const std::int64_t* dst_base = has_own ? copied->bases.data() : bases_->dst.data();
  const std::int64_t* src_base = has_own ? copied->bases.data() + num_layers * num_planes : bases_->src.data();
  Status status = device_->wait_on_h2d_stream(burst->start);
  if (status.is_ok() && burst->fence != 0) {
    status = device_->wait_on_h2d_stream(burst->fence);
  }
  if (status.is_ok()) {
    status = device_->record(burst->events[0]);
  }
  for (std::size_t layer = 0; status.is_ok() && layer < num_layers; ++layer) {
    if (abandoned_ || progress.is_given_up()) {
      status.kind = abandoned_ ? Status::kStopped : Status::kGivenUp;
      return status;
    }
    status = make_room();
    Copies copies{plan.dst_offsets.data(), plan.src_offsets.data(), plan.sizes.data(), plan.sizes.size(),
                  plan.plane_ends.data(),  dst_base + layer * num_planes, src_base + layer * num_planes, num_planes};
    std::int64_t nbytes = 0;
    for (std::size_t plane = 0; plane < num_planes; ++plane) {
      nbytes += copies.dst_base[plane] != 0 ? plan.plane_bytes[plane] : 0;
    }
    if (status.is_ok() && nbytes != 0) {
      status = device_->copy(copies, nbytes, copied);
    }
    if (status.is_ok()) {
      status = device_->record(burst->events[layer + 1]);
    }
    if (status.is_ok()) {
      const auto number = static_cast<std::int64_t>(layer);
      progress.advance(kEnqueued, number + 1);
      add_layer(burst, number);
    }
  }
  if (status.is_ok()) {
    status = device_->record(burst->events[num_layers + 1]);
  }
  if (status.is_ok()) {
    progress.mark_finish_recorded();
  }
  return status;
}

void Plane::forget_landed() {
  const auto has_landed = [](const auto& entry) {
    const Progress& progress = entry.first->progress;
    return progress.has(kLanded, entry.second) || progress.has_ended();
  };
  while (!in_flight_.empty() && has_landed(in_flight_.front())) {
    in_flight_.pop_front();
  }
}

bool Plane::has_room_for(std::size_t layers) {
  forget_landed();
  const auto has_room = [&] { return in_flight_.size() + layers <= max_layers_; };
  const auto is_reached = [&](const auto& entry) {
    // Its events are not recorded again meanwhile: this thread would do it.
    return device_->is_reached(entry.first->events[entry.second + 1]);
  };
  while (!has_room() && !in_flight_.empty() && is_reached(in_flight_.front())) {  // the observer may rest
    in_flight_.pop_front();
  }
  return has_room();
}

// It waits for half of what is in flight, so that the next layers need not wait each for one.
Status Plane::make_room() {
  if (has_room_for(1)) {
    return {};
  }
  const std::size_t half = std::max<std::size_t>(1, max_layers_ / 2);
  const auto [burst, layer] = in_flight_[half - 1];
  Status status;
  if (!burst->progress.has(kLanded, layer) && !burst->progress.has_ended()) {
    // Its events are not recorded again meanwhile: this thread would do it.
    status = device_->synchronize(burst->events[layer + 1], Caller::kSubmitter);
  }
  if (status.is_ok()) {  // else they may still be in flight
    in_flight_.erase(in_flight_.begin(), in_flight_.begin() + static_cast<std::ptrdiff_t>(half));
  }
  return status;
}

// -- landing ---------------------------------------------------------------------------------------------------------

void Plane::observe() {
  ask_for_short_slices();
  while (true) {
    const bool stops = stopping_;
    const BurstPtr burst = first(to_observe_);
    if (abandoned_ || (!burst && stops)) {
      break;
    }
    if (!burst) {
      observer_->sleep();
      continue;
    }
    const Status status = follow(burst);
    if (!abandoned_) {
      add_report({burst, Stop::kOver, status});
      burst->is_followed = true;
      const std::lock_guard<std::mutex> lock(mutex_);
      to_observe_.pop_front();
      unset_alarm_if_idle();
    }
  }
  has_observed_ = true;
  reporter_.wake();
}

// Gives how the wait for all of it went.
Status Plane::follow(const BurstPtr& burst) {
  Progress& progress = burst->progress;
  if (progress.has_ended() || burst->is_followed) {  // it was handed over again
    return {};
  }
  const auto num_layers = static_cast<std::int64_t>(burst->num_layers);
  double first_landed_at = 0;
  for (auto layer = progress.layers(kLanded); layer < num_layers && !burst->has_failed_on_device; ++layer) {
    if (!await_enqueued(*burst, layer)) {
      break;
    }
    const Handle event = burst->events[layer + 1];
    if (layer > 1 && !device_->is_reached(event)) {
      rest(*burst, layer, (now() - first_landed_at) / static_cast<double>(layer - 1));
    }
    const Status status = device_->synchronize(event, Caller::kObserver);
    if (status.is_ok()) {
      progress.advance(kLanded, layer + 1);
      first_landed_at = layer == 0 ? progress.progress_at() : first_landed_at;
    } else {
      add_report({burst, Stop::kFailed, status});
      burst->has_failed_on_device = true;
    }
  }
  await_enqueued(*burst, num_layers);  // no such layer: this waits until the data plane is done
  Status status;
  if (!abandoned_ && progress.has_begun() && progress.is_finish_recorded()) {
    status = device_->synchronize(burst->events[num_layers + 1], Caller::kObserver);
  }
  return status;
}

// False where it never will be, or nobody wants to know any more.
bool Plane::await_enqueued(const Burst& burst, std::int64_t layer) {
  const Progress& progress = burst.progress;
  while (!progress.has(kEnqueued, layer) && !progress.is_submitted() && !abandoned_) {
    observer_->sleep();
  }
  return progress.has(kEnqueued, layer) && !abandoned_;
}

// To be woken for every layer would cost the engine's threads a core now and then, and mostly nobody waits for single
// layers. So it rests while some land, until half the time is over that the first is expected to take that somebody
// waits for; the last, where nobody does: its burst is to end in time. pace: seconds a layer.
void Plane::rest(const Burst& burst, std::int64_t layer, double pace) {
  const double begin = now();
  while (!abandoned_) {
    const auto last = static_cast<std::int64_t>(burst.num_layers) - 1;
    const std::int64_t num_before = burst.progress.first_waited_for(kLanded, last) - layer;
    const double until = begin + std::min(kLongestRest, static_cast<double>(num_before) * pace / 2);
    if (until - now() < kShortestRest) {
      return;
    }
    observer_->sleep_until(until);
  }
}

// -- reports ---------------------------------------------------------------------------------------------------------

void Plane::add_report(Stop report) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reports_.push_back(std::move(report));
  }
  reporter_.wake();
}

Plane::Stop Plane::first_report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reports_.empty() ? Stop{} : reports_.front();
}

Plane::Stop Plane::report() {
  looked_at_ = now();
  return first_report();
}

void Plane::leave_report() {
  looked_at_ = 0;
  reporter_.wake();
}

// Where somebody looks again and again it is left to him: two threads that want to do it cost him more.
Plane::Stop Plane::next_report() {
  double until = 0;
  while (true) {
    const bool is_last = has_observed_;
    Stop next = first_report();
    if (abandoned_ || is_last) {
      return abandoned_ ? Stop{} : next;
    }
    if (!next.burst) {
      until = 0;
      reporter_.sleep();
      continue;
    }
    const double time = now();
    if (until == 0) {
      until = time + kTurn;
    }
    if (time > until || looked_at_ < time - kTurn) {
      return next;
    }
    reporter_.sleep_until(until);
  }
}

void Plane::pop_report(std::int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reports_.empty() && reports_.front().burst->id == id) {
    reports_.pop_front();
    unset_alarm_if_idle();
  }
}

}  // namespace hicache

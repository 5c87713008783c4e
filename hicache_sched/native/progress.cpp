#include "progress.h"

#include <algorithm>
#include <utility>

namespace hicache {
Progress::Progress(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<Waiter> observer, std::unique_ptr<Times> times)
    : doorbell_(std::move(doorbell)), observer_(std::move(observer)), times_(std::move(times)), progress_at_(now()) {}

bool Progress::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (given_up_) {
    return false;
  }
  if (times_ != nullptr && !begun_) {
    times_->begun = now();
  }
  begun_ = true;
  return true;
}

bool Progress::give_up(bool unless_begun) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (unless_begun && begun_) {
    return false;
  }
  given_up_ = true;
  return true;
}

void Progress::mark_planned() {
  if (times_ != nullptr && !planned_) {
    times_->planned = now();
  }
  planned_ = true;
}

void Progress::advance(Mark mark, std::int64_t layers) {
  const std::int64_t before = layers_[mark];
  if (layers <= before) {
    return;
  }
  if (mark == kLanded) {
    progress_at_ = now();
  }
  if (times_ != nullptr) {
    std::vector<double>& times = times_->layers[mark];
    const auto last = std::min(layers, static_cast<std::int64_t>(times.size()));
    const double time = mark == kLanded ? progress_at() : now();
    for (std::int64_t layer = before; layer < last; ++layer) {
      times[static_cast<std::size_t>(layer)] = time;
    }
  }
  layers_[mark] = layers;
  bool is_wanted = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_[mark] < layers) {
      wanted_[mark] = kNone;
      is_wanted = true;
    }
    for (const Sleeper& sleeper : sleepers_) {
      if (sleeper.mark == mark && sleeper.layer < layers) {
        sleeper.waiter->wake();
      }
    }
  }
  if (is_wanted) {
    doorbell_->ring();
  }
  if (mark == kEnqueued) {
    observer_->wake();
  }
}

void Progress::mark_submitted() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (times_ != nullptr && !submitted_) {
      times_->submitted = now();
    }
    submitted_ = true;
  }
  observer_->wake();
}

bool Progress::want(Mark mark, std::int64_t layer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has(mark, layer)) {
      return true;
    }
    wanted_[mark] = std::min(wanted_[mark], layer);
  }
  call_observer(mark);
  return false;
}

bool Progress::add(Mark mark, std::int64_t layer, Waiter* waiter) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has(mark, layer)) {
      return false;
    }
    sleepers_.push_back({mark, layer, waiter});
  }
  call_observer(mark);
  return true;
}

void Progress::call_observer(Mark awaited) {
  if (awaited == kLanded) {
    observer_->wake();
  }
}

std::int64_t Progress::first_waited_for(Mark mark, std::int64_t last) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t first = std::min(wanted_[mark], last);
  for (const Sleeper& sleeper : sleepers_) {
    first = sleeper.mark == mark ? std::min(first, sleeper.layer) : first;
  }
  return first;
}

void Progress::remove(Waiter* waiter) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sleepers_.erase(
      std::remove_if(sleepers_.begin(), sleepers_.end(), [&](const Sleeper& each) { return each.waiter == waiter; }),
      sleepers_.end());
}

}  // namespace hicache

#include "core.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <new>
#include <utility>

#include "copy.h"

namespace hicache {
namespace {

// A native thread takes no signals: Python's handlers are for Python's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

constexpr double kLongest = 3600.0;  // seconds of one wait; a clock can count so far

template <typename Object>
void make_anew(Object& object) {
  new (&object) Object();  // what was there belongs to threads that are not in this process
}

}  // namespace

Core::Core(const double bandwidths[kEngines], std::size_t queue_depth) : queue_depth_(queue_depth) {
  const SignalsBlocked inherited;
  try {
    for (int i = 0; i < kEngines; ++i) {
      engines_[i].bandwidth = bandwidths[i];
      engines_[i].thread = std::thread([this, i] { run(engines_[i]); });
    }
  } catch (...) {  // no more threads to be had
    stop();
    join();
    throw;
  }
}

Core::~Core() {
  stop();
  join();
}

std::shared_ptr<Stream> Core::new_stream(bool runs_inline) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto stream = std::make_shared<Stream>(++last_id_, runs_inline);
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), [](const auto& weak) { return weak.expired(); }),
                 streams_.end());
  streams_.push_back(stream);
  return stream;
}

std::shared_ptr<Event> Core::new_event() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::make_shared<Event>(++last_id_);
}

// -- work --------------------------------------------------------------------------------------------------------

// Waits until there is room on the stream and nobody else waits for room anywhere, as if a driver kept its lock
// meanwhile; false where it was interrupted.
bool Core::wait_for_room(std::unique_lock<std::mutex>& lock, const Stream& stream, const GoOn& go_on) {
  const auto is_full = [&] { return stream.queue.size() >= queue_depth_; };
  if (queue_depth_ == 0 || lost_ || (!driver_is_busy_ && !is_full())) {
    return true;
  }
  Waiter waiter;
  blocked_.insert(&waiter);
  submitters_.insert(&waiter);
  bool is_mine = false, interrupted = false;
  while (!lost_ && !interrupted) {
    if (!driver_is_busy_) {
      driver_is_busy_ = is_mine = true;
    }
    if (is_mine && !is_full()) {
      break;
    }
    lock.unlock();
    interrupted = !waiter.sleep() && !go_on();
    lock.lock();
  }
  blocked_.erase(&waiter);
  submitters_.erase(&waiter);
  if (is_mine) {
    driver_is_busy_ = false;
    for (Waiter* other : submitters_) {
      other->wake();
    }
  }
  return !interrupted;
}

bool Core::record(const std::shared_ptr<Stream>& stream, Event& event, const GoOn& go_on, const char* traced_as) {
  std::unique_lock<std::mutex> lock(mutex_);
  trace("record", &event, stream.get(), traced_as);
  if (!wait_for_room(lock, *stream, go_on) || lost_) {
    return false;
  }
  event.latest = put_record(stream);
  return true;
}

std::shared_ptr<Record> Core::record_at_once(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_ ? nullptr : put_record(stream);
}

bool Core::wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Record>& record, const GoOn& go_on) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!wait_for_room(lock, *stream, go_on) || lost_) {
    return false;
  }
  if (!record->done) {
    submit_item(stream, Item{record, nullptr, true, false});
  }
  return true;
}

bool Core::wait_event(const std::shared_ptr<Stream>& stream, Event& event, const GoOn& go_on, const char* traced_as) {
  std::unique_lock<std::mutex> lock(mutex_);
  trace("wait", &event, stream.get(), traced_as);
  const std::shared_ptr<Record> record = event.latest;  // a later one does not move the wait
  if (lost_ || record == nullptr || record->done) {
    return !lost_;
  }
  lock.unlock();
  return wait(stream, record, go_on);
}

bool Core::submit(const std::shared_ptr<Operation>& operation, int engine, std::ptrdiff_t nbytes, const GoOn& go_on,
                  void*& refusal) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& failures = engines_[engine].failures;
  if (!lost_ && !failures.empty()) {
    refusal = failures.front();
    failures.pop_front();
    return false;
  }
  if (!wait_for_room(lock, *operation->stream, go_on) || lost_) {
    return false;
  }
  operation->engine = &engines_[engine];
  if (operation->engine->bandwidth > 0) {
    operation->duration += static_cast<double>(nbytes) / operation->engine->bandwidth;
  }
  operation->ready_time = now();
  submit_item(operation->stream, Item{nullptr, operation, false, false});
  return true;
}

Outcome Core::block_on(const std::shared_ptr<Record>& record, const GoOn& go_on) {
  Waiter waiter;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!record->done && !lost_) {
    record->waiters.push_back(&waiter);
    blocked_.insert(&waiter);
    bool interrupted = false;
    while (!record->done && !lost_ && !interrupted) {
      lock.unlock();
      interrupted = !waiter.sleep() && !go_on();
      lock.lock();
    }
    auto& waiters = record->waiters;
    waiters.erase(std::remove(waiters.begin(), waiters.end(), &waiter), waiters.end());
    blocked_.erase(&waiter);
    if (interrupted) {
      return Outcome::kInterrupted;
    }
  }
  return record->done ? Outcome::kDone : Outcome::kLost;
}

Outcome Core::synchronize(Event& event, const GoOn& go_on, const char* traced_as) {
  std::unique_lock<std::mutex> lock(mutex_);
  trace("synchronize", &event, nullptr, traced_as);
  const std::shared_ptr<Record> record = event.latest;
  if (lost_ || record == nullptr || record->done) {
    return lost_ ? Outcome::kLost : Outcome::kDone;
  }
  lock.unlock();
  return block_on(record, go_on);
}

Outcome Core::await_turn(const std::shared_ptr<Operation>& operation, const GoOn& go_on) {
  Waiter waiter;
  std::unique_lock<std::mutex> lock(mutex_);
  operation->turn = &waiter;
  blocked_.insert(&waiter);
  bool interrupted = false;
  while (operation->engine->running != operation && !lost_ && !interrupted) {
    lock.unlock();
    interrupted = !waiter.sleep() && !go_on();
    lock.lock();
  }
  operation->turn = nullptr;
  blocked_.erase(&waiter);
  if (interrupted) {
    return Outcome::kInterrupted;
  }
  if (lost_) {
    return Outcome::kLost;
  }
  operation->engine->taken = true;
  return Outcome::kDone;
}

void Core::abandon(const std::shared_ptr<Operation>& operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (operation->engine->running == operation) {
    operation->finish_time = now();
    finish(operation);
  } else if (operation->payload != nullptr) {  // not over: its engine makes nothing of it when its turn comes
    operation->abandoned = true;
    operation->duration = 0.0;
  }
}

std::shared_ptr<Operation> Core::next_call(int number) {
  Engine& engine = engines_[number];
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_call = [&] {
    const auto& running = engine.running;
    return running && running->is_call && !running->is_inline && !engine.taken;
  };
  engine.for_calls.wait(lock, [&] { return lost_ || has_call(); });
  if (lost_) {
    return nullptr;
  }
  engine.taken = true;
  return engine.running;
}

bool Core::complete(const std::shared_ptr<Operation>& operation, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  Engine& engine = *operation->engine;
  if (engine.running != operation) {
    return true;
  }
  set_finish_time(*operation);
  const double end = operation->finish_time;
  pace(lock, engine, std::min(end, now() + seconds));
  if (now() < end && !lost_) {
    return false;
  }
  finish(operation);
  return true;
}

void Core::run(Engine& engine) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    engine.for_copies.wait(lock, [&] {
      const auto& running = engine.running;
      const bool is_ours = running && (running->abandoned || (!running->is_call && !running->is_inline));
      return lost_ || (is_ours && !engine.taken);
    });
    if (lost_) {
      return;
    }
    engine.taken = true;
    const std::shared_ptr<Operation> operation = engine.running;
    if (!operation->abandoned) {
      lock.unlock();
      copy_batch(operation->copies);
      lock.lock();
    }
    set_finish_time(*operation);
    pace(lock, engine, operation->finish_time);
    finish(operation);
  }
}

// The next operation starts, virtually, when this one virtually ended, so what a sleep overshoots is made up for by the
// next and pacing does not drift.
void Core::set_finish_time(Operation& operation) {
  if (operation.finish_time == 0.0) {
    operation.finish_time = std::max(operation.start_time + operation.duration, now());
  }
}

void Core::pace(std::unique_lock<std::mutex>& lock, Engine& engine, double until) {
  for (double remaining = until - now(); remaining > 0 && !lost_; remaining = until - now()) {
    engine.for_pacing.wait_for(lock, std::chrono::duration<double>(std::min(remaining, kLongest)));
  }
}

// -- how far it has got ----------------------------------------------------------------------------------------------

std::shared_ptr<Record> Core::latest(const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return event.latest;
}

bool Core::query(const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !lost_ && (event.latest == nullptr || event.latest->done);
}

bool Core::is_done(const std::shared_ptr<Record>& record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return record->done;
}

std::size_t Core::length(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stream->queue.size();
}

std::vector<std::shared_ptr<Record>> Core::record_all() {
  std::vector<std::shared_ptr<Record>> records;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& weak : streams_) {
    if (const auto stream = weak.lock()) {
      records.push_back(put_record(stream));
    }
  }
  return records;
}

// -- control ---------------------------------------------------------------------------------------------------------

void Core::hold(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Engine& engine = engines_[number];
  if (!engine.held) {
    engine.held = true;
    engine.allowed = engine.started;
  }
}

bool Core::is_held(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return engines_[number].held;
}

Outcome Core::step(int number, std::uint64_t n, const GoOn& go_on) {
  Waiter waiter;
  std::unique_lock<std::mutex> lock(mutex_);
  Engine& engine = engines_[number];
  engine.free_time = std::max(engine.free_time, now());  // the time it was held is not made up for
  engine.allowed += n;
  const std::uint64_t target = engine.allowed;
  dispatch(engine);
  blocked_.insert(&waiter);
  steppers_.insert(&waiter);
  bool interrupted = false;
  while (engine.completed < target && !lost_ && !interrupted) {
    lock.unlock();
    interrupted = !waiter.sleep() && !go_on();
    lock.lock();
  }
  blocked_.erase(&waiter);
  steppers_.erase(&waiter);
  if (interrupted) {
    return Outcome::kInterrupted;
  }
  return engine.completed >= target ? Outcome::kDone : Outcome::kLost;
}

void Core::resume(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Engine& engine = engines_[number];
  engine.held = false;
  engine.free_time = std::max(engine.free_time, now());
  dispatch(engine);
}

void Core::fail_next(int number, void* payload) {
  const std::lock_guard<std::mutex> lock(mutex_);
  engines_[number].failures.push_back(payload);
}

void Core::trace_calls() {
  const std::lock_guard<std::mutex> lock(mutex_);
  traces_ = true;
  traced_.clear();
}

std::vector<TracedCall> Core::take_traced() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(traced_, {});
}

void Core::trace_operations() {
  const std::lock_guard<std::mutex> lock(mutex_);
  traces_operations_ = true;
  operations_.clear();
}

std::vector<TracedOperation> Core::take_operations() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(operations_, {});
}

void Core::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_ = true;
  for (Waiter* waiter : blocked_) {
    waiter->wake();
  }
  for (Engine& engine : engines_) {
    for (const auto& operation : engine.ready) {
      drop(operation);
    }
    engine.ready.clear();
    garbage_.insert(garbage_.end(), engine.failures.begin(), engine.failures.end());
    engine.failures.clear();
    if (engine.running && !engine.taken) {  // nobody will
      drop(engine.running);
      engine.running = nullptr;
    }
    engine.for_copies.notify_all();
    engine.for_calls.notify_all();
    engine.for_pacing.notify_all();
  }
  for (const auto& weak : streams_) {
    if (const auto stream = weak.lock()) {
      for (const Item& item : stream->queue) {
        if (item.operation && item.operation->engine->running != item.operation) {
          drop(item.operation);
        }
      }
      stream->queue.clear();
    }
  }
}

void Core::join() {
  const std::lock_guard<std::mutex> lock(join_mutex_);
  for (Engine& engine : engines_) {
    if (engine.thread.joinable()) {
      engine.thread.join();
    }
  }
}

void Core::forget_threads() {
  make_anew(mutex_);
  make_anew(join_mutex_);
  driver_is_busy_ = false;
  submitters_.clear();
  blocked_.clear();
  steppers_.clear();
  for (Engine& engine : engines_) {
    make_anew(engine.thread);
    make_anew(engine.for_copies);
    make_anew(engine.for_calls);
    make_anew(engine.for_pacing);
  }
}

std::vector<void*> Core::take_garbage() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(garbage_, {});
}

// -- inside; the lock is held ----------------------------------------------------------------------------------------

std::shared_ptr<Record> Core::put_record(const std::shared_ptr<Stream>& stream) {
  auto record = std::make_shared<Record>();
  record->time = now();
  submit_item(stream, Item{record, nullptr, false, false});
  return record;
}

void Core::submit_item(const std::shared_ptr<Stream>& stream, Item item) {
  const bool is_record = item.record && !item.is_wait;
  if (is_record && stream->queue.empty()) {  // nothing to wait for, and nobody waits for it yet
    item.record->time = stream->time = std::max(item.record->time, stream->time);
    item.record->done = true;
    return;
  }
  stream->queue.push_back(std::move(item));
  if (stream->queue.size() == 1) {
    advance(stream);
  }
}

// Takes from the stream's head what can be taken, and from every stream that this unblocks.
void Core::advance(std::shared_ptr<Stream> first) {
  std::vector<std::shared_ptr<Stream>> pending{std::move(first)};
  while (!pending.empty()) {
    const std::shared_ptr<Stream> stream = std::move(pending.back());
    pending.pop_back();
    while (!stream->queue.empty()) {
      Item& item = stream->queue.front();
      if (item.operation) {
        if (!item.operation->handed_over) {
          item.operation->handed_over = true;
          item.operation->ready_time = std::max(item.operation->ready_time, stream->time);
          item.operation->engine->ready.push_back(item.operation);
          dispatch(*item.operation->engine);
        }
        break;
      }
      Record& record = *item.record;
      if (item.is_wait) {
        if (!record.done) {
          if (!item.parked) {
            item.parked = true;
            record.blocked.push_back(stream);
          }
          break;
        }
        stream->time = std::max(stream->time, record.time);
      } else {
        record.time = stream->time = std::max(record.time, stream->time);
        record.done = true;
        for (Waiter* waiter : record.waiters) {
          waiter->wake();
        }
        pending.insert(pending.end(), record.blocked.begin(), record.blocked.end());
        record.blocked.clear();
      }
      stream->queue.pop_front();
      left_queue();
    }
  }
}

void Core::dispatch(Engine& engine) {
  if (engine.running || engine.ready.empty() || (engine.held && engine.started >= engine.allowed)) {
    return;
  }
  engine.running = std::move(engine.ready.front());
  engine.ready.pop_front();
  engine.running->start_time = std::max(engine.running->ready_time, engine.free_time);
  engine.taken = false;
  ++engine.started;
  if (engine.running->is_inline && !engine.running->abandoned) {
    if (engine.running->turn != nullptr) {
      engine.running->turn->wake();
    }
  } else if (engine.running->is_call && !engine.running->abandoned) {
    engine.for_calls.notify_all();
  } else {
    engine.for_copies.notify_all();
  }
}

void Core::finish(const std::shared_ptr<Operation>& operation) {
  Engine& engine = *operation->engine;
  const std::shared_ptr<Stream> stream = operation->stream;
  drop(operation);
  engine.running = nullptr;
  engine.free_time = std::max(engine.free_time, operation->finish_time);  // it may have been let through since then
  ++engine.completed;
  stream->time = operation->finish_time;
  if (traces_operations_ && !lost_ && !operation->abandoned) {
    const int number = static_cast<int>(&engine - engines_);
    operations_.push_back({number, stream->id, operation->start_time, operation->finish_time});
  }
  if (!lost_) {
    stream->queue.pop_front();
    left_queue();
    advance(stream);
    dispatch(engine);
  }
  for (Waiter* waiter : steppers_) {
    waiter->wake();
  }
}

void Core::drop(const std::shared_ptr<Operation>& operation) {
  operation->memory = nullptr;
  if (operation->payload != nullptr) {
    garbage_.push_back(std::exchange(operation->payload, nullptr));
  }
}

void Core::left_queue() {
  for (Waiter* waiter : submitters_) {
    waiter->wake();
  }
}

void Core::trace(const char* name, const Event* event, const Stream* stream, const char* thread) {
  if (traces_ && thread != nullptr) {
    traced_.push_back({name, event == nullptr ? 0 : event->id, stream == nullptr ? 0 : stream->id, thread});
  }
}

}  // namespace hicache

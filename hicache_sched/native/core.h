// Streams, recordings and engines of an emulated device. Nothing here knows Python.
//
// Threads: every function of Core may be called on any thread and takes the core's lock itself, for a moment; those
// that say so block. Each engine has one native thread, which makes copies and is parked while there are none.
// Operations that are calls of the owner's are done by threads of the owner's, which ask for them with next_call.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "copy.h"
#include "waiter.h"

namespace hicache {

class Core;
struct Engine;
struct Stream;

constexpr int kEngines = 3;  // compute, h2d, d2h

// One recording of an event. Waits hold the recording, so a later one does not move them.
struct Record {
  double time = 0.0;
  bool done = false;
  std::vector<std::shared_ptr<Stream>> blocked;
  std::vector<Waiter*> waiters;
};

// A mark that is recorded again and again; `latest` is guarded by the core's lock.
struct Event {
  explicit Event(std::int64_t number) : id(number) {}
  const std::int64_t id;
  std::shared_ptr<Record> latest;
};

// One call of the runtime's that was made without Python, for the list of calls.
struct TracedCall {
  const char* name;
  std::int64_t event;   // its id, 0 where the call was made on the stream
  std::int64_t stream;  // its id, 0 for a stream of the calling thread's own
  std::string thread;
};

// What an engine did, for the list of operations. Times are virtual.
struct TracedOperation {
  int engine;
  std::int64_t stream;  // its id
  double begin, end;
};

// Work for an engine. One that is inline is done by the thread that submitted it, in its turn.
struct Operation {
  std::shared_ptr<Stream> stream;
  Engine* engine = nullptr;
  bool is_call = false;
  bool is_inline = false;
  Copies copies;
  void* payload = nullptr;  // the owner's, given back by take_garbage once the operation is over
  std::shared_ptr<const void> memory;  // that the copies are described in
  double duration = 0.0;
  double ready_time = 0.0;
  double start_time = 0.0;   // virtual, once it is its engine's turn
  double finish_time = 0.0;  // virtual, once its work is done
  bool handed_over = false;
  bool abandoned = false;
  Waiter* turn = nullptr;
};

struct Item {
  std::shared_ptr<Record> record;
  std::shared_ptr<Operation> operation;
  bool is_wait = false;
  bool parked = false;
};

struct Stream {
  Stream(std::int64_t number, bool inline_stream) : id(number), runs_inline(inline_stream) {}
  const std::int64_t id;
  const bool runs_inline;
  std::deque<Item> queue;
  double time = 0.0;
};

struct Engine {
  double bandwidth = 0.0;  // bytes/s, 0 for as fast as memory
  std::deque<std::shared_ptr<Operation>> ready;
  std::shared_ptr<Operation> running;
  bool taken = false;  // whether the thread that does it has it
  double free_time = 0.0;
  bool held = false;
  std::uint64_t allowed = 0, started = 0, completed = 0;
  std::deque<void*> failures;  // payloads, for the next operations that are submitted
  std::condition_variable for_copies, for_calls, for_pacing;
  std::thread thread;
};

// What blocks asks this after a signal whether to go on.
using GoOn = std::function<bool()>;

// kInterrupted: a signal came and there was no going on, whatever else happened meanwhile.
enum class Outcome { kDone, kLost, kInterrupted };

class Core {
 public:
  // bandwidths: bytes/s of each engine; 0 for as fast as memory. queue_depth: items that a stream holds; 0 for any.
  Core(const double bandwidths[kEngines], std::size_t queue_depth);
  ~Core();

  std::shared_ptr<Stream> new_stream(bool runs_inline);
  std::shared_ptr<Event> new_event();

  // These put something on a stream, and block while it is full; false where the device is lost, a signal ended the
  // wait, or the operation is one that was to fail: its `refusal` is then the failure's payload.
  // traced_as: which thread to list the call for, where it is made without Python.
  bool record(const std::shared_ptr<Stream>& stream, Event& event, const GoOn& go_on, const char* traced_as = nullptr);
  bool wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Record>& record, const GoOn& go_on);
  bool wait_event(const std::shared_ptr<Stream>& stream, Event& event, const GoOn& go_on, const char* traced_as);
  bool submit(const std::shared_ptr<Operation>& operation, int engine, std::ptrdiff_t nbytes, const GoOn& go_on,
              void*& refusal);
  std::shared_ptr<Record> record_at_once(const std::shared_ptr<Stream>& stream);  // the same, room or not

  Outcome block_on(const std::shared_ptr<Record>& record, const GoOn& go_on);  // blocks
  Outcome synchronize(Event& event, const GoOn& go_on, const char* traced_as);  // blocks
  Outcome await_turn(const std::shared_ptr<Operation>& operation, const GoOn& go_on);  // blocks; of an inline one
  void abandon(const std::shared_ptr<Operation>& operation);  // an inline one whose turn is not awaited any more

  std::shared_ptr<Operation> next_call(int engine);          // blocks; null once stopped
  // Blocks until the duration of an operation is over, for some seconds at most; whether it is complete.
  bool complete(const std::shared_ptr<Operation>& operation, double seconds);

  std::shared_ptr<Record> latest(const Event& event);
  bool query(const Event& event);  // false where the device is lost
  bool is_done(const std::shared_ptr<Record>& record);
  std::size_t length(const std::shared_ptr<Stream>& stream);
  std::vector<std::shared_ptr<Record>> record_all();

  void hold(int engine);
  bool is_held(int engine);
  Outcome step(int engine, std::uint64_t n, const GoOn& go_on);  // blocks
  void resume(int engine);
  void fail_next(int engine, void* payload);
  void trace_calls();                     // from now on
  std::vector<TracedCall> take_traced();  // since the last time
  void trace_operations();                // from now on
  std::vector<TracedOperation> take_operations();  // since the last time, in the order in which they were completed

  void stop();  // drops what is queued, ends the threads, wakes everybody
  void join();  // blocks until the native threads have ended
  void forget_threads();  // in a forked child: locks are made anew, threads forgotten

  std::vector<void*> take_garbage();  // payloads of operations that are over

 private:
  void run(Engine& engine);
  std::shared_ptr<Record> put_record(const std::shared_ptr<Stream>& stream);
  void submit_item(const std::shared_ptr<Stream>& stream, Item item);
  void advance(std::shared_ptr<Stream> stream);
  void dispatch(Engine& engine);
  void finish(const std::shared_ptr<Operation>& operation);
  void set_finish_time(Operation& operation);
  void pace(std::unique_lock<std::mutex>& lock, Engine& engine, double until);
  void drop(const std::shared_ptr<Operation>& operation);
  bool wait_for_room(std::unique_lock<std::mutex>& lock, const Stream& stream, const GoOn& go_on);
  void left_queue();
  void trace(const char* name, const Event* event, const Stream* stream, const char* thread);

  std::mutex mutex_;
  std::mutex join_mutex_;
  const std::size_t queue_depth_;
  Engine engines_[kEngines];
  std::int64_t last_id_ = 0;
  std::vector<std::weak_ptr<Stream>> streams_;
  std::set<Waiter*> blocked_;   // everybody who has to be woken where the device is lost
  std::set<Waiter*> steppers_;  // whoever waits for operations to complete
  std::set<Waiter*> submitters_;  // whoever waits for room
  bool driver_is_busy_ = false;   // whether one of them waits as a driver does that keeps its lock
  std::vector<void*> garbage_;
  bool traces_ = false;
  std::vector<TracedCall> traced_;
  bool traces_operations_ = false;
  std::vector<TracedOperation> operations_;
  bool lost_ = false;
};

}  // namespace hicache

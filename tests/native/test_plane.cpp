// The native data plane without Python, over a device that does what a test says: `make sanitize`.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../hicache_sched/native/plane.h"
#include "check.h"

using namespace hicache;

namespace {

using Int = std::int64_t;
using Texts = std::vector<std::string>;

void check_same(const Texts& calls, const Texts& wanted, int line) {
  for (std::size_t i = 0; i < std::max(calls.size(), wanted.size()); ++i) {
    const std::string is = i < calls.size() ? calls[i] : "nothing", should = i < wanted.size() ? wanted[i] : "nothing";
    if (is != should) {
      std::fprintf(stderr, "line %d: call %zu is '%s', not '%s'\n", line, i, is.c_str(), should.c_str());
      std::abort();
    }
  }
}
#define CHECK_CALLS(calls, ...) check_same(calls, __VA_ARGS__, __LINE__)

Status status_of(Status::Kind kind) {
  Status status;
  status.kind = kind;
  return status;
}

// Any status, told from others by all that is in it.
Status a_failure(int number) {
  static int refusals[1000];
  Status status = status_of(number % 2 == 0 ? Status::kDriver : Status::kRefused);
  status.call = "cuAnything";
  status.code = number;
  status.refusal = &refusals[number % 1000];
  status.copy = static_cast<std::size_t>(number) + 7;
  return status;
}

bool is_same(const Status& one, const Status& other) {
  return one.kind == other.kind && std::strcmp(one.call, other.call) == 0 && one.code == other.code &&
         one.refusal == other.refusal && one.copy == other.copy;
}

// How often it was rung since it was last asked.
Int rings(Doorbell& doorbell) {
  eventfd_t count = 0;
  return eventfd_read(doorbell.fd(), &count) == 0 ? static_cast<Int>(count) : 0;
}

// Bursts have numbers from 1; events of number n are 100 n for its start, one more for its fence, and from ten more on
// those of the ack's start, of each layer, and of the finish.
constexpr std::size_t kLayers = 4, kPlanes = 3;
bool is_of_layer(Handle event) { return event % 100 > 10 && event % 100 <= 10 + static_cast<Handle>(kLayers); }

// -- a device --------------------------------------------------------------------------------------------------------

// Makes a list of calls. What is put on the h2d stream is done at once, or, where that is held, by whoever steps it.
class Script final : public PlaneDevice {
 public:
  struct Call {
    std::string text;
    Caller who;
    std::thread::id thread;
  };

  Status synchronize(Handle event, Caller who) override {
    std::unique_lock<std::mutex> lock(mutex_);
    Status status = enter(lock, who, "synchronize " + std::to_string(event));
    if (status.is_ok()) {
      changed_.wait(lock, [&] { return lost_ || reached(event); });
      status = status_of(lost_ ? Status::kLost : Status::kOk);
    } else if (is_of_layer(event) && who == Caller::kSubmitter) {
      keeps_bound = false;  // what was not waited for may be in flight
    }
    return status;
  }
  bool is_reached(Handle event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !lost_ && reached(event);
  }
  Status wait_on_index_stream(Handle event) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const Status status = enter(lock, Caller::kSubmitter, "index waits " + std::to_string(event));
    index_is_behind_ = status.is_ok() ? event : 0;
    return status;
  }
  Status wait_on_h2d_stream(Handle event) override {
    std::unique_lock<std::mutex> lock(mutex_);
    return enter(lock, Caller::kSubmitter, "h2d waits " + std::to_string(event));
  }
  Status record(Handle event) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const Status status = enter(lock, Caller::kSubmitter, "record " + std::to_string(event));
    if (status.is_ok()) {
      if (is_of_layer(event)) {
        ++outstanding_;
        CHECK(!keeps_bound || outstanding_ <= most_layers);
        most_outstanding = std::max(most_outstanding, outstanding_);
      }
      reached_[event] = false;
      put({event, {}, nullptr});
    }
    return status;
  }
  Status read(const std::vector<Read>& reads, std::shared_ptr<const void> memory) override {
    std::unique_lock<std::mutex> lock(mutex_);
    std::string text = "read";
    for (const Read& each : reads) {
      text += " " + std::to_string(each.count);
    }
    CHECK(memory != nullptr && index_is_behind_ != 0);
    const Status status = enter(lock, Caller::kSubmitter, text);
    if (status.is_ok()) {
      for (const Read& each : reads) {
        for (std::size_t i = 0; i < each.count; ++i) {
          each.to[i] = reinterpret_cast<const Int*>(each.from)[static_cast<Int>(i) * each.stride];
        }
      }
    }
    return status;
  }
  Status copy(const Copies& copies, Int nbytes, std::shared_ptr<const void> memory) override {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(memory != nullptr);
    const Status status = enter(lock, Caller::kSubmitter, "copy " + std::to_string(nbytes));
    if (status.is_ok()) {
      put({0, copies, std::move(memory)});
    }
    return status;
  }

  // -- for tests --

  void hold() {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = true;
  }
  void step(std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (; count > 0 && !stream_.empty(); --count) {
      do_first();
    }
    changed_.notify_all();
  }
  void resume() {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = false;
    run();
  }
  // Until so many layers have been reached.
  void step_layers(Int count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Int until = outstanding_ - count; outstanding_ > until;) {
      CHECK(!stream_.empty());
      do_first();
    }
    changed_.notify_all();
  }
  // Blocks until all that is on the stream now is done.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this, until = num_put_] { return lost_ || num_put_ - stream_.size() >= until; });
  }
  void lose() {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_ = true;
    changed_.notify_all();
  }
  void reach(Handle event, bool is_reached) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_[event] = is_reached;
    changed_.notify_all();
  }
  // The n-th call of that thread from now on, from 1.
  void fail(Caller who, int n, Status status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failures_[{who, made_[who] + n}] = status;
  }
  void block(Caller who, int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.insert({who, made_[who] + n});
  }
  void await_blocked(Caller who) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_blocked_[who]; });
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.clear();
    changed_.notify_all();
  }
  void await_call(const std::string& text) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] {
      return std::any_of(calls_.begin(), calls_.end(), [&](const Call& call) { return call.text == text; });
    });
  }
  Texts texts(Caller who) {
    Texts texts;
    for (const Call& call : calls()) {
      if (call.who == who) {
        texts.push_back(call.text);
      }
    }
    return texts;
  }
  std::vector<Call> calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }
  void forget_calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.clear();
  }
  bool is_clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stream_.empty();
  }

  std::function<Status(const std::string&)> judge;  // asked of every call
  std::function<void(const std::string&)> before;   // called before each call, without a lock
  Int most_layers = 1 << 20, most_outstanding = 0;
  bool keeps_bound = true;

 private:
  struct Item {
    Handle event;
    Copies copies;
    std::shared_ptr<const void> memory;
  };

  Status enter(std::unique_lock<std::mutex>& lock, Caller who, const std::string& text) {
    if (before) {
      lock.unlock();
      before(text);
      lock.lock();
    }
    calls_.push_back({text, who, std::this_thread::get_id()});
    const std::pair<Caller, int> number{who, ++made_[who]};
    changed_.notify_all();
    if (blocks_.count(number) != 0) {
      is_blocked_[who] = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return lost_ || blocks_.count(number) == 0; });
      is_blocked_[who] = false;
    }
    if (lost_) {
      return status_of(Status::kLost);
    }
    const auto failure = failures_.find(number);
    return failure != failures_.end() ? failure->second : judge ? judge(text) : Status{};
  }
  bool reached(Handle event) { return reached_.count(event) == 0 || reached_[event]; }
  void put(Item item) {
    stream_.push_back(std::move(item));
    ++num_put_;
    if (!held_) {
      run();
    }
  }
  void run() {
    while (!stream_.empty()) {
      do_first();
    }
    changed_.notify_all();
  }
  void do_first() {
    const Item item = std::move(stream_.front());
    stream_.pop_front();
    if (item.event != 0) {
      reached_[item.event] = true;
      outstanding_ -= is_of_layer(item.event);
      return;
    }
    const Copies& copies = item.copies;
    CHECK(copies.plane_ends[copies.num_planes - 1] == static_cast<Int>(copies.count));
    for (std::size_t plane = 0, i = 0; plane < copies.num_planes; ++plane) {
      for (; i < static_cast<std::size_t>(copies.plane_ends[plane]); ++i) {
        if (copies.dst_base[plane] != 0) {
          std::memcpy(reinterpret_cast<char*>(copies.dst_base[plane] + copies.dst[i]),
                      reinterpret_cast<const char*>(copies.src_base[plane] + copies.src[i]),
                      static_cast<std::size_t>(copies.sizes[i]));
        }
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  std::map<Caller, int> made_;
  std::map<Caller, bool> is_blocked_;
  std::map<std::pair<Caller, int>, Status> failures_;
  std::set<std::pair<Caller, int>> blocks_;
  std::map<Handle, bool> reached_;
  std::deque<Item> stream_;
  std::size_t num_put_ = 0;
  Handle index_is_behind_ = 0;
  Int outstanding_ = 0;  // layers on the stream
  bool held_ = false, lost_ = false;
};

// -- what is loaded --------------------------------------------------------------------------------------------------

constexpr Int kSrcTokens = 64;
// Pair 0 has two planes without gaps, pages of four; pair 1 one plane with gaps, pages of one. Which layers have which:
constexpr bool kHas[kLayers][2] = {{true, true}, {true, false}, {false, true}, {false, false}};
constexpr Int kRowBytes[kPlanes] = {8, 8, 4}, kStride[kPlanes] = {8, 8, 12};
constexpr std::size_t kPairOf[kPlanes] = {0, 0, 1};

struct Moves {
  std::size_t pair;
  std::vector<Int> src, dst;
};

struct How {
  Int stride = 1;
  bool on_device = true;
};

// Pools, a plane over them, and bursts.
struct World {
  explicit World(std::size_t max_layers = 1000, Int tokens = 64, double patience = 1000) : dst_tokens(tokens) {
    Bases bases;
    bases.num_layers = kLayers, bases.num_planes = kPlanes;
    std::mt19937 random(7);
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t number = 0; number < kPlanes; ++number) {
        const bool has = kHas[layer][kPairOf[number]];
        src[layer][number].resize(has ? static_cast<std::size_t>(kSrcTokens * kStride[number]) : 0);
        dst[layer][number].resize(has ? static_cast<std::size_t>(dst_tokens * kStride[number]) : 0);
        for (char& byte : src[layer][number]) {
          byte = static_cast<char>(random() % 255 + 1);
        }
        bases.src.push_back(has ? reinterpret_cast<Int>(src[layer][number].data()) : 0);
        bases.dst.push_back(has ? reinterpret_cast<Int>(dst[layer][number].data()) : 0);
      }
    }
    std::vector<PairLayout> pairs{{kSrcTokens, dst_tokens, 4, 4, 1, {}}, {kSrcTokens, dst_tokens, 1, 1, 1, {}}};
    for (std::size_t number = 0; number < kPlanes; ++number) {
      const Side side{kStride[number], 1, kRowBytes[number]};
      pairs[kPairOf[number]].planes.push_back({side, side});
    }
    device->most_layers = static_cast<Int>(max_layers);
    const auto planner = std::make_shared<Planner>(std::move(pairs));
    plane = std::make_shared<Plane>(device, planner, std::move(bases), nullptr, max_layers, patience);
  }

  // One that moves nothing yet.
  BurstPtr new_burst(bool with_fence = true) {
    const Handle first = 100 * (1 + static_cast<Handle>(all.size()));
    BurstPtr burst = plane->new_burst(keeps_times);
    memory.emplace_back();
    for (Handle event = 0; event < static_cast<Handle>(kLayers) + 2; ++event) {
      memory.back().push_back(first + 10 + event);
    }
    burst->start = first, burst->fence = with_fence ? first + 1 : 0;
    burst->events = memory.back().data();
    burst->is_set_up = true;
    all.push_back(burst);
    moves.emplace_back();
    return burst;
  }
  Int number_of(const BurstPtr& burst) const { return std::find(all.begin(), all.end(), burst) - all.begin() + 1; }

  Indices indices(const std::vector<Int>& values, How how) {
    const Int count = static_cast<Int>(values.size()), size = std::abs(how.stride) * (count - 1) + 1;
    memory.emplace_back(static_cast<std::size_t>(how.stride == 0 ? 1 : size), -1);
    Int* first = memory.back().data() + (how.stride < 0 ? size - 1 : 0);
    for (Int i = 0; i < count; ++i) {
      first[i * how.stride] = values[static_cast<std::size_t>(i)];
    }
    return {reinterpret_cast<Int>(first), how.stride, how.on_device};
  }
  void add(const BurstPtr& burst, const Moves& move, How src_how, How dst_how) {
    const Indices from = indices(move.src, src_how), to = indices(move.dst, dst_how);
    burst->shares.push_back({move.pair, from, to, move.src.size()});
    moves[static_cast<std::size_t>(number_of(burst) - 1)].push_back(move);
  }
  // One that loads a page of pair 0 and two tokens of pair 1.
  BurstPtr a_burst(bool with_fence = true) {
    const BurstPtr burst = new_burst(with_fence);
    const Int at = static_cast<Int>(all.size()) * 4 % dst_tokens;
    add(burst, {0, {8, 9, 10, 11}, {at, at + 1, at + 2, at + 3}}, {1, false}, {1, true});
    add(burst, {1, {5, 3}, {at + 2, at}}, {1, false}, {1, true});
    return burst;
  }
  void hand_over(const BurstPtr& burst) { plane->hand_over(burst, number_of(burst)); }

  Handle event(const BurstPtr& burst, std::size_t number) const { return burst->events[number]; }
  static std::string record(Handle event) { return "record " + std::to_string(event); }
  static std::string synchronize(Handle event) { return "synchronize " + std::to_string(event); }
  Int bytes_in(const BurstPtr& burst, std::size_t layer) const {
    Int bytes = 0;
    for (const Moves& move : moves[static_cast<std::size_t>(number_of(burst) - 1)]) {
      for (std::size_t number = 0; number < kPlanes; ++number) {
        bytes += kPairOf[number] == move.pair && kHas[layer][move.pair] ? Int(move.src.size()) * kRowBytes[number] : 0;
      }
    }
    return bytes;
  }
  // Every call for a burst on the submitting thread; `reads` are what it is to read of the device.
  Texts calls_of(const BurstPtr& burst, const std::string& reads) const {
    const std::string start = std::to_string(burst->start);
    Texts calls;
    const auto& shares = burst->shares;
    if (std::any_of(shares.begin(), shares.end(), [](const OpShare& share) { return share.dst.on_device; })) {
      calls.push_back("synchronize " + start);
    }
    calls.push_back("index waits " + start);
    if (!reads.empty()) {
      calls.push_back(reads);
    }
    calls.push_back("h2d waits " + start);
    if (burst->fence != 0) {
      calls.push_back("h2d waits " + std::to_string(burst->fence));
    }
    calls.push_back(record(event(burst, 0)));
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      if (bytes_in(burst, layer) != 0) {
        calls.push_back("copy " + std::to_string(bytes_in(burst, layer)));
      }
      calls.push_back(record(event(burst, layer + 1)));
    }
    calls.push_back(record(event(burst, kLayers + 1)));
    return calls;
  }

  // Lays what a burst loads in a layer over `wanted`; how many bytes that is.
  using Pools = std::array<std::array<std::vector<char>, kPlanes>, kLayers>;
  Int load(const BurstPtr& burst, std::size_t layer, Pools& wanted) const {
    Int bytes = 0;
    for (const Moves& move : moves[static_cast<std::size_t>(number_of(burst) - 1)]) {
      for (std::size_t number = 0; number < kPlanes; ++number) {
        if (kPairOf[number] != move.pair || !kHas[layer][move.pair]) {
          continue;
        }
        for (std::size_t i = 0; i < move.src.size(); ++i) {
          std::memcpy(wanted[layer][number].data() + move.dst[i] * kStride[number],
                      src[layer][number].data() + move.src[i] * kStride[number],
                      static_cast<std::size_t>(kRowBytes[number]));
          bytes += kRowBytes[number];
        }
      }
    }
    return bytes;
  }
  Pools empty_pools() const {
    Pools pools;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t number = 0; number < kPlanes; ++number) {
        pools[layer][number].resize(dst[layer][number].size());
      }
    }
    return pools;
  }
  // That these bursts have loaded all they were to load, and nobody has loaded anything else.
  void check_loaded(const std::vector<BurstPtr>& bursts) const {
    Pools wanted = empty_pools();
    for (const BurstPtr& burst : bursts) {
      Int bytes = 0;
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        bytes += load(burst, layer, wanted);
      }
      CHECK(burst->num_bytes == bytes);
    }
    CHECK(wanted == dst);
  }

  bool keeps_times = false;  // of bursts that are made from now on
  const std::shared_ptr<Script> device = std::make_shared<Script>();
  const Int dst_tokens;
  std::shared_ptr<Plane> plane;
  Pools src, dst;
  std::deque<std::vector<Int>> memory;
  std::vector<BurstPtr> all;
  std::vector<std::vector<Moves>> moves;
};

const std::string kReads = "read 4 2";  // what a_burst() reads of the device

// What a burst failed with, as its owner does it: the events of missing layers are recorded behind what is there.
void fail_as_owner(Plane& plane, Script& device, const BurstPtr& burst) {
  burst->progress.give_up(false);
  const auto missing = static_cast<std::size_t>(burst->progress.layers(kEnqueued));
  for (std::size_t layer = missing; layer < kLayers; ++layer) {
    if (plane.make_room().is_ok() && device.record(burst->events[layer + 1]).is_ok()) {
      plane.add_layer(burst, static_cast<Int>(layer));
    }
  }
  if (device.record(burst->events[kLayers + 1]).is_ok()) {
    burst->progress.mark_finish_recorded();
  }
  burst->progress.mark_submitted();
}

// What an owner does of a burst that only he can submit.
void submit_as_owner(Plane& plane, Script& device, const BurstPtr& burst) {
  Progress& progress = burst->progress;
  if (!progress.begin()) {
    progress.mark_submitted();
    return;
  }
  progress.mark_planned();
  bool is_well = device.record(burst->events[0]).is_ok();
  for (std::size_t layer = 0; is_well && layer < kLayers; ++layer) {
    is_well = plane.make_room().is_ok() && device.record(burst->events[layer + 1]).is_ok();
    if (is_well) {
      progress.advance(kEnqueued, static_cast<Int>(layer) + 1);
      plane.add_layer(burst, static_cast<Int>(layer));
    }
  }
  if (!is_well) {
    fail_as_owner(plane, device, burst);
    return;
  }
  if (device.record(burst->events[kLayers + 1]).is_ok()) {
    progress.mark_finish_recorded();
  }
  progress.mark_submitted();
}

// Waits until a thread sleeps in the kernel.
struct Tid {
  std::atomic<long> number{0};
  void set() { number = syscall(SYS_gettid); }
  void await_asleep() const {
    while (number == 0) {
      std::this_thread::yield();
    }
    const std::string path = "/proc/self/task/" + std::to_string(number.load()) + "/stat";
    while (true) {
      std::ifstream file(path);
      std::string text;
      std::getline(file, text);
      const auto at = text.rfind(')');
      if (at != std::string::npos && text[at + 2] == 'S') {
        return;
      }
      std::this_thread::yield();
    }
  }
};

// The three threads with their owner's loops.
struct Threads {
  struct Seen {
    BurstPtr burst;
    Plane::Stop::Why why;
    Status status;
  };

  explicit Threads(World& of, bool observes = true, bool submits = true) : world(of) {
    if (submits) {
      submitter = std::thread([this] { submit(); });
    }
    if (observes) {
      observer = std::thread([this] { observe(); });
      reporter = std::thread([this] { report(); });
    }
  }
  void submit() {
    submitter_tid.set();
    const auto plane = world.plane;
    while (true) {
      const Plane::Stop stop = plane->submit();
      if (stop.why == Plane::Stop::kTold) {
        CHECK(stop.burst == nullptr && stop.status.is_ok());
        return;
      }
      see(submit_stops, stop);
      CHECK(!stop.burst->progress.is_submitted());
      if (stop.why == Plane::Stop::kNeedsOwner) {
        CHECK(!stop.burst->progress.has_begun());
        submit_as_owner(*plane, *world.device, stop.burst);
      } else {
        CHECK(stop.why == Plane::Stop::kFailed || stop.why == Plane::Stop::kInterrupted);
        CHECK((stop.why == Plane::Stop::kFailed) != stop.status.is_ok());
        fail_as_owner(*plane, *world.device, stop.burst);
      }
    }
  }
  void observe() {
    observer_tid.set();
    const auto plane = world.plane;
    plane->observe();
  }
  void report() {
    const auto plane = world.plane;
    while (true) {
      const Plane::Stop stop = plane->next_report();
      if (stop.why == Plane::Stop::kTold) {
        CHECK(stop.burst == nullptr && stop.status.is_ok());
        return;
      }
      see(reports, stop);
      Burst& burst = *stop.burst;
      if (stop.why == Plane::Stop::kFailed) {
        CHECK(!stop.status.is_ok());
        burst.progress.give_up(false);
        plane->pop_report(burst.id);
        continue;
      }
      CHECK(stop.why == Plane::Stop::kOver);
      CHECK(burst.progress.is_submitted());
      if (!burst.progress.has_ended()) {
        if (burst.progress.has_begun() && !(burst.progress.is_finish_recorded() && stop.status.is_ok())) {
          world.device->drain();
        }
        burst.progress.mark_ended();
        const std::lock_guard<std::mutex> lock(mutex);
        ended.push_back(burst.id);
      }
      plane->pop_report(burst.id);
    }
  }
  void see(std::vector<Seen>& where, const Plane::Stop& stop) {
    const std::lock_guard<std::mutex> lock(mutex);
    where.push_back({stop.burst, stop.why, stop.status});
  }
  void join() {
    std::thread::id ids[2];
    ids[0] = submitter.get_id();
    ids[1] = observer.get_id();
    for (auto* thread : {&submitter, &observer, &reporter}) {
      if (thread->joinable()) {
        thread->join();
      }
    }
    const auto calls = world.device->calls();
    for (std::size_t i = first_call; i < calls.size(); ++i) {
      CHECK(calls[i].thread == ids[calls[i].who == Caller::kObserver]);
    }
  }
  void stop() {
    world.plane->stop();
    join();
  }

  World& world;
  const std::size_t first_call = world.device->calls().size();
  std::mutex mutex;
  std::vector<Seen> submit_stops, reports;
  std::vector<Int> ended;
  Tid submitter_tid, observer_tid;
  std::thread submitter, observer, reporter;
};

// -- the calls of bursts ---------------------------------------------------------------------------------------------

void a_burst_is_submitted_in_order_and_then_followed_layer_by_layer() {
  World world;
  const BurstPtr burst = world.a_burst();
  Threads threads(world);
  world.hand_over(burst);
  threads.stop();
  CHECK_CALLS(world.device->texts(Caller::kSubmitter),
              {"synchronize 100", "index waits 100", "read 4 2", "h2d waits 100", "h2d waits 101", "record 110",
               "copy 72", "record 111", "copy 64", "record 112", "copy 8", "record 113", "record 114", "record 115"});
  CHECK_CALLS(world.calls_of(burst, kReads), world.device->texts(Caller::kSubmitter));
  CHECK_CALLS(world.device->texts(Caller::kObserver), {"synchronize 111", "synchronize 112", "synchronize 113",
                                                       "synchronize 114", "synchronize 115"});
  CHECK(threads.submit_stops.empty() && threads.reports.size() == 1 && threads.ended == std::vector<Int>{1});
  CHECK(threads.reports[0].status.is_ok() && threads.reports[0].burst == burst);
  const Progress& progress = burst->progress;
  CHECK(progress.layers(kEnqueued) == 4 && progress.layers(kLanded) == 4 && progress.has_begun());
  CHECK(progress.is_planned() && progress.is_submitted() && progress.is_finish_recorded() && progress.has_ended());
  CHECK(!progress.is_given_up() && !burst->has_failed_on_device);
  world.check_loaded({burst});
}

// Whatever has been reached has a time, and these are in order; nothing else has one.
void check_times(const Progress& progress) {
  const Times& times = *progress.times();
  CHECK((times.begun != 0) == progress.has_begun() && (times.planned != 0) == progress.is_planned());
  CHECK((times.submitted != 0) == progress.is_submitted());
  CHECK(times.planned == 0 || (0 < times.begun && times.begun <= times.planned));
  double last = times.planned;
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    const double enqueued = times.layers[kEnqueued][layer], landed = times.layers[kLanded][layer];
    CHECK((enqueued != 0) == progress.has(kEnqueued, static_cast<Int>(layer)));
    CHECK((landed != 0) == progress.has(kLanded, static_cast<Int>(layer)));
    CHECK(enqueued == 0 || (last <= enqueued && enqueued <= times.submitted));
    CHECK(landed == 0 || (enqueued != 0 && enqueued <= landed && landed <= now()));
    last = enqueued;
  }
}

void a_burst_keeps_times_where_it_was_made_to() {
  World world;
  const BurstPtr without = world.a_burst();
  world.keeps_times = true;
  const double before = now();
  const BurstPtr with = world.a_burst();
  Threads threads(world);
  world.hand_over(without), world.hand_over(with);
  threads.stop();
  CHECK(without->progress.times() == nullptr);
  CHECK(with->progress.times()->begun >= before && with->progress.has(kLanded, kLayers - 1));
  check_times(with->progress);
  CHECK(with->progress.times()->submitted <= now());
}

void a_burst_that_fails_has_times_of_what_it_got_to() {
  World world;
  world.keeps_times = true;
  const BurstPtr burst = world.a_burst();
  world.device->judge = [&](const std::string& text) {
    return text == World::record(world.event(burst, 3)) ? a_failure(4) : Status{};
  };
  Threads threads(world);
  world.hand_over(burst);
  threads.stop();
  CHECK(burst->progress.layers(kEnqueued) == 2 && burst->progress.layers(kLanded) == 2);
  check_times(burst->progress);
}

void without_a_fence_nobody_waits_for_one() {
  World world;
  const BurstPtr burst = world.a_burst(false);
  Threads threads(world);
  world.hand_over(burst);
  threads.stop();
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), world.calls_of(burst, kReads));
  world.check_loaded({burst});
}

void flags_and_watermarks_are_never_ahead_of_the_calls() {
  World world;
  const BurstPtr burst = world.a_burst();
  Progress& progress = burst->progress;
  const Texts all = world.calls_of(burst, kReads);
  std::size_t made = 0;
  Int layers = 0;
  world.device->before = [&](const std::string& text) {
    CHECK(text == all[made]);
    CHECK(progress.has_begun() && !progress.is_submitted() && !progress.is_finish_recorded());
    CHECK(progress.is_planned() == (made >= 3));
    CHECK(progress.layers(kEnqueued) == layers && progress.layers(kLanded) == 0);
    ++made;
    layers += text >= "record 111" && text <= "record 114";
  };
  CHECK(!progress.has_begun() && !progress.is_planned());
  world.hand_over(burst);
  world.plane->stop();
  Threads(world, false).join();
  CHECK(made == all.size() && progress.is_submitted() && progress.is_finish_recorded());
}

void indices_on_the_host_are_read_without_a_device_call() {
  for (const Int stride : {1, 3, -2}) {
    World world;
    const BurstPtr burst = world.new_burst();
    world.add(burst, {0, {4, 5, 6, 7}, {12, 13, 14, 15}}, {stride, false}, {stride, false});
    world.add(burst, {1, {9}, {7}}, {stride, false}, {stride, false});
    Threads threads(world);
    world.hand_over(burst);
    threads.stop();
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), world.calls_of(burst, ""));
    CHECK(world.device->texts(Caller::kSubmitter)[0] == "index waits 100");
    CHECK(burst->copied->bases.empty());  // it has all planes
    world.check_loaded({burst});
  }
}

void only_what_is_on_the_device_is_read_there() {
  World world;
  const BurstPtr burst = world.new_burst();
  world.add(burst, {1, {9, 8, 7}, {1, 2, 3}}, {2, false}, {1, false});
  world.add(burst, {1, {6, 5}, {9, 5}}, {-1, false}, {-3, true});
  world.add(burst, {1, {2, 2}, {0, 20}}, {0, true}, {4, false});
  Threads threads(world);
  world.hand_over(burst);
  threads.stop();
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), world.calls_of(burst, "read 2 2"));
  world.check_loaded({burst});
}

void device_indices_are_not_read_before_the_start_event_is_reached() {
  World world;
  const BurstPtr burst = world.new_burst();
  world.add(burst, {1, {1}, {1}}, {1, false}, {1, false});
  world.add(burst, {1, {2}, {2}}, {1, false}, {1, true});
  world.device->reach(burst->start, false);
  Threads threads(world);
  world.hand_over(burst);
  world.device->await_call("synchronize 100");
  CHECK(world.device->calls().size() == 1);
  const_cast<Int&>(*reinterpret_cast<const Int*>(burst->shares[1].dst.address)) = 33;  // the device writes it
  world.moves[0][1].dst = {33};
  world.device->reach(burst->start, true);
  threads.stop();
  world.check_loaded({burst});
}

void ops_of_several_pairs_are_joined_in_order_of_pairs_and_then_of_ops() {
  World world;
  const BurstPtr burst = world.new_burst();
  world.add(burst, {1, {9, 8, 7}, {1, 2, 3}}, {1, false}, {1, true});
  world.add(burst, {0, {0, 1, 2, 3}, {4, 5, 6, 7}}, {3, false}, {2, true});
  world.add(burst, {1, {30}, {31}}, {1, false}, {1, false});
  world.add(burst, {0, {8, 9, 10, 11, 4, 5, 6, 7}, {8, 9, 10, 11, 0, 1, 2, 3}}, {1, false}, {-1, true});
  Threads threads(world);
  world.hand_over(burst);
  threads.stop();
  CHECK(burst->joined.size() == 2 && burst->joined[0].pair == 0 && burst->joined[1].pair == 1);
  CHECK(burst->joined[0].op_ends == (std::vector<Int>{4, 12}) && burst->joined[1].op_ends == (std::vector<Int>{3, 4}));
  const auto values = [&](std::size_t at, std::size_t count) {
    return std::vector<Int>(burst->indices->begin() + Int(at), burst->indices->begin() + Int(at + count));
  };
  CHECK(values(burst->joined[0].src_at, 12) == (std::vector<Int>{0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7}));
  CHECK(values(burst->joined[0].dst_at, 12) == (std::vector<Int>{4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3}));
  CHECK(values(burst->joined[1].src_at, 4) == (std::vector<Int>{9, 8, 7, 30}));
  CHECK(values(burst->joined[1].dst_at, 4) == (std::vector<Int>{1, 2, 3, 31}));
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), world.calls_of(burst, "read 4 8 3"));
  world.check_loaded({burst});
}

void many_ops_keep_their_order() {
  World world;
  const BurstPtr burst = world.new_burst();
  for (Int op = 0; op < 30; ++op) {
    world.add(burst, {1, {op}, {2 * op}}, {1, false}, {1, op % 3 == 0});
    if (op % 2 == 0) {
      world.add(burst, {0, {0, 1, 2, 3}, {4 * (op / 2), 4 * (op / 2) + 1, 4 * (op / 2) + 2, 4 * (op / 2) + 3}},
                {1, false}, {1, false});
    }
  }
  world.hand_over(burst);
  world.plane->stop();
  Threads(world, false).join();
  for (Int op = 0; op < 30; ++op) {
    CHECK((*burst->indices)[burst->joined[1].src_at + static_cast<std::size_t>(op)] == op);
    CHECK((*burst->indices)[burst->joined[1].dst_at + static_cast<std::size_t>(op)] == 2 * op);
  }
  world.check_loaded({burst});
}

void a_burst_of_some_pairs_moves_their_planes_only() {
  for (const std::size_t pair : {0, 1}) {
    World world;
    const BurstPtr burst = world.new_burst();
    world.add(burst, {pair, {0, 1, 2, 3}, {16, 17, 18, 19}}, {1, false}, {1, false});
    const BurstPtr nothing = world.new_burst();
    Threads threads(world);
    world.hand_over(burst);
    world.hand_over(nothing);
    threads.stop();
    Texts wanted = world.calls_of(burst, "");
    const Texts more = world.calls_of(nothing, "");
    CHECK(more.size() == 3 + 1 + kLayers + 1);
    wanted.insert(wanted.end(), more.begin(), more.end());
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), wanted);
    const Texts submitted = world.device->texts(Caller::kSubmitter);
    CHECK(std::count(submitted.begin(), submitted.end(), pair == 0 ? "copy 64" : "copy 16") == 2);
    world.check_loaded({burst, nothing});
  }
}

void bursts_are_submitted_in_the_order_in_which_they_are_handed_over() {
  World world;
  Texts wanted;
  std::vector<BurstPtr> bursts;
  std::vector<Int> numbers;
  for (int i = 0; i < 10; ++i) {
    bursts.push_back(world.a_burst(i % 2 == 0));
    const Texts calls = world.calls_of(bursts.back(), kReads);
    wanted.insert(wanted.end(), calls.begin(), calls.end());
    numbers.push_back(i + 1);
  }
  Threads threads(world);
  for (const BurstPtr& burst : bursts) {
    world.hand_over(burst);
  }
  threads.stop();
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), wanted);
  CHECK(threads.ended == numbers);
  world.check_loaded(bursts);
}

void memory_of_indices_is_used_again_only_where_nobody_has_it() {
  World world;
  const BurstPtr first = world.a_burst(), second = world.a_burst();
  const auto submit = [&](const BurstPtr& burst) {
    world.hand_over(burst);
    std::thread([&] { CHECK(world.plane->submit().why == Plane::Stop::kTold); }).join();
  };
  world.plane->stop();
  submit(first);
  const Int* memory = first->indices->data();
  const std::vector<Int> values(*first->indices);
  submit(second);
  CHECK(second->indices->data() != memory && *first->indices == values);
  const Int* others = second->indices->data();
  second->indices = nullptr;  // as where it has gone
  const BurstPtr smaller = world.new_burst();
  world.add(smaller, {1, {1}, {1}}, {}, {});
  submit(smaller);
  CHECK(smaller->indices->data() == others);
  smaller->indices = nullptr;
  const BurstPtr larger = world.new_burst();
  std::vector<Int> many(48);
  for (Int i = 0; i < 48; ++i) {
    many[static_cast<std::size_t>(i)] = i;
  }
  world.add(larger, {1, many, many}, {}, {});
  submit(larger);
  CHECK(larger->indices->size() == 96 && larger->num_bytes == 2 * 48 * 4);
}

// -- failures --------------------------------------------------------------------------------------------------------

void a_burst_whose_nth_call_fails_comes_out_with_what_it_failed_with_and_the_next_is_served() {
  const std::size_t num_calls = World().a_burst() != nullptr ? 14 : 0;
  for (std::size_t n = 1; n <= num_calls; ++n) {
    World world;
    const BurstPtr burst = world.a_burst(), next = world.a_burst();
    const Texts all = world.calls_of(burst, kReads);
    CHECK(all.size() == num_calls);
    const Status failure = a_failure(static_cast<int>(n));
    world.device->fail(Caller::kSubmitter, static_cast<int>(n), failure);
    world.hand_over(burst);
    world.hand_over(next);
    std::thread submitter([&] {
      const Plane::Stop stop = world.plane->submit();
      CHECK(stop.burst == burst && stop.why == Plane::Stop::kFailed && is_same(stop.status, failure));
    });
    submitter.join();
    const Texts made(all.begin(), all.begin() + Int(n));
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), made);
    const Progress& progress = burst->progress;
    CHECK(progress.has_begun() && !progress.is_submitted() && !progress.is_finish_recorded());
    CHECK(progress.is_planned() == (n > 3));
    const Int enqueued = n <= 8 ? 0 : n <= 10 ? 1 : n <= 12 ? 2 : n <= 13 ? 3 : 4;
    CHECK(progress.layers(kEnqueued) == enqueued);
    World::Pools wanted = world.empty_pools();
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(enqueued + (n == 8 || n == 10 || n == 12)); ++layer) {
      world.load(burst, layer, wanted);
    }
    CHECK(wanted == world.dst);
    // Again without the owner: it is the same burst, in the middle of which he is.
    std::thread([&] {
      const Plane::Stop stop = world.plane->submit();
      CHECK(stop.burst == burst && stop.why == Plane::Stop::kInterrupted && stop.status.is_ok());
    }).join();
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), made);
    fail_as_owner(*world.plane, *world.device, burst);
    world.device->forget_calls();
    Threads threads(world);
    threads.stop();
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), world.calls_of(next, kReads));
    CHECK(threads.ended == (std::vector<Int>{1, 2}) && threads.submit_stops.empty());
    CHECK(progress.layers(kEnqueued) == enqueued && progress.layers(kLanded) == enqueued);
    CHECK(next->progress.layers(kLanded) == 4);
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      world.load(next, layer, wanted);
    }
    CHECK(wanted == world.dst);
  }
}

void a_burst_for_which_no_room_can_be_made_goes_no_further() {
  World world(2);
  const BurstPtr burst = world.a_burst();
  Texts wanted = world.calls_of(burst, kReads);
  world.device->hold();
  world.device->fail(Caller::kSubmitter, 11, a_failure(8));
  world.hand_over(burst);
  std::thread([&] {
    const Plane::Stop stop = world.plane->submit();
    CHECK(stop.burst == burst && stop.why == Plane::Stop::kFailed && is_same(stop.status, a_failure(8)));
  }).join();
  world.device->resume();
  wanted.resize(10);  // two layers
  wanted.push_back(World::synchronize(world.event(burst, 1)));
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), wanted);
  CHECK(burst->progress.layers(kEnqueued) == 2);
}

void a_lost_device_fails_every_call_and_bursts_still_end() {
  for (int n = 1; n <= 14; ++n) {
    World world;
    const BurstPtr burst = world.a_burst(), next = world.a_burst();
    world.device->block(Caller::kSubmitter, n);
    Threads threads(world);
    world.hand_over(burst);
    world.hand_over(next);
    world.device->await_blocked(Caller::kSubmitter);
    world.device->lose();
    threads.stop();
    CHECK(threads.submit_stops.size() == 2 && threads.submit_stops[0].burst == burst);
    for (const auto& seen : threads.submit_stops) {
      CHECK(seen.why == Plane::Stop::kFailed && is_same(seen.status, status_of(Status::kLost)));
    }
    CHECK(threads.ended == (std::vector<Int>{1, 2}));
  }
}

void a_layer_that_does_not_land_fails_its_burst_which_ends_once_it_is_over(bool is_submitted_before) {
  for (int n = 1; n <= 4; ++n) {
    World world;
    const BurstPtr burst = world.a_burst(), next = world.a_burst();
    world.device->fail(Caller::kObserver, n, a_failure(n));
    world.hand_over(burst);
    world.hand_over(next);
    if (is_submitted_before) {  // else it may be given up before its next layer is submitted
      world.plane->stop();
      Threads(world, false).join();
    }
    Threads threads(world);
    threads.stop();
    CHECK(threads.reports.size() == 3 && threads.reports[0].burst == burst);
    CHECK(threads.reports[0].why == Plane::Stop::kFailed);
    CHECK(is_same(threads.reports[0].status, a_failure(n)));
    CHECK(threads.reports[1].burst == burst && threads.reports[1].status.is_ok());
    CHECK(burst->progress.layers(kLanded) == n - 1 && next->progress.layers(kLanded) == 4);
    CHECK(threads.ended == (std::vector<Int>{1, 2}));
    Texts wanted;
    for (int layer = 1; layer <= n; ++layer) {
      wanted.push_back(World::synchronize(world.event(burst, static_cast<std::size_t>(layer))));
    }
    if (burst->progress.is_finish_recorded()) {
      wanted.push_back(World::synchronize(world.event(burst, kLayers + 1)));
    }
    for (std::size_t number = 1; number <= kLayers + 1; ++number) {
      wanted.push_back(World::synchronize(world.event(next, number)));
    }
    CHECK_CALLS(world.device->texts(Caller::kObserver), wanted);
  }
}

void a_finish_event_that_is_not_reached_is_told_with_the_end() {
  World world;
  const BurstPtr burst = world.a_burst();
  world.device->fail(Caller::kObserver, 5, a_failure(3));
  Threads threads(world);
  world.hand_over(burst);
  threads.stop();
  CHECK(threads.reports.size() == 1 && threads.reports[0].why == Plane::Stop::kOver);
  CHECK(is_same(threads.reports[0].status, a_failure(3)) && burst->progress.layers(kLanded) == 4);
}

void where_no_finish_was_recorded_nobody_waits_for_it() {
  World world;
  const BurstPtr burst = world.a_burst();
  world.device->fail(Caller::kSubmitter, 14, a_failure(1));
  world.hand_over(burst);
  std::thread([&] { CHECK(world.plane->submit().why == Plane::Stop::kFailed); }).join();
  burst->progress.mark_submitted();
  Threads(world, true, false).stop();
  CHECK_CALLS(world.device->texts(Caller::kObserver),
              {"synchronize 111", "synchronize 112", "synchronize 113", "synchronize 114"});
}

void reports_wait_for_whoever_pops_them_and_nobody_waits_for_him() {
  World world;
  const BurstPtr burst = world.a_burst(), next = world.a_burst();
  world.hand_over(burst);
  world.hand_over(next);
  world.plane->stop();
  Threads(world, false).join();
  Plane& plane = *world.plane;
  CHECK(plane.report().why == Plane::Stop::kTold);
  std::thread([&] { plane.observe(); }).join();
  CHECK(world.device->texts(Caller::kObserver).size() == 2 * (kLayers + 1) && next->progress.layers(kLanded) == 4);
  for (const Plane::Stop& stop : {plane.next_report(), plane.report(), plane.next_report()}) {
    CHECK(stop.burst == burst && stop.why == Plane::Stop::kOver && stop.status.is_ok());
  }
  plane.pop_report(2);  // not that one
  CHECK(plane.report().burst == burst);
  plane.pop_report(1);
  plane.pop_report(1);
  CHECK(plane.next_report().burst == next && plane.report().burst == next);
  plane.pop_report(2);
  plane.pop_report(2);
  CHECK(plane.report().why == Plane::Stop::kTold && plane.next_report().why == Plane::Stop::kTold);
}

// The owner's thread leaves it for a while to whoever looks all the time, and for no longer.
void a_report_that_nobody_takes_comes_out(bool is_left) {
  World world;
  world.hand_over(world.a_burst());
  std::thread submitter([&] { CHECK(world.plane->submit().why == Plane::Stop::kTold); });
  std::thread observer([&] { world.plane->observe(); });
  std::atomic<bool> is_out{false};
  std::thread reporter([&] {
    CHECK(world.plane->next_report().why == Plane::Stop::kOver);
    is_out = true;
  });
  while (!is_out) {
    if (world.plane->report().burst && is_left) {
      world.plane->leave_report();
    }
  }
  reporter.join();
  world.plane->stop();
  submitter.join();
  observer.join();
}

void a_burst_that_is_handed_over_again_is_followed_once_and_reported_again() {
  World world;
  const BurstPtr burst = world.a_burst();
  world.hand_over(burst);
  world.hand_over(burst);
  world.plane->stop();
  Threads(world, false).join();
  std::thread([&] { world.plane->observe(); }).join();
  CHECK(world.device->texts(Caller::kObserver).size() == kLayers + 1);  // its events may be another's by then
  for (int i = 0; i < 2; ++i) {
    CHECK(world.plane->next_report().burst == burst && !burst->progress.has_ended());
    world.plane->pop_report(1);
  }
  CHECK(world.plane->next_report().why == Plane::Stop::kTold);
}

void a_burst_that_lands_slowly_is_followed_to_its_end(bool is_waited_for) {
  World world;
  const BurstPtr burst = world.a_burst();
  world.device->hold();
  Threads threads(world);
  world.hand_over(burst);
  Waiter waiter;
  for (Int layer = 0; layer < 4; ++layer) {
    world.device->await_call(World::record(world.event(burst, static_cast<std::size_t>(layer) + 1)));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // a pace at which there is time to rest
    if (is_waited_for) {
      CHECK(burst->progress.add(kLanded, layer, &waiter));
    }
    CHECK(burst->progress.layers(kLanded) == layer);
    world.device->step_layers(1);
    while (is_waited_for && !burst->progress.has(kLanded, layer)) {
      waiter.sleep();
    }
    while (!burst->progress.has(kLanded, layer)) {
      std::this_thread::yield();
    }
    burst->progress.remove(&waiter);
  }
  world.device->resume();
  threads.stop();
  CHECK(threads.ended == std::vector<Int>{1});
  world.check_loaded({burst});
}

void indices_that_are_refused_can_be_read_by_the_owner() {
  const std::vector<std::pair<std::vector<Int>, std::vector<Int>>> wrong{
      {{0, 1}, {3, 3}}, {{0, 1}, {3, 64}}, {{64, 1}, {3, 4}}, {{0, -1}, {3, 4}}, {{0, 1}, {Int(1) << 62, 4}}};
  for (const auto& [src, dst] : wrong) {
    World world;
    const BurstPtr burst = world.new_burst(), next = world.a_burst();
    world.add(burst, {1, src, dst}, {1, false}, {1, true});
    world.add(burst, {0, {0, 1, 2, 3}, {4, 5, 6, 7}}, {1, false}, {1, false});
    world.add(burst, {1, {50}, {51}}, {1, false}, {-1, true});
    world.hand_over(burst);
    world.hand_over(next);
    std::thread([&] {
      const Plane::Stop stop = world.plane->submit();
      CHECK(stop.burst == burst && stop.why == Plane::Stop::kFailed);
      CHECK(is_same(stop.status, status_of(Status::kInvalid)));
    }).join();
    CHECK(burst->joined.size() == 2 && burst->joined[1].pair == 1);
    CHECK(burst->joined[1].op_ends == (std::vector<Int>{2, 3}));
    const Int* values = burst->indices->data();
    CHECK(std::vector<Int>(values + burst->joined[1].src_at, values + burst->joined[1].src_at + 3) ==
          (std::vector<Int>{src[0], src[1], 50}));
    CHECK(std::vector<Int>(values + burst->joined[1].dst_at, values + burst->joined[1].dst_at + 3) ==
          (std::vector<Int>{dst[0], dst[1], 51}));
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), {"synchronize 100", "index waits 100", "read 2 1"});
    CHECK(!burst->progress.is_planned());
    fail_as_owner(*world.plane, *world.device, burst);
    world.device->forget_calls();
    Threads threads(world);
    threads.stop();
    CHECK(values[burst->joined[1].src_at] == src[0]);  // not overwritten with those of the next
    CHECK(threads.ended == (std::vector<Int>{1, 2}));
    world.check_loaded({next});
  }
}

// -- owners ----------------------------------------------------------------------------------------------------------

void a_burst_that_needs_its_owner_comes_out_before_it_has_begun() {
  World world;
  const BurstPtr first = world.a_burst(), owned = world.new_burst(), last = world.a_burst();
  owned->needs_owner = true;
  Threads threads(world);
  for (const BurstPtr& burst : {first, owned, last}) {
    world.hand_over(burst);
  }
  threads.stop();
  CHECK(threads.submit_stops.size() == 1 && threads.submit_stops[0].burst == owned);
  CHECK(threads.submit_stops[0].why == Plane::Stop::kNeedsOwner && threads.submit_stops[0].status.is_ok());
  Texts wanted = world.calls_of(first, kReads);
  for (std::size_t number = 0; number < kLayers + 2; ++number) {
    wanted.push_back(World::record(world.event(owned, number)));
  }
  const Texts more = world.calls_of(last, kReads);
  wanted.insert(wanted.end(), more.begin(), more.end());
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), wanted);
  CHECK(threads.ended == (std::vector<Int>{1, 2, 3}) && owned->progress.layers(kLanded) == 4);
}

void a_burst_in_the_middle_of_which_its_owner_was_comes_out_interrupted() {
  for (const bool needs_owner : {false, true}) {
    for (const bool is_given_up : {false, true}) {
      World world;
      const BurstPtr burst = world.a_burst();
      burst->needs_owner = needs_owner;
      CHECK(burst->progress.begin());
      if (is_given_up) {
        burst->progress.give_up(false);
      }
      world.hand_over(burst);
      Threads threads(world);
      threads.stop();
      CHECK(threads.submit_stops.size() == 1 && threads.submit_stops[0].why == Plane::Stop::kInterrupted);
      CHECK(world.device->texts(Caller::kSubmitter).size() == 5);  // its owner's
      CHECK(threads.ended == std::vector<Int>{1});
    }
  }
}

void of_a_burst_that_was_given_up_before_no_call_is_made() {
  for (const bool needs_owner : {false, true}) {
    World world;
    const BurstPtr burst = world.a_burst(), next = world.a_burst();
    burst->needs_owner = needs_owner;
    if (needs_owner) {  // as where it could not be set up
      burst->events = nullptr;
      burst->start = burst->fence = 0;
      burst->is_set_up = false;
    }
    CHECK(burst->progress.give_up(true));
    Threads threads(world);
    world.hand_over(burst);
    world.hand_over(next);
    threads.stop();
    CHECK(threads.submit_stops.empty() && threads.ended == (std::vector<Int>{1, 2}));
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), world.calls_of(next, kReads));
    CHECK(world.device->texts(Caller::kObserver).size() == kLayers + 1);
    CHECK(!burst->progress.has_begun() && burst->progress.is_submitted() && !burst->progress.is_finish_recorded());
    CHECK(threads.reports[0].burst == burst && threads.reports[0].status.is_ok());
    world.check_loaded({next});
  }
}

void a_burst_that_was_not_set_up_comes_out_interrupted_before_a_call() {
  World world;
  const BurstPtr burst = world.plane->new_burst(false);
  world.plane->hand_over(burst, 7);
  std::thread([&] {
    const Plane::Stop stop = world.plane->submit();
    CHECK(stop.burst == burst && stop.why == Plane::Stop::kInterrupted && stop.status.is_ok());
  }).join();
  CHECK(world.device->calls().empty() && !burst->progress.has_begun());
  burst->progress.give_up(false);
  Threads threads(world);
  threads.stop();
  CHECK(world.device->calls().empty() && threads.ended == std::vector<Int>{7});
}

void a_burst_that_is_given_up_between_two_layers_goes_no_further() {
  const std::size_t last_call[kLayers] = {6, 8, 10, 12};  // before each layer
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    World world;
    const BurstPtr burst = world.a_burst();
    const Texts all = world.calls_of(burst, kReads);
    world.device->block(Caller::kSubmitter, static_cast<int>(last_call[layer]));
    world.hand_over(burst);
    std::thread submitter([&] {
      const Plane::Stop stop = world.plane->submit();
      CHECK(stop.burst == burst && stop.why == Plane::Stop::kFailed);
      CHECK(is_same(stop.status, status_of(Status::kGivenUp)));
    });
    world.device->await_blocked(Caller::kSubmitter);
    CHECK(!burst->progress.give_up(true));
    CHECK(burst->progress.give_up(false));
    world.device->release();
    submitter.join();
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), Texts(all.begin(), all.begin() + Int(last_call[layer])));
    CHECK(burst->progress.layers(kEnqueued) == static_cast<Int>(layer) && !burst->progress.is_finish_recorded());
  }
}

void a_burst_that_is_handed_over_twice_is_served_once() {
  World world;
  const BurstPtr first = world.a_burst(), second = world.a_burst();
  for (const BurstPtr& burst : {first, first, second, first, second}) {
    world.hand_over(burst);
  }
  Threads threads(world);
  threads.stop();
  Texts wanted = world.calls_of(first, kReads);
  const Texts more = world.calls_of(second, kReads);
  wanted.insert(wanted.end(), more.begin(), more.end());
  CHECK_CALLS(world.device->texts(Caller::kSubmitter), wanted);
  CHECK(world.device->texts(Caller::kObserver).size() == 2 * (kLayers + 1));
  CHECK(threads.ended == (std::vector<Int>{1, 2}) && threads.reports.size() == 5);
}

void a_burst_that_is_handed_over_again_once_it_has_ended_is_told_of_at_once() {
  World world;
  const BurstPtr ended = world.a_burst();
  ended->progress.give_up(false);
  ended->progress.mark_submitted();
  ended->progress.mark_ended();
  Threads threads(world);
  threads.submitter_tid.await_asleep();
  threads.observer_tid.await_asleep();
  world.hand_over(ended);
  const auto is_told = [&] {
    const std::lock_guard<std::mutex> lock(threads.mutex);
    return !threads.reports.empty();
  };
  while (!is_told()) {
    std::this_thread::yield();
  }
  threads.stop();
  CHECK(world.device->calls().empty() && threads.ended.empty());
}

// -- in flight -------------------------------------------------------------------------------------------------------

void there_are_never_more_layers_in_flight_than_allowed(std::size_t max_layers) {
  World world(max_layers);
  world.device->hold();
  std::vector<BurstPtr> bursts;
  for (int i = 0; i < 5; ++i) {
    bursts.push_back(world.a_burst());
  }
  Threads threads(world, max_layers % 2 == 0);  // also where nobody observes
  for (const BurstPtr& burst : bursts) {
    world.hand_over(burst);
  }
  // It waits for half of them; never for one that is further behind than that, nor for less than there is room for.
  const std::size_t half = std::max<std::size_t>(1, max_layers / 2), total = 5 * kLayers;
  const auto event = [&](std::size_t layer) { return world.event(bursts[layer / kLayers], layer % kLayers + 1); };
  for (std::size_t landed = 0; landed + max_layers < total; landed += half) {
    world.device->await_call(World::synchronize(event(landed + half - 1)));
    // Each was waited for by this thread, and not by the other: that one waits for one after the other.
    std::size_t waits = 0;
    do {
      waits = 0;
      for (const std::string& text : world.device->texts(Caller::kSubmitter)) {
        waits += text == World::synchronize(event(landed + half - 1));
      }
      std::this_thread::yield();
    } while (waits == 0);
    CHECK(waits == 1);
    const std::size_t next = landed + max_layers;
    const Texts submitted = world.device->texts(Caller::kSubmitter);
    CHECK(std::count(submitted.begin(), submitted.end(), World::record(event(next))) == 0);
    CHECK(std::count(submitted.begin(), submitted.end(), World::record(event(next - 1))) == 1);
    CHECK(bursts[next / kLayers]->progress.layers(kEnqueued) == static_cast<Int>(next % kLayers));
    world.device->step_layers(static_cast<Int>(half));
    if (threads.observer.joinable()) {  // or it may still know nothing of the last layers
      while (bursts[(landed + half - 1) / kLayers]->progress.layers(kLanded) <= Int((landed + half - 1) % kLayers)) {
        std::this_thread::yield();
      }
    }
  }
  world.plane->stop();
  threads.submitter.join();
  world.device->resume();
  if (threads.observer.joinable()) {
    threads.observer.join();
    threads.reporter.join();
  }
  CHECK(world.device->most_outstanding == static_cast<Int>(std::min(max_layers, total)));
  world.check_loaded(bursts);
}

void an_owner_keeps_to_the_same_bound() {
  World world(4);
  Plane& plane = *world.plane;
  const BurstPtr burst = world.new_burst(), other = world.new_burst();
  world.device->hold();
  world.device->keeps_bound = false;  // layers land here that the device knows nothing of
  CHECK(plane.has_room_for(4) && !plane.has_room_for(5) && plane.make_room().is_ok());
  const auto submit = [&](const BurstPtr& of, Int layer) {
    plane.add_layer(of, layer);
    world.device->record(world.event(of, static_cast<std::size_t>(layer) + 1));
  };
  submit(burst, 0);
  CHECK(plane.has_room_for(3) && !plane.has_room_for(4));
  submit(burst, 1), submit(burst, 2), submit(burst, 3);
  CHECK(plane.has_room_for(0) && !plane.has_room_for(1));
  burst->progress.advance(kLanded, 1);
  CHECK(plane.has_room_for(1) && !plane.has_room_for(2));
  CHECK(plane.make_room().is_ok());  // without a call
  CHECK(world.device->calls().size() == 4);
  submit(other, 0);
  world.device->block(Caller::kSubmitter, 1);
  std::thread waits([&] { CHECK(plane.make_room().is_ok()); });
  world.device->await_blocked(Caller::kSubmitter);
  CHECK(world.device->calls().back().text == World::synchronize(world.event(burst, 3)));
  world.device->step(3);
  world.device->release();
  waits.join();
  CHECK(plane.has_room_for(2) && !plane.has_room_for(3));
  burst->progress.mark_ended();  // with a layer that never landed
  CHECK(plane.has_room_for(3) && !plane.has_room_for(4));
  other->progress.advance(kLanded, 1);
  CHECK(plane.has_room_for(4));
  submit(other, 1), submit(other, 2), submit(other, 3);
  CHECK(!plane.has_room_for(2));
  other->progress.advance(kLanded, 4);
  CHECK(plane.has_room_for(4));  // all that have landed are forgotten, not only one
  const BurstPtr third = world.new_burst();
  // A device that fails says so.
  for (Int layer = 0; layer < 4; ++layer) {
    submit(third, layer);
  }
  world.device->fail(Caller::kSubmitter, 1, a_failure(5));
  CHECK(is_same(plane.make_room(), a_failure(5)));
  CHECK(!plane.has_room_for(1));  // what was not waited for is still in flight
  CHECK(world.device->calls().back().text == World::synchronize(world.event(third, 2)));
}

void what_has_landed_meanwhile_is_not_waited_for() {
  World world(4);
  const BurstPtr burst = world.new_burst();
  for (Int layer = 0; layer < 4; ++layer) {
    world.device->reach(world.event(burst, static_cast<std::size_t>(layer) + 1), false);
    world.plane->add_layer(burst, layer == 0 ? 3 : layer - 1);  // the first is the last to land
  }
  burst->progress.advance(kLanded, 2);
  CHECK(world.plane->make_room().is_ok());
  CHECK(world.device->calls().empty());
  CHECK(world.plane->has_room_for(3) && !world.plane->has_room_for(4));
  world.device->reach(world.event(burst, 3), true);  // the observer does not know of it
  CHECK(world.plane->has_room_for(4) && !world.plane->has_room_for(5));
}

// -- who is told -----------------------------------------------------------------------------------------------------

void a_doorbell_is_rung_when_a_wanted_layer_gets_there_and_not_before() {
  for (const Mark mark : {kEnqueued, kLanded}) {
    const Mark other = mark == kEnqueued ? kLanded : kEnqueued;
    const auto doorbell = std::make_shared<Doorbell>();
    Progress progress(doorbell, std::make_shared<Waiter>());
    progress.advance(mark, 1);
    CHECK(rings(*doorbell) == 0);  // nobody wants it
    CHECK(progress.want(mark, 0) && rings(*doorbell) == 0);
    CHECK(!progress.want(mark, 3));
    progress.advance(mark, 2);
    progress.advance(mark, 3);
    progress.advance(other, 8);
    CHECK(rings(*doorbell) == 0);
    progress.advance(mark, 4);
    CHECK(rings(*doorbell) == 1);
    progress.advance(mark, 5);
    CHECK(rings(*doorbell) == 0);  // once
    CHECK(!progress.want(mark, 7) && !progress.want(mark, 6) && !progress.want(mark, 9));
    progress.advance(mark, 6);
    CHECK(rings(*doorbell) == 0);
    progress.advance(mark, 7);
    CHECK(rings(*doorbell) == 1);  // for the first of them
    progress.advance(mark, 20);
    CHECK(rings(*doorbell) == 0);
    CHECK(!progress.want(mark, 20));
    progress.advance(mark, 20);
    progress.advance(mark, 19);
    CHECK(rings(*doorbell) == 0 && progress.layers(mark) == 20 && !progress.has(mark, 20) && progress.has(mark, 19));
    progress.advance(mark, 100);
    CHECK(rings(*doorbell) == 1);
  }
}

void a_silenced_doorbell_can_be_rung_again() {
  Doorbell doorbell;
  doorbell.silence();
  doorbell.ring(), doorbell.ring();
  pollfd look{doorbell.fd(), POLLIN, 0};
  CHECK(poll(&look, 1, 0) == 1);
  doorbell.silence();
  CHECK(poll(&look, 1, 0) == 0);
  doorbell.ring();
  CHECK(poll(&look, 1, 0) == 1 && rings(doorbell) == 1);
}

void a_doorbell_is_closed_with_the_last_who_has_it() {
  auto doorbell = std::make_shared<Doorbell>();
  const int fd = doorbell->fd();
  auto progress = std::make_unique<Progress>(doorbell, nullptr);
  doorbell = nullptr;
  pollfd look{fd, POLLIN, 0};
  CHECK(poll(&look, 1, 0) == 0 && (look.revents & POLLNVAL) == 0);
  progress = nullptr;
  CHECK(poll(&look, 1, 0) == 1 && (look.revents & POLLNVAL) != 0);
}

bool rings(const Alarm& alarm) {
  pollfd look{alarm.fd(), POLLIN, 0};
  return poll(&look, 1, 0) == 1;
}

// Seconds until it rings, 0 where it does not.
double remaining(const Alarm& alarm) {
  itimerspec time{};
  CHECK(timerfd_gettime(alarm.fd(), &time) == 0);
  return static_cast<double>(time.it_value.tv_sec) + static_cast<double>(time.it_value.tv_nsec) * 1e-9;
}

void await_ring(const Alarm& alarm) {
  pollfd look{alarm.fd(), POLLIN, 0};
  CHECK(poll(&look, 1, -1) == 1);
}

void an_alarm_rings_once_its_time_is_over_and_until_it_is_set_again_or_unset() {
  Alarm alarm;
  CHECK(!rings(alarm) && remaining(alarm) == 0);
  alarm.unset();
  for (const double seconds : {-1.0, 0.0, 1e-12, 1e-6, 1e-3}) {
    alarm.set(seconds);
    await_ring(alarm);
    CHECK(rings(alarm) && remaining(alarm) == 0);
    alarm.unset();
    CHECK(!rings(alarm) && remaining(alarm) == 0);
  }
  alarm.set(1e-6);
  await_ring(alarm);
  for (const double seconds : {2.75, 1000.0, 1e300}) {
    alarm.set(seconds);
    const double until = remaining(alarm);
    CHECK(!rings(alarm) && until <= seconds && until > std::min(seconds, 1e9) - 1);
  }
  alarm.unset();
  CHECK(!rings(alarm) && remaining(alarm) == 0);
}

void the_alarm_rings_for_a_burst_that_does_not_end_and_again_for_the_next_once_it_was_heard() {
  World world(1000, 64, 1e-3);
  Plane& plane = *world.plane;
  CHECK(!rings(plane.alarm()) && remaining(plane.alarm()) == 0);
  world.hand_over(world.a_burst());  // there is nobody to submit it
  await_ring(plane.alarm());
  world.hand_over(world.a_burst());
  CHECK(remaining(plane.alarm()) == 0);  // it has rung and not been heard
  world.all[1]->handed_over_at -= 1;
  CHECK(plane.hear_alarm() == 2);
  CHECK(!rings(plane.alarm()) && remaining(plane.alarm()) == 0);
  world.hand_over(world.a_burst());
  await_ring(plane.alarm());
  CHECK(plane.hear_alarm() == 3 && plane.hear_alarm() == 3);
}

void the_alarm_that_is_heard_is_set_for_the_first_burst_that_it_has_not_rung_for() {
  World world(1000, 64, 1000);
  Plane& plane = *world.plane;
  CHECK(plane.hear_alarm() == 0 && remaining(plane.alarm()) == 0);
  for (int burst = 0; burst < 4; ++burst) {
    world.hand_over(world.a_burst());
  }
  CHECK(plane.hear_alarm() == 0 && remaining(plane.alarm()) > 999);
  world.all[0]->handed_over_at -= 2000;
  world.all[1]->handed_over_at -= 1000;
  world.all[2]->handed_over_at -= 300;
  world.all[3]->handed_over_at -= 200;
  CHECK(plane.hear_alarm() == 2 && remaining(plane.alarm()) <= 700 && remaining(plane.alarm()) > 699);
  world.hand_over(world.all[2]);  // a second time, which is no later time
  CHECK(plane.hear_alarm() == 2 && remaining(plane.alarm()) <= 700);
  world.all[2]->handed_over_at -= 1000;
  world.all[3]->handed_over_at -= 1000;
  CHECK(plane.hear_alarm() == 4 && remaining(plane.alarm()) == 0);
}

void the_alarm_rings_for_a_burst_whose_end_was_reported_and_not_dealt_with() {
  World world(1000, 64, 1000);
  Plane& plane = *world.plane;
  world.hand_over(world.a_burst());
  plane.stop();
  CHECK(plane.submit().why == Plane::Stop::kTold);
  plane.observe();
  CHECK(plane.hear_alarm() == 0 && remaining(plane.alarm()) > 0);
  world.all[0]->handed_over_at -= 1000;
  CHECK(plane.hear_alarm() == 1);
  plane.pop_report(1);
  CHECK(plane.hear_alarm() == 0 && remaining(plane.alarm()) == 0);
}

void the_alarm_is_set_by_the_first_of_several_bursts() {
  World world(1000, 64, 1000);
  Plane& plane = *world.plane;
  world.hand_over(world.a_burst());
  const double first = remaining(plane.alarm());
  CHECK(first > 0 && first <= 1000);
  while (remaining(plane.alarm()) == first) {
  }
  world.hand_over(world.a_burst());
  CHECK(remaining(plane.alarm()) < first);
}

void the_alarm_is_unset_by_the_last_report_and_not_before() {
  World world(1000, 64, 1000);
  Plane& plane = *world.plane;
  world.hand_over(world.a_burst());
  world.hand_over(world.a_burst());
  plane.stop();
  CHECK(plane.submit().why == Plane::Stop::kTold);
  plane.observe();
  CHECK(remaining(plane.alarm()) > 0);
  plane.pop_report(1);
  CHECK(remaining(plane.alarm()) > 0);
  plane.pop_report(1);  // a second time
  CHECK(remaining(plane.alarm()) > 0);
  plane.pop_report(2);
  CHECK(remaining(plane.alarm()) == 0);
  world.hand_over(world.a_burst());
  CHECK(remaining(plane.alarm()) > 0);
}

// Whether the report is popped before or after the observing thread has come back from leaving it.
void the_alarm_is_unset_once_nothing_is_in_flight_however_that_races() {
  for (int round = 0; round < 200; ++round) {
    World world(1000, 64, 1000);
    Threads threads(world);
    for (int burst = 0; burst < 3; ++burst) {
      world.hand_over(world.a_burst());
    }
    threads.stop();
    CHECK(remaining(world.plane->alarm()) == 0 && !rings(world.plane->alarm()));
  }
}

// How often it was woken since it was last asked: what it sleeps on has a deadline that is over.
Int wakes(Waiter& waiter) {
  Int count = 0;
  while (waiter.sleep_until(0) == Slept::kWoken) {
    ++count;
  }
  return count;
}

void a_sleeper_is_woken_when_its_layer_gets_there_and_not_once_it_is_removed() {
  for (const Mark mark : {kEnqueued, kLanded}) {
    const Mark other = mark == kEnqueued ? kLanded : kEnqueued;
    Progress progress(std::make_shared<Doorbell>(), std::make_shared<Waiter>());
    Waiter first, second;
    CHECK(progress.add(mark, 1, &first) && progress.add(mark, 2, &second));
    progress.advance(other, 8);
    progress.advance(mark, 1);
    CHECK(wakes(first) == 0 && wakes(second) == 0);
    progress.advance(mark, 2);
    CHECK(wakes(first) == 1 && wakes(second) == 0);
    progress.remove(&first);
    progress.advance(mark, 3);
    CHECK(wakes(first) == 0 && wakes(second) == 1);
    progress.remove(&first);
    progress.remove(&second);
    CHECK(!progress.add(mark, 2, &first) && progress.add(mark, 3, &first));
    progress.advance(mark, 3);
    CHECK(wakes(first) == 0);
    progress.advance(mark, 9);
    CHECK(wakes(first) == 1 && wakes(second) == 0);
  }
}

void an_observer_is_woken_by_what_the_data_plane_does() {
  const auto observer = std::make_shared<Waiter>();
  Progress progress(std::make_shared<Doorbell>(), observer);
  progress.advance(kEnqueued, 1);
  CHECK(wakes(*observer) >= 1);
  progress.advance(kLanded, 1);
  CHECK(wakes(*observer) == 0);
  progress.mark_submitted();
  CHECK(wakes(*observer) >= 1);
}

void an_observer_is_woken_by_whoever_begins_to_wait_for_a_landing() {
  const auto observer = std::make_shared<Waiter>();
  Progress progress(std::make_shared<Doorbell>(), observer);
  Waiter waiter;
  CHECK(!progress.want(kEnqueued, 0) && progress.add(kEnqueued, 0, &waiter));
  CHECK(wakes(*observer) == 0);
  CHECK(!progress.want(kLanded, 1));
  CHECK(wakes(*observer) == 1);
  CHECK(progress.add(kLanded, 1, &waiter));
  CHECK(wakes(*observer) == 1);
  progress.advance(kLanded, 2);
  CHECK(progress.want(kLanded, 1) && !progress.add(kLanded, 1, &waiter));  // it is there
  CHECK(wakes(*observer) == 0);
}

void the_first_layer_that_is_waited_for_is_known() {
  for (const Mark mark : {kEnqueued, kLanded}) {
    const Mark other = mark == kEnqueued ? kLanded : kEnqueued;
    Progress progress(std::make_shared<Doorbell>(), std::make_shared<Waiter>());
    Waiter first, second;
    CHECK(progress.first_waited_for(mark, 77) == 77);
    progress.want(other, 1), progress.add(other, 1, &first);
    CHECK(progress.first_waited_for(mark, 77) == 77);
    progress.want(mark, 9);
    CHECK(progress.first_waited_for(mark, 77) == 9 && progress.first_waited_for(mark, 8) == 8);
    progress.add(mark, 5, &first), progress.add(mark, 7, &second);
    CHECK(progress.first_waited_for(mark, 77) == 5);
    progress.remove(&first);
    CHECK(progress.first_waited_for(mark, 77) == 7);
    progress.want(mark, 3);
    CHECK(progress.first_waited_for(mark, 77) == 3);
    progress.advance(mark, 4);  // which it was told of
    CHECK(progress.first_waited_for(mark, 77) == 7);
  }
}

void progress_is_dated_when_a_layer_lands() {
  const double before = now();
  Progress progress(std::make_shared<Doorbell>(), std::make_shared<Waiter>());
  const double made = progress.progress_at();
  CHECK(made >= before && made <= now());
  progress.advance(kEnqueued, 1);
  CHECK(progress.progress_at() == made);
  while (now() == made) {
  }
  progress.advance(kLanded, 1);
  CHECK(progress.progress_at() > made && progress.progress_at() <= now());
}

void every_step_is_timed_once_where_somebody_wants_to_know() {
  Progress progress(std::make_shared<Doorbell>(), std::make_shared<Waiter>(), std::make_unique<Times>(4));
  const Times& times = *progress.times();
  double last = now();
  // That a time was taken since this was last asked.
  const auto is_new = [&](double time) {
    const bool is_between = time >= last && time <= now();
    for (last = now(); now() == last;) {
    }
    last = now();
    return is_between;
  };
  progress.begin();
  CHECK(is_new(times.begun));
  progress.mark_planned();
  CHECK(is_new(times.planned));
  progress.advance(kEnqueued, 1);
  CHECK(is_new(times.layers[kEnqueued][0]));
  progress.advance(kEnqueued, 3);  // two at once
  const double second = times.layers[kEnqueued][1];
  CHECK(is_new(second) && times.layers[kEnqueued][2] == second);
  progress.advance(kLanded, 2);
  CHECK(is_new(times.layers[kLanded][0]) && times.layers[kLanded][1] == progress.progress_at());
  CHECK(times.layers[kLanded][0] == progress.progress_at());
  progress.mark_submitted();
  CHECK(is_new(times.submitted));

  const Times before = times;
  progress.begin(), progress.mark_planned(), progress.mark_submitted();
  progress.advance(kEnqueued, 2), progress.advance(kLanded, 2);
  CHECK(times.begun == before.begun && times.planned == before.planned && times.submitted == before.submitted);
  CHECK(times.layers[kEnqueued] == before.layers[kEnqueued] && times.layers[kLanded] == before.layers[kLanded]);
  CHECK(times.layers[kEnqueued][3] == 0 && times.layers[kLanded][2] == 0);
  progress.advance(kEnqueued, 1000);  // there are no such layers
  CHECK(is_new(times.layers[kEnqueued][3]) && times.layers[kEnqueued].size() == 4);
}

void who_sees_a_step_sees_its_time() {
  for (int round = 0; round < 200; ++round) {
    constexpr Int kMany = 40;
    Progress progress(std::make_shared<Doorbell>(), std::make_shared<Waiter>(), std::make_unique<Times>(kMany));
    const Times& times = *progress.times();
    const double before = now();
    std::thread plane([&] {
      progress.begin();
      progress.mark_planned();
      for (Int layer = 1; layer <= kMany; ++layer) {
        progress.advance(kEnqueued, layer);
      }
      progress.mark_submitted();
    });
    std::thread observer([&] {
      for (Int layer = 0; layer < kMany; ++layer) {
        while (!progress.has(kEnqueued, layer)) {
        }
        progress.advance(kLanded, layer + 1);
      }
      progress.mark_submitted();  // as who ends a burst does
    });
    for (Int layer = 0; layer < kMany; ++layer) {
      while (!progress.has(kLanded, layer)) {
      }
      const auto at = static_cast<std::size_t>(layer);
      CHECK(before <= times.begun && times.begun <= times.planned && times.planned <= times.layers[kEnqueued][0]);
      CHECK(times.layers[kEnqueued][at] <= times.layers[kLanded][at] && times.layers[kLanded][at] <= now());
    }
    while (!progress.is_submitted()) {
    }
    const double submitted = times.submitted;
    CHECK(before <= submitted && submitted <= now());
    plane.join(), observer.join();
    CHECK(times.submitted == submitted);
  }
}

void of_two_who_mark_it_submitted_the_first_is_timed() {
  constexpr int kRounds = 3000;
  const auto doorbell = std::make_shared<Doorbell>();
  const auto observer = std::make_shared<Waiter>();
  std::vector<std::unique_ptr<Progress>> bursts;
  for (int round = 0; round < kRounds; ++round) {
    bursts.push_back(std::make_unique<Progress>(doorbell, observer, std::make_unique<Times>(1)));
  }
  std::atomic<int> there{0};
  std::vector<double> seen[2];
  const auto mark = [&](int who) {
    for (int round = 0; round < kRounds; ++round) {
      ++there;
      while (there < 2 * (round + 1)) {
      }
      Progress& progress = *bursts[static_cast<std::size_t>(round)];
      progress.mark_submitted();
      seen[who].push_back(progress.times()->submitted);
    }
  };
  std::thread other([&] { mark(1); });
  mark(0);
  other.join();
  CHECK(seen[0] == seen[1]);
}

// A layer is waited for while another thread gets there; where a ring or a wake-up is lost, this does not end.
void no_ring_and_no_wake_up_is_lost_however_it_races() {
  for (int round = 0; round < 400; ++round) {
    const auto doorbell = std::make_shared<Doorbell>();
    Progress progress(doorbell, std::make_shared<Waiter>());
    constexpr Int kMany = 40;
    const Mark mark = round % 2 == 0 ? kEnqueued : kLanded;
    std::atomic<Int> rung{0}, wanted{0};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      for (Int layer = 1; layer <= kMany; ++layer) {
        progress.advance(mark, layer);
        if ((layer + round) % 7 == 0) {
          std::this_thread::yield();
        }
      }
    });
    threads.emplace_back([&] {
      for (Int layer = 0; layer < kMany; ++layer) {
        while (!progress.want(mark, layer)) {
          ++wanted;
          pollfd look{doorbell->fd(), POLLIN, 0};
          CHECK(poll(&look, 1, -1) == 1);
          rung += rings(*doorbell);
        }
      }
    });
    for (int sleeper = 0; sleeper < 2; ++sleeper) {
      threads.emplace_back([&, sleeper] {
        for (Int layer = sleeper; layer < kMany; layer += 2) {
          Waiter waiter;
          if (progress.add(mark, layer, &waiter)) {
            while (!progress.has(mark, layer)) {
              waiter.sleep();
            }
            progress.remove(&waiter);
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(rung + rings(*doorbell) <= wanted);
  }
}

void of_begin_and_give_up_one_wins() {
  constexpr int kRounds = 3000;
  std::vector<std::unique_ptr<Progress>> bursts;
  const auto doorbell = std::make_shared<Doorbell>();
  for (int round = 0; round < kRounds; ++round) {
    bursts.push_back(std::make_unique<Progress>(doorbell, nullptr));
  }
  std::atomic<int> there{0};
  const auto meet = [&](int round) {
    ++there;
    while (there < 2 * (round + 1)) {
    }
  };
  std::vector<char> begun(kRounds), given_up(kRounds);
  std::thread other([&] {
    for (int round = 0; round < kRounds; ++round) {
      meet(round);
      given_up[static_cast<std::size_t>(round)] = bursts[static_cast<std::size_t>(round)]->give_up(true);
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    meet(round);
    begun[static_cast<std::size_t>(round)] = bursts[static_cast<std::size_t>(round)]->begin();
  }
  other.join();
  for (std::size_t round = 0; round < kRounds; ++round) {
    Progress& progress = *bursts[round];
    CHECK(begun[round] != given_up[round]);
    CHECK(progress.has_begun() == begun[round] && progress.is_given_up() == given_up[round]);
    CHECK(progress.give_up(false) && progress.is_given_up() && !progress.begin());
  }
}

// -- the end ---------------------------------------------------------------------------------------------------------

void stopped_threads_come_out_once_all_is_done(bool asleep) {
  World world;
  std::vector<BurstPtr> bursts;
  Threads threads(world);
  if (asleep) {
    threads.submitter_tid.await_asleep();
    threads.observer_tid.await_asleep();
  }
  for (int i = 0; i < 6; ++i) {
    bursts.push_back(world.a_burst());
    world.hand_over(bursts.back());
    if (asleep) {
      threads.submitter_tid.await_asleep();
      threads.observer_tid.await_asleep();
    }
  }
  const auto have_ended = [&] {
    const std::lock_guard<std::mutex> lock(threads.mutex);
    return threads.ended.size() == 6;
  };
  while (asleep && !have_ended()) {  // without being told to
    std::this_thread::yield();
  }
  threads.stop();
  CHECK(threads.ended == (std::vector<Int>{1, 2, 3, 4, 5, 6}));
  world.check_loaded(bursts);
}

void a_stopped_observer_does_not_leave_what_is_being_submitted() {
  World world;
  const BurstPtr burst = world.a_burst();
  world.device->block(Caller::kSubmitter, 9);
  Threads threads(world);
  world.hand_over(burst);
  world.device->await_blocked(Caller::kSubmitter);
  threads.observer_tid.await_asleep();
  world.plane->stop();
  world.device->release();
  threads.join();
  CHECK(threads.ended == std::vector<Int>{1} && burst->progress.layers(kLanded) == 4);
}

void what_is_handed_over_before_the_stop_is_served() {
  for (int round = 0; round < 300; ++round) {
    World world;
    const BurstPtr first = world.new_burst(), last = world.new_burst();
    for (const BurstPtr& burst : {first, last}) {
      burst->progress.give_up(true);  // no call: the threads are soon at the end of their queues
    }
    Threads threads(world);
    world.hand_over(first);
    while (round % 2 == 0 && !first->progress.is_submitted()) {
    }
    for (int i = 0; i < round % 64; ++i) {
      world.plane->doorbell().silence();  // takes some time
    }
    world.hand_over(last);
    threads.stop();
    CHECK(threads.ended == (std::vector<Int>{1, 2}));
  }
}

void abandoned_threads_come_out_where_they_wait_for_work() {
  World world;
  Threads threads(world);
  threads.submitter_tid.await_asleep();
  threads.observer_tid.await_asleep();
  world.plane->abandon();
  threads.join();
  CHECK(world.device->calls().empty() && threads.submit_stops.empty() && threads.reports.empty());
  CHECK(world.plane->submit().why == Plane::Stop::kTold && world.plane->next_report().why == Plane::Stop::kTold);
  world.hand_over(world.a_burst());
  world.plane->observe();
  CHECK(world.plane->submit().why == Plane::Stop::kTold && world.plane->next_report().why == Plane::Stop::kTold);
}

void abandoned_threads_come_out_once_the_call_that_they_are_in_returns() {
  for (std::size_t n = 1; n <= 14; ++n) {
    World world;
    const BurstPtr burst = world.a_burst(), next = world.a_burst();
    const Texts all = world.calls_of(burst, kReads);
    world.device->hold();
    world.device->block(Caller::kSubmitter, static_cast<int>(n));
    Plane::Stop submitted;
    Tid observer_tid;
    world.hand_over(burst);
    world.hand_over(next);
    std::thread submitter([&] {
      submitted = world.plane->submit();
      CHECK(world.plane->submit().why == Plane::Stop::kTold);
    });
    std::thread observer([&] {
      observer_tid.set();
      world.plane->observe();
    });
    world.device->await_blocked(Caller::kSubmitter);
    observer_tid.await_asleep();  // for a layer that is not enqueued, or in a call
    world.plane->abandon();
    if (n > 8) {  // the first layer is enqueued: it is in a call
      world.device->await_call(World::synchronize(world.event(burst, 1)));
      CHECK(world.device->texts(Caller::kObserver).size() == 1);
      world.device->step_layers(1);
    }
    observer.join();  // before the other comes out
    CHECK(world.plane->next_report().why == Plane::Stop::kTold);
    CHECK(world.device->texts(Caller::kObserver).size() == (n > 8 ? 1 : 0));
    world.device->release();
    submitter.join();
    // It goes no further than to the next layer.
    const std::size_t ends[14] = {6, 6, 6, 6, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
    CHECK_CALLS(world.device->texts(Caller::kSubmitter), Texts(all.begin(), all.begin() + Int(ends[n - 1])));
    if (ends[n - 1] < 14) {
      CHECK(submitted.why == Plane::Stop::kFailed && submitted.burst == burst);
      CHECK(is_same(submitted.status, status_of(Status::kStopped)));
    } else {
      CHECK(submitted.why == Plane::Stop::kTold);
    }
  }
}

void an_abandoned_observer_that_waits_for_the_end_of_a_submission_comes_out() {
  World world;
  const BurstPtr burst = world.a_burst();
  world.device->block(Caller::kSubmitter, 14);  // all layers are enqueued, and land; the finish is not recorded
  Threads threads(world);
  world.hand_over(burst);
  world.device->await_blocked(Caller::kSubmitter);
  world.device->await_call(World::synchronize(world.event(burst, 4)));
  while (burst->progress.layers(kLanded) < 4) {
    std::this_thread::yield();
  }
  threads.observer_tid.await_asleep();
  world.plane->abandon();
  threads.observer.join();
  threads.reporter.join();
  CHECK(threads.ended.empty() && threads.reports.empty());
  CHECK(world.device->texts(Caller::kObserver).size() == 4);  // the finish is not waited for
  world.device->release();
  threads.submitter.join();
}

void what_was_given_up_and_abandoned_has_been_stopped() {
  World world;
  const BurstPtr burst = world.a_burst();
  world.device->block(Caller::kSubmitter, 6);
  world.hand_over(burst);
  std::thread submitter([&] { CHECK(world.plane->submit().status.kind == Status::kStopped); });
  world.device->await_blocked(Caller::kSubmitter);
  burst->progress.give_up(false);
  world.plane->abandon();
  world.device->release();
  submitter.join();
}

void bursts_and_copies_may_outlive_what_made_them(bool of_all_pairs) {
  World world;
  world.device->hold();
  {
    // One of one pair has bases of its own; those of all pairs share them.
    const BurstPtr burst = world.new_burst();
    world.add(burst, {0, {0, 1, 2, 3}, {4, 5, 6, 7}}, {1, false}, {1, true});
    if (of_all_pairs) {
      world.add(burst, {1, {1}, {1}}, {1, false}, {1, true});
    }
    Threads threads(world, false);
    world.hand_over(burst);
    threads.stop();
  }
  const BurstPtr burst = world.all.back();
  world.all.clear();
  world.plane = nullptr;
  burst->progress.advance(kLanded, 2);
  CHECK(!burst->progress.want(kLanded, 3));
  burst->progress.advance(kLanded, 4);
  burst->progress.mark_submitted();
  const Moves move = world.moves[0][0];
  const std::weak_ptr<Copied> weak = burst->copied;
  const_cast<BurstPtr&>(burst) = nullptr;
  CHECK(!weak.expired());  // for the copies
  world.device->resume();
  CHECK(weak.expired() && world.device->is_clear());
  for (std::size_t i = 0; i < move.src.size(); ++i) {
    CHECK(std::memcmp(world.dst[1][0].data() + move.dst[i] * 8, world.src[1][0].data() + move.src[i] * 8, 8) == 0);
  }
}

// -- anything --------------------------------------------------------------------------------------------------------

void any_program_ends_every_burst_once_and_in_order(unsigned seed) {
  std::mt19937 random(seed);
  const auto number = [&](unsigned most) { return static_cast<Int>(random() % (most + 1)); };
  const auto chance = [&](unsigned of) { return random() % of == 0; };
  constexpr Int kBursts = 30, kTokens = 16;  // tokens of the destination that are a burst's own
  World world(static_cast<std::size_t>(1 + number(9)), kBursts * kTokens);
  const bool fails = chance(2), gives_up = chance(2), is_held = !chance(3);
  std::vector<bool> is_wrong(kBursts), is_owned(kBursts);
  for (Int i = 0; i < kBursts; ++i) {
    world.keeps_times = i % 2 == 0;
    const BurstPtr burst = world.new_burst(chance(2));
    const auto how = [&](bool may_be_on_device) {
      const Int strides[] = {1, 1, 2, 5, -1, -3};
      return How{strides[number(5)], may_be_on_device && !chance(3)};
    };
    const auto any_src = [&](std::size_t pair) {
      const Int page_size = pair == 0 ? 4 : 1;
      return number(static_cast<unsigned>(kSrcTokens / page_size - 1)) * page_size;
    };
    for (std::size_t pair = 0; pair < 2; ++pair) {
      const Int page_size = pair == 0 ? 4 : 1;
      std::vector<Int> pages(static_cast<std::size_t>(kTokens / page_size));
      for (std::size_t page = 0; page < pages.size(); ++page) {
        pages[page] = i * kTokens + static_cast<Int>(page) * page_size;
      }
      std::shuffle(pages.begin(), pages.end(), random);
      for (Int op = number(3); op > 0 && !pages.empty(); --op) {
        Moves move{pair, {}, {}};
        for (Int count = 1 + number(2); count > 0 && !pages.empty(); --count) {
          const Int src = any_src(pair);
          for (Int token = 0; token < page_size; ++token) {
            move.src.push_back(src + token), move.dst.push_back(pages.back() + token);
          }
          pages.pop_back();
        }
        if (fails && chance(20)) {
          move.src.back() = -5;
          is_wrong[static_cast<std::size_t>(i)] = true;
        }
        world.add(burst, move, how(false), how(true));
      }
    }
    std::shuffle(burst->shares.begin(), burst->shares.end(), random);
    burst->needs_owner = is_owned[static_cast<std::size_t>(i)] = chance(8);
    if (gives_up && chance(8)) {
      burst->progress.give_up(true);
    }
  }
  std::mt19937 luck(seed + 1);  // asked under the device's lock
  if (fails) {
    world.device->judge = [&](const std::string&) {
      return luck() % 60 == 0 ? a_failure(static_cast<int>(luck() % 100)) : Status{};
    };
  }
  std::atomic<bool> is_over{false};
  if (is_held) {
    world.device->hold();
  }
  Int num_handed_over = 0;
  for (const Int early = number(6); num_handed_over < early; ++num_handed_over) {
    for (Int times = 1 + chance(3); times > 0; --times) {
      world.hand_over(world.all[static_cast<std::size_t>(num_handed_over)]);
    }
  }
  Threads threads(world);
  std::vector<std::thread> others;
  others.emplace_back([&, engine = std::mt19937(seed + 2)]() mutable {
    while (!is_over) {
      world.device->step(engine() % 4);
      if (engine() % 4 == 0) {
        std::this_thread::yield();
      }
    }
    world.device->resume();
  });
  others.emplace_back([&, engine = std::mt19937(seed + 3)]() mutable {
    while (gives_up && !is_over) {
      world.all[engine() % kBursts]->progress.give_up(engine() % 20 != 0);
      for (auto pause = engine() % 30; pause > 0; --pause) {
        std::this_thread::yield();
      }
    }
  });
  others.emplace_back([&, engine = std::mt19937(seed + 4)]() mutable {  // one who waits for layers, as engines do
    for (const BurstPtr& burst : world.all) {
      for (Int layer = 0; layer < static_cast<Int>(kLayers); ++layer) {
        Waiter waiter;
        if (engine() % 2 == 0 && burst->progress.add(kLanded, layer, &waiter)) {
          while (!burst->progress.has(kLanded, layer) && !burst->progress.has_ended()) {
            waiter.sleep_until(now() + 1e-4);
          }
          burst->progress.remove(&waiter);
        }
      }
    }
  });
  for (; num_handed_over < kBursts; ++num_handed_over) {
    const BurstPtr& burst = world.all[static_cast<std::size_t>(num_handed_over)];
    if (chance(3)) {
      const Int behind = std::max<Int>(0, world.number_of(burst) - 1 - number(5));
      while (behind > 0 && !world.all[static_cast<std::size_t>(behind - 1)]->progress.has_ended()) {
        std::this_thread::yield();
      }
    }
    world.hand_over(burst);
    if (chance(10)) {
      world.hand_over(burst);
    }
  }
  while (!world.all.back()->progress.has_ended()) {  // the owner of the plane stops it once it is drained
    std::this_thread::yield();
  }
  threads.stop();
  is_over = true;
  for (std::thread& thread : others) {
    thread.join();
  }
  std::vector<Int> all(kBursts);
  for (Int i = 0; i < kBursts; ++i) {
    all[static_cast<std::size_t>(i)] = i + 1;
  }
  CHECK(threads.ended == all && world.device->is_clear());
  std::vector<int> failed(kBursts);
  for (const auto& seen : threads.submit_stops) {
    CHECK((seen.why == Plane::Stop::kNeedsOwner) == (seen.burst->needs_owner && seen.why != Plane::Stop::kFailed));
    failed[static_cast<std::size_t>(seen.burst->id - 1)] += seen.why == Plane::Stop::kFailed;
  }
  for (const auto& seen : threads.reports) {
    failed[static_cast<std::size_t>(seen.burst->id - 1)] += !seen.status.is_ok();
  }
  World::Pools wanted = world.empty_pools();
  std::size_t num_ok = 0;
  for (std::size_t i = 0; i < kBursts; ++i) {
    const BurstPtr& burst = world.all[i];
    const Progress& progress = burst->progress;
    CHECK(progress.layers(kLanded) <= progress.layers(kEnqueued) && progress.is_submitted());
    const bool is_ok = progress.has_begun() && failed[i] == 0 && progress.layers(kEnqueued) == 4;
    CHECK(!is_ok || progress.layers(kLanded) == 4);
    CHECK(!is_ok || is_owned[i] || progress.is_finish_recorded());
    CHECK(!is_ok || is_owned[i] || !is_wrong[i]);
    CHECK(fails || gives_up || is_ok);
    Int bytes = 0;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      World::Pools with = wanted;
      if (is_wrong[i] || is_owned[i] || !progress.has_begun()) {
        continue;
      }
      bytes += world.load(burst, layer, with);
      // A layer that is not enqueued has been copied all the same, or not at all.
      if (progress.has(kEnqueued, static_cast<Int>(layer)) ||
          (with[layer] != wanted[layer] && [&] {
            for (std::size_t plane = 0; plane < kPlanes; ++plane) {
              const auto begin = static_cast<Int>(i) * kTokens * kStride[plane], end = begin + kTokens * kStride[plane];
              if (!with[layer][plane].empty() &&
                  !std::equal(with[layer][plane].begin() + begin, with[layer][plane].begin() + end,
                              world.dst[layer][plane].begin() + begin)) {
                return false;
              }
            }
            return true;
          }())) {
        wanted = std::move(with);
      }
    }
    if (is_ok && !is_owned[i]) {
      CHECK(burst->num_bytes == bytes);
      ++num_ok;
    }
  }
  for (const BurstPtr& burst : world.all) {
    if (burst->progress.times() != nullptr) {
      check_times(burst->progress);
    }
  }
  CHECK(wanted == world.dst);
  CHECK(num_ok > 0 || fails || gives_up);
  CHECK(!world.device->keeps_bound || world.device->most_outstanding <= world.device->most_layers);
}

}  // namespace

int main() {
  alarm(120);  // what does not come to its end
  a_burst_is_submitted_in_order_and_then_followed_layer_by_layer();
  a_burst_keeps_times_where_it_was_made_to();
  a_burst_that_fails_has_times_of_what_it_got_to();
  without_a_fence_nobody_waits_for_one();
  flags_and_watermarks_are_never_ahead_of_the_calls();
  indices_on_the_host_are_read_without_a_device_call();
  only_what_is_on_the_device_is_read_there();
  device_indices_are_not_read_before_the_start_event_is_reached();
  ops_of_several_pairs_are_joined_in_order_of_pairs_and_then_of_ops();
  many_ops_keep_their_order();
  a_burst_of_some_pairs_moves_their_planes_only();
  bursts_are_submitted_in_the_order_in_which_they_are_handed_over();
  memory_of_indices_is_used_again_only_where_nobody_has_it();
  a_burst_whose_nth_call_fails_comes_out_with_what_it_failed_with_and_the_next_is_served();
  a_burst_for_which_no_room_can_be_made_goes_no_further();
  a_lost_device_fails_every_call_and_bursts_still_end();
  a_layer_that_does_not_land_fails_its_burst_which_ends_once_it_is_over(false);
  a_layer_that_does_not_land_fails_its_burst_which_ends_once_it_is_over(true);
  a_finish_event_that_is_not_reached_is_told_with_the_end();
  where_no_finish_was_recorded_nobody_waits_for_it();
  reports_wait_for_whoever_pops_them_and_nobody_waits_for_him();
  a_report_that_nobody_takes_comes_out(false);
  a_report_that_nobody_takes_comes_out(true);
  a_burst_that_is_handed_over_again_is_followed_once_and_reported_again();
  a_burst_that_lands_slowly_is_followed_to_its_end(false);
  a_burst_that_lands_slowly_is_followed_to_its_end(true);
  indices_that_are_refused_can_be_read_by_the_owner();
  a_burst_that_needs_its_owner_comes_out_before_it_has_begun();
  a_burst_in_the_middle_of_which_its_owner_was_comes_out_interrupted();
  of_a_burst_that_was_given_up_before_no_call_is_made();
  a_burst_that_was_not_set_up_comes_out_interrupted_before_a_call();
  a_burst_that_is_given_up_between_two_layers_goes_no_further();
  a_burst_that_is_handed_over_twice_is_served_once();
  a_burst_that_is_handed_over_again_once_it_has_ended_is_told_of_at_once();
  for (const std::size_t max_layers : {1, 2, 3, 4, 5, 8, 12, 100}) {
    there_are_never_more_layers_in_flight_than_allowed(max_layers);
  }
  an_owner_keeps_to_the_same_bound();
  what_has_landed_meanwhile_is_not_waited_for();
  a_doorbell_is_rung_when_a_wanted_layer_gets_there_and_not_before();
  a_silenced_doorbell_can_be_rung_again();
  a_doorbell_is_closed_with_the_last_who_has_it();
  an_alarm_rings_once_its_time_is_over_and_until_it_is_set_again_or_unset();
  the_alarm_rings_for_a_burst_that_does_not_end_and_again_for_the_next_once_it_was_heard();
  the_alarm_is_set_by_the_first_of_several_bursts();
  the_alarm_that_is_heard_is_set_for_the_first_burst_that_it_has_not_rung_for();
  the_alarm_rings_for_a_burst_whose_end_was_reported_and_not_dealt_with();
  the_alarm_is_unset_by_the_last_report_and_not_before();
  the_alarm_is_unset_once_nothing_is_in_flight_however_that_races();
  a_sleeper_is_woken_when_its_layer_gets_there_and_not_once_it_is_removed();
  an_observer_is_woken_by_what_the_data_plane_does();
  an_observer_is_woken_by_whoever_begins_to_wait_for_a_landing();
  the_first_layer_that_is_waited_for_is_known();
  progress_is_dated_when_a_layer_lands();
  every_step_is_timed_once_where_somebody_wants_to_know();
  who_sees_a_step_sees_its_time();
  of_two_who_mark_it_submitted_the_first_is_timed();
  no_ring_and_no_wake_up_is_lost_however_it_races();
  of_begin_and_give_up_one_wins();
  for (int round = 0; round < 20; ++round) {
    stopped_threads_come_out_once_all_is_done(round % 2 == 0);
    a_stopped_observer_does_not_leave_what_is_being_submitted();
    abandoned_threads_come_out_where_they_wait_for_work();
    an_abandoned_observer_that_waits_for_the_end_of_a_submission_comes_out();
  }
  what_is_handed_over_before_the_stop_is_served();
  abandoned_threads_come_out_once_the_call_that_they_are_in_returns();
  what_was_given_up_and_abandoned_has_been_stopped();
  bursts_and_copies_may_outlive_what_made_them(false);
  bursts_and_copies_may_outlive_what_made_them(true);
  for (unsigned seed = 0; seed < 120; ++seed) {
    any_program_ends_every_burst_once_and_in_order(seed);
  }
  std::puts("the data plane: ok");
}

// The core of the emulated device without Python, to be run under sanitizers: `make sanitize`.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "../../hicache_sched/native/copy.h"
#include "../../hicache_sched/native/core.h"
#include "check.h"

using namespace hicache;

namespace {

constexpr int kCompute = 0, kH2d = 1, kD2h = 2;
const double kFast[kEngines] = {0, 0, 0};

bool always() { return true; }

// One copy, with the arrays that describe it.
struct Move {
  Move(void* to, const void* from, std::size_t size)
      : dst(reinterpret_cast<std::int64_t>(to)),
        src(reinterpret_cast<std::int64_t>(from)),
        bytes(static_cast<std::int64_t>(size)) {}
  std::int64_t dst, src, bytes;
  std::atomic<int> given_back{0};
};

// Payloads that were given back, each once.
void collect(Core& core) {
  for (void* payload : core.take_garbage()) {
    CHECK(++static_cast<Move*>(payload)->given_back == 1);
  }
}

bool put(Core& core, const std::shared_ptr<Stream>& stream, int engine, Move& move, bool is_call = false,
         double duration = 0.0) {
  auto operation = std::make_shared<Operation>();
  operation->stream = stream;
  operation->is_call = is_call;
  operation->copies = {&move.dst, &move.src, &move.bytes, 1};
  operation->payload = &move;
  operation->duration = duration;
  void* refusal = nullptr;
  return core.submit(operation, engine, move.bytes, always, refusal);
}

// A recording of an event of its own; null where the device is lost.
std::shared_ptr<Record> recorded(Core& core, const std::shared_ptr<Stream>& stream) {
  const auto event = core.new_event();
  return core.record(stream, *event, always) ? core.latest(*event) : nullptr;
}

void drain(Core& core, const std::shared_ptr<Stream>& stream) {
  CHECK(core.block_on(core.record_at_once(stream), always) == Outcome::kDone);
}

void copies_of_a_stream_are_made_in_order_also_on_several_engines() {
  Core core(kFast, 0);
  const auto stream = core.new_stream(false);
  std::vector<std::vector<char>> places(50, std::vector<char>(1000, 0));
  places[0].assign(1000, 7);
  std::vector<std::unique_ptr<Move>> moves;
  for (std::size_t i = 1; i < places.size(); ++i) {
    moves.push_back(std::make_unique<Move>(places[i].data(), places[i - 1].data(), 1000));
    CHECK(put(core, stream, static_cast<int>(i % kEngines), *moves.back()));
  }
  drain(core, stream);
  CHECK(places.back() == places.front());
  collect(core);
  for (const auto& move : moves) {
    CHECK(move->given_back == 1);
  }
}

void a_wait_orders_two_streams() {
  for (int round = 0; round < 200; ++round) {
    Core core(kFast, 0);
    const auto first = core.new_stream(false), second = core.new_stream(false);
    std::vector<char> a(10000, 1), b(10000, 2), c(10000, 3);
    Move there(b.data(), a.data(), a.size()), on(c.data(), b.data(), b.size());
    core.hold(kH2d);
    CHECK(put(core, first, kH2d, there));
    const auto record = recorded(core, first);
    CHECK(core.wait(second, record, always));
    CHECK(put(core, second, kD2h, on));
    CHECK(!core.is_done(record));
    CHECK(core.step(kH2d, 1, always) == Outcome::kDone);
    drain(core, second);
    CHECK(c == a);
    CHECK(core.is_done(record));
  }
}

// On one engine operations neither overlap nor begin before those that were completed earlier.
void check_each_engine_did_one_thing_at_a_time(const std::vector<TracedOperation>& operations) {
  double free_time[kEngines] = {0, 0, 0};
  for (const TracedOperation& operation : operations) {
    CHECK(operation.begin >= free_time[operation.engine]);
    CHECK(operation.end >= operation.begin);
    free_time[operation.engine] = operation.end;
  }
}

void operations_are_traced_with_their_virtual_times_from_then_on() {
  Core core(kFast, 0);
  const auto stream = core.new_stream(false);
  std::vector<char> a(1000, 1), b(1000, 2);
  std::vector<std::unique_ptr<Move>> moves;
  const auto put_one = [&](double duration) {
    moves.push_back(std::make_unique<Move>(b.data(), a.data(), a.size()));
    CHECK(put(core, stream, kH2d, *moves.back(), false, duration));
  };
  put_one(0.0);
  drain(core, stream);
  CHECK(core.take_operations().empty());
  core.trace_operations();
  core.hold(kH2d);
  for (int i = 0; i < 5; ++i) {
    put_one(0.002);
  }
  const double let_through = now();
  core.resume(kH2d);
  drain(core, stream);
  const auto operations = core.take_operations();
  CHECK(operations.size() == 5);
  CHECK(operations[0].begin >= let_through);
  for (const TracedOperation& operation : operations) {
    CHECK(operation.engine == kH2d);
    CHECK(operation.stream == stream->id);
    CHECK(operation.end - operation.begin >= 0.002 - 1e-9);
  }
  check_each_engine_did_one_thing_at_a_time(operations);
  CHECK(core.take_operations().empty());
  collect(core);
}

// Threads with a stream each: copies, recordings, waits for recordings of others, and somebody who holds and steps.
void any_program_of_many_threads_comes_to_its_end(std::size_t queue_depth) {
  constexpr int kThreads = 4, kSteps = 300;
  Core core(kFast, queue_depth);
  std::vector<std::shared_ptr<Stream>> streams;
  for (int i = 0; i < kThreads; ++i) {
    streams.push_back(core.new_stream(false));
  }
  std::mutex mutex;
  std::vector<std::shared_ptr<Record>> records{recorded(core, streams[0])};
  std::vector<std::unique_ptr<Move>> moves[kThreads];
  std::vector<char> cells(kThreads * 64, 0), ones(64, 1);
  std::atomic<bool> is_over{false};
  std::atomic<int> calls{0};
  std::vector<TracedOperation> operations;
  core.trace_operations();

  std::vector<std::thread> callers;
  for (int engine = 0; engine < kEngines; ++engine) {
    callers.emplace_back([&core, &calls, engine] {
      while (const auto operation = core.next_call(engine)) {
        ++calls;
        CHECK(core.complete(operation, 1e9));
      }
    });
  }
  std::thread controller([&] {
    std::mt19937 random(1);
    while (!is_over) {
      const int engine = static_cast<int>(random() % kEngines);
      core.hold(engine);
      std::this_thread::yield();
      core.resume(engine);
      collect(core);
      const auto taken = core.take_operations();
      operations.insert(operations.end(), taken.begin(), taken.end());
    }
  });
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(static_cast<unsigned>(number));
      const auto& stream = streams[static_cast<std::size_t>(number)];
      for (int step = 0; step < kSteps; ++step) {
        switch (random() % 4) {
          case 0: {
            auto record = recorded(core, stream);
            const std::lock_guard<std::mutex> lock(mutex);
            records.push_back(std::move(record));
            break;
          }
          case 1: {
            std::shared_ptr<Record> record;
            {
              const std::lock_guard<std::mutex> lock(mutex);
              record = records[random() % records.size()];
            }
            if (random() % 8 == 0) {
              CHECK(core.block_on(record, always) == Outcome::kDone);
            } else {
              CHECK(core.wait(stream, record, always));
            }
            break;
          }
          default: {
            char* cell = &cells[static_cast<std::size_t>(number) * 64];
            moves[number].push_back(std::make_unique<Move>(cell, ones.data(), 64));
            CHECK(put(core, stream, static_cast<int>(random() % kEngines), *moves[number].back(), random() % 3 == 0));
          }
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  is_over = true;
  controller.join();
  for (const auto& record : core.record_all()) {
    CHECK(core.block_on(record, always) == Outcome::kDone);
  }
  for (const auto& stream : streams) {
    CHECK(core.length(stream) == 0);
  }
  const auto taken = core.take_operations();
  operations.insert(operations.end(), taken.begin(), taken.end());
  core.stop();
  for (auto& caller : callers) {
    caller.join();
  }
  core.join();
  collect(core);
  CHECK(calls > 0);
  check_each_engine_did_one_thing_at_a_time(operations);
  std::size_t submitted = 0;
  for (const auto& own : moves) {
    submitted += own.size();
  }
  CHECK(operations.size() == submitted);
  for (const auto& own : moves) {
    for (const auto& move : own) {
      CHECK(move->given_back == 1);
    }
  }
}

void a_core_that_stops_wakes_everybody_and_gives_every_payload_back() {
  for (int round = 0; round < 100; ++round) {
    Core core(kFast, 4);
    const auto stream = core.new_stream(false), full = core.new_stream(false);
    std::vector<char> a(100000, 1), b(100000, 2), c(100000, 3);
    std::vector<std::unique_ptr<Move>> moves;
    for (int i = 0; i < 8; ++i) {
      moves.push_back(std::make_unique<Move>(i < 2 ? b.data() : c.data(), a.data(), a.size()));
    }
    core.hold(kD2h);
    CHECK(put(core, stream, kH2d, *moves[0], false, 3600.0));  // under way for an hour
    CHECK(put(core, stream, kH2d, *moves[1]));
    for (std::size_t i = 2; i < 6; ++i) {
      CHECK(put(core, full, kD2h, *moves[i]));
    }
    const auto record = recorded(core, stream);
    std::vector<std::thread> blocked;
    blocked.emplace_back([&] { CHECK(core.block_on(record, always) == Outcome::kLost); });
    blocked.emplace_back([&] { CHECK(core.step(kD2h, 100, always) != Outcome::kInterrupted); });
    blocked.emplace_back([&] { CHECK(core.next_call(kCompute) == nullptr); });
    blocked.emplace_back([&] { put(core, full, kD2h, *moves[6]); });
    if (round % 2 == 0) {
      std::this_thread::yield();
    }
    core.stop();
    for (auto& thread : blocked) {
      thread.join();
    }
    core.join();
    CHECK(recorded(core, stream) == nullptr);
    collect(core);
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(moves[i]->given_back == 1);
    }
  }
}

void an_inline_operation_is_done_by_its_own_thread_in_its_turn() {
  for (int round = 0; round < 100; ++round) {
    Core core(kFast, 0);
    const auto other = core.new_stream(false), own = core.new_stream(true);
    std::vector<char> a(1000, 1), b(1000, 2);
    Move move(b.data(), a.data(), a.size()), inline_move(b.data(), a.data(), a.size());
    core.trace_operations();
    const bool is_abandoned = round % 3 != 0, is_before_its_turn = round % 3 == 1;
    if (is_before_its_turn) {
      core.hold(kH2d);
    }
    CHECK(put(core, other, kH2d, move));
    auto operation = std::make_shared<Operation>();
    operation->stream = own;
    operation->is_inline = true;
    operation->payload = &inline_move;
    void* refusal = nullptr;
    CHECK(core.submit(operation, kH2d, 0, always, refusal));
    if (is_abandoned) {
      core.abandon(operation);
      core.resume(kH2d);
    } else {
      CHECK(core.await_turn(operation, always) == Outcome::kDone);
      CHECK(core.complete(operation, 1e9));
    }
    drain(core, own);
    drain(core, other);
    const std::size_t traced = core.take_operations().size();
    CHECK(traced == (is_before_its_turn ? 1 : 2) || (is_abandoned && traced == 1));
    core.stop();
    core.join();
    collect(core);
    CHECK(inline_move.given_back == 1);
  }
}

void batches_of_every_size_arrive() {
  std::mt19937 random(3);
  for (const std::size_t row : {1u, 63u, 4096u, 65536u + 17u, 3u << 20}) {
    const std::size_t rows = (10u << 20) / row + 2;
    std::vector<char> source(row * rows), target(row * rows + 1, 0);
    for (auto& byte : source) {
      byte = static_cast<char>(random());
    }
    std::vector<std::int64_t> dst, src, sizes(rows, static_cast<std::int64_t>(row));
    for (std::size_t i = 0; i < rows; ++i) {
      dst.push_back(reinterpret_cast<std::int64_t>(target.data() + 1 + i * row));
      src.push_back(reinterpret_cast<std::int64_t>(source.data() + (rows - 1 - i) * row));
    }
    copy_batch({dst.data(), src.data(), sizes.data(), rows});
    for (std::size_t i = 0; i < rows; ++i) {
      CHECK(std::memcmp(target.data() + 1 + i * row, source.data() + (rows - 1 - i) * row, row) == 0);
    }
    CHECK(target[0] == 0);
  }
}

}  // namespace

int main() {
  copies_of_a_stream_are_made_in_order_also_on_several_engines();
  a_wait_orders_two_streams();
  operations_are_traced_with_their_virtual_times_from_then_on();
  for (int round = 0; round < 10; ++round) {
    any_program_of_many_threads_comes_to_its_end(0);
    any_program_of_many_threads_comes_to_its_end(5);
  }
  a_core_that_stops_wakes_everybody_and_gives_every_payload_back();
  an_inline_operation_is_done_by_its_own_thread_in_its_turn();
  batches_of_every_size_arrive();
  std::puts("native core: all tests passed");
}

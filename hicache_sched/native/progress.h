// How far a burst has got, and who is told. Nothing here knows Python.
//
// Threads: every function may be called on any thread. Watermarks and flags only ever move one way, so that a yes stays
// true; whoever registers is told of everything that happens afterwards.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "bells.h"
#include "waiter.h"

namespace hicache {

enum Mark { kEnqueued, kLanded, kMarks };

// When a burst got where, in seconds as Python's time.monotonic. Each is there for whoever has seen that it got there.
struct Times {
  explicit Times(std::size_t num_layers) : layers{std::vector<double>(num_layers), std::vector<double>(num_layers)} {}

  double begun = 0, planned = 0, submitted = 0;
  std::vector<double> layers[kMarks];
};

class Progress {
 public:
  // doorbell: rung when a layer gets there that somebody wants. observer: woken by all that the data plane does, and by
  // whoever begins to wait for a layer to land. times: to be kept there, if anywhere.
  Progress(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<Waiter> observer,
           std::unique_ptr<Times> times = nullptr);

  std::int64_t layers(Mark mark) const { return layers_[mark]; }  // how many have got there
  bool has(Mark mark, std::int64_t layer) const { return layers(mark) > layer; }
  bool has_begun() const { return begun_; }
  bool is_given_up() const { return given_up_; }
  bool is_planned() const { return planned_; }
  bool is_submitted() const { return submitted_; }
  bool is_finish_recorded() const { return finish_recorded_; }
  bool has_ended() const { return ended_; }
  double progress_at() const { return progress_at_; }  // seconds, as Python's time.monotonic
  const Times* times() const { return times_.get(); }  // null where nobody wants to know

  bool begin();                       // false where it was given up
  bool give_up(bool unless_begun);    // false where it has begun and that matters
  void mark_planned();
  void advance(Mark mark, std::int64_t layers);
  void mark_finish_recorded() { finish_recorded_ = true; }
  void mark_submitted();  // the data plane will not touch it any more
  void mark_ended() { ended_ = true; }

  // Have the doorbell rung once `layer` gets there, in place of what was wanted before if that is later; true if it is
  // there already.
  bool want(Mark mark, std::int64_t layer);

  // Have the waiter woken once `layer` gets there; false if it is there already.
  bool add(Mark mark, std::int64_t layer, Waiter* waiter);
  void remove(Waiter* waiter);

  // The first layer that somebody waits for, or `last`.
  std::int64_t first_waited_for(Mark mark, std::int64_t last) const;

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  struct Sleeper {
    Mark mark;
    std::int64_t layer;
    Waiter* waiter;
  };

  void call_observer(Mark awaited);

  const std::shared_ptr<Doorbell> doorbell_;
  const std::shared_ptr<Waiter> observer_;
  const std::unique_ptr<Times> times_;  // each written before the step that it is the time of
  std::atomic<std::int64_t> layers_[kMarks] = {};
  std::atomic<bool> begun_{false}, given_up_{false}, planned_{false}, submitted_{false}, finish_recorded_{false},
      ended_{false};
  std::atomic<double> progress_at_;
  mutable std::mutex mutex_;  // of what follows, of begin against give_up, and of who marks it submitted first
  std::int64_t wanted_[kMarks] = {kNone, kNone};
  std::vector<Sleeper> sleepers_;
};

}  // namespace hicache

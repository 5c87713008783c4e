// From a burst's token indices to its plan. Nothing here knows Python; every function may run on any thread, but a
// Planner is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hicache {

// How the rows that both pools of a pair have lie in one plane of one of them.
struct Side {
  std::int64_t stride;     // bytes from one row of the pool to the next
  std::int64_t parts;      // rows of the pair in a row of the pool, where they lie behind each other
  std::int64_t row_bytes;  // bytes of a row of the pair
};

struct PlaneLayout {
  Side src, dst;
};

// One pair of pools, the source on the host and the destination on the device.
struct PairLayout {
  std::int64_t src_tokens, dst_tokens;
  std::int64_t src_page_size, dst_page_size;
  std::int64_t tokens_per_row;  // of a row that both pools have: of a page, or one
  std::vector<PlaneLayout> planes;
};

// What a burst moves through one pair, its ops joined: token indices of any value, and where each op's tokens end.
struct Share {
  std::size_t pair;
  const std::int64_t* src;
  const std::int64_t* dst;
  const std::int64_t* op_ends;
  std::size_t num_ops;
  std::size_t num_tokens;  // never 0
};

// The copies of a burst, those of each plane behind each other, as in hicache_sched.copy.plan.CopyPlan.
struct Plan {
  std::vector<std::int64_t> src_offsets, dst_offsets, sizes;  // of each copy, in bytes
  std::vector<std::int64_t> plane_ends;
  std::vector<std::size_t> columns;       // which of the planes of all pairs they are, ascending
  std::vector<std::int64_t> plane_bytes;  // what the copies of a plane move in one layer
};

class Planner {
 public:
  // Throws std::invalid_argument, with words for whoever made it, where a layout is none that pools have.
  explicit Planner(std::vector<PairLayout> pairs);

  std::size_t num_pairs() const { return pairs_.size(); }

  // The plan of a burst: at most one share of each pair, in ascending order of pairs. False, with nothing of use in
  // `out`, where an index is out of range, a page is not whole or not aligned, or a destination is named twice. What
  // `out` held is overwritten, its memory used again.
  bool plan(const std::vector<Share>& shares, Plan& out);

 private:
  // Pages are what all checks and copies go by: each is whole and aligned, so places in it follow from where it begins.
  // Rows of one page lie `step` apart, pages `page_stride`.
  struct Place {
    std::int64_t page_stride, step;
  };
  enum class CopyOf { kRow, kPage, kRun };
  struct Plane {
    Place src, dst;
    std::int64_t row_bytes;
    CopyOf copy_of;
    std::size_t same_as;  // the first plane of the pair that has the same copies; itself, mostly
  };
  struct Pair {
    std::int64_t src_pages, dst_pages, page_size, rows_per_page;
    bool has_runs;  // whether some plane moves runs of pages at once
    std::size_t first_plane;
    std::vector<Plane> planes;
  };
  // The pages of a share that has passed the checks, and where the runs of them begin that follow each other on both
  // sides, the end of the last run behind them.
  struct Pages {
    const std::int64_t* src;
    const std::int64_t* dst;
    std::size_t count;
    const std::size_t* run_starts;
    std::size_t num_runs;
  };

  static Pair digest(const PairLayout& layout, std::size_t number, std::size_t first_plane);
  bool check(const Pair& pair, const Share& share, Pages& pages);
  bool are_distinct(const std::int64_t* pages, std::size_t count);
  void find_runs(Pages& pages);
  // Writes the copies of a plane from copy number `first` on; the number behind the last.
  static std::size_t write(const Pair& pair, const Plane& plane, const Pages& pages, std::size_t first, Plan& out);

  std::vector<Pair> pairs_;
  // All zero but within are_distinct; a bit for each page of the largest destination.
  std::vector<std::uint64_t> is_taken_;
  std::vector<std::int64_t> src_pages_, dst_pages_;
  std::vector<std::size_t> run_starts_;
};

}  // namespace hicache

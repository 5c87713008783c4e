#include "planner.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace hicache {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// -- layouts ---------------------------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw std::invalid_argument(where + ": " + what);
}

void check_positive(const std::string& where, const char* name, std::int64_t value) {
  if (value < 1) {
    refuse(where, std::string(name) + " must be positive, not " + std::to_string(value));
  }
}

void check_side(const std::string& where, const Side& side, std::int64_t rows_per_page, std::int64_t num_pages) {
  check_positive(where, "stride", side.stride);
  check_positive(where, "parts", side.parts);
  check_positive(where, "row_bytes", side.row_bytes);
  if (side.parts != 1 && side.parts != rows_per_page) {
    refuse(where, "parts must be 1 or the rows of a page, " + std::to_string(rows_per_page) + ", not " +
                      std::to_string(side.parts));
  }
  if (side.row_bytes > side.stride / side.parts) {
    refuse(where, "rows overlap, as a stride of " + std::to_string(side.stride) + " bytes is too short for " +
                      std::to_string(side.parts) + " of " + std::to_string(side.row_bytes));
  }
  // What this leaves room for, no multiplication further down exceeds.
  if (side.stride > kMost / num_pages / (rows_per_page / side.parts)) {
    refuse(where, "a stride of " + std::to_string(side.stride) + " bytes takes the pool beyond 64 bits");
  }
}

bool operator==(const Side& one, const Side& other) {
  return one.stride == other.stride && one.parts == other.parts && one.row_bytes == other.row_bytes;
}

// -- checks ----------------------------------------------------------------------------------------------------------

// Loops look at all of an array in any case, without a branch, so that compilers make vector code of them. Indices not
// known to be in range are taken as unsigned numbers, which wrap around where signed ones overflow.

bool are_in_range(const std::int64_t* tokens, std::size_t count, std::int64_t num_tokens) {
  const auto last = static_cast<std::uint64_t>(num_tokens - 1);
  std::uint64_t signs = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto token = static_cast<std::uint64_t>(tokens[i]);
    signs |= token | (last - token);
  }
  return signs >> 63 == 0;
}

bool is_run(const std::int64_t* pages, std::size_t count) {
  if (pages[count - 1] - pages[0] != static_cast<std::int64_t>(count) - 1) {
    return false;
  }
  std::int64_t wrong = 0;
  for (std::size_t i = 1; i < count; ++i) {
    wrong |= (pages[i] - pages[i - 1]) ^ 1;
  }
  return wrong == 0;
}

// Divides by the size of a page, which is mostly a power of two.
class Divisor {
 public:
  explicit Divisor(std::uint64_t by) : by_(by) {
    if ((by & (by - 1)) == 0) {
      for (shift_ = 0; by >> shift_ != 1; ++shift_) {
      }
    }
  }
  std::uint64_t operator()(std::uint64_t value) const { return shift_ >= 0 ? value >> shift_ : value / by_; }

 private:
  std::uint64_t by_;
  int shift_ = -1;
};

// Numbers of the pages that tokens fill, page by page; false where some page is not aligned, not in order or not there.
// kAtOnce tokens, of which a page has a multiple, are looked at without a loop.
template <std::uint64_t kAtOnce>
bool read_pages(const std::int64_t* tokens, std::size_t num_pages, std::int64_t page_size, std::int64_t pool_pages,
                std::int64_t* pages) {
  const auto size = static_cast<std::uint64_t>(page_size), end = static_cast<std::uint64_t>(pool_pages);
  const Divisor page_of(size);
  std::uint64_t wrong = 0;
  for (std::size_t i = 0; i < num_pages; ++i, tokens += page_size) {
    const auto first = static_cast<std::uint64_t>(tokens[0]);
    const std::uint64_t page = page_of(first);
    wrong |= (page * size) ^ first;
    wrong |= static_cast<std::uint64_t>(page >= end);
    for (std::uint64_t begin = 0; begin < size; begin += kAtOnce) {
      for (std::uint64_t k = begin; k < begin + kAtOnce; ++k) {
        wrong |= static_cast<std::uint64_t>(tokens[k]) ^ (first + k);
      }
    }
    pages[i] = static_cast<std::int64_t>(page);
  }
  return wrong == 0;
}

bool are_whole(const Share& share, std::int64_t page_size) {
  // Where every op ends with a page, each is of whole ones.
  return share.num_tokens % static_cast<std::size_t>(page_size) == 0 &&
         std::all_of(share.op_ends, share.op_ends + share.num_ops,
                     [page_size](std::int64_t end) { return end % page_size == 0; });
}

// Vectors only grow while a plan is written: those that are cleared first are filled with zeros for nothing.
template <typename T>
void make_room(std::vector<T>& values, std::size_t size) {
  if (values.size() < size) {
    values.resize(size);
  }
}

}  // namespace

Planner::Planner(std::vector<PairLayout> pairs) {
  std::size_t num_planes = 0;
  std::int64_t most_pages = 0;
  for (const PairLayout& layout : pairs) {
    pairs_.push_back(digest(layout, pairs_.size(), num_planes));
    num_planes += layout.planes.size();
    most_pages = std::max(most_pages, pairs_.back().dst_pages);
  }
  is_taken_.resize(static_cast<std::size_t>(most_pages) / 64 + 1);
}

Planner::Pair Planner::digest(const PairLayout& layout, std::size_t number, std::size_t first_plane) {
  const std::string where = "pair " + std::to_string(number);
  check_positive(where, "src_tokens", layout.src_tokens);
  check_positive(where, "dst_tokens", layout.dst_tokens);
  check_positive(where, "src_page_size", layout.src_page_size);
  check_positive(where, "dst_page_size", layout.dst_page_size);
  check_positive(where, "tokens_per_row", layout.tokens_per_row);
  const std::int64_t page_size = layout.dst_page_size;
  if (layout.src_page_size != page_size) {
    refuse(where, "src_page_size and dst_page_size must be the same");
  }
  if (layout.src_tokens % page_size != 0 || layout.dst_tokens % page_size != 0) {
    refuse(where, "src_tokens and dst_tokens must be whole pages");
  }
  if (layout.tokens_per_row != 1 && layout.tokens_per_row != page_size) {
    refuse(where, "tokens_per_row must be 1 or the page size");
  }
  if (layout.planes.empty()) {
    refuse(where, "it has no planes");
  }
  Pair pair{};
  pair.src_pages = layout.src_tokens / page_size;
  pair.dst_pages = layout.dst_tokens / page_size;
  pair.page_size = page_size;
  pair.rows_per_page = page_size / layout.tokens_per_row;
  pair.first_plane = first_plane;
  for (const PlaneLayout& plane : layout.planes) {
    const std::string which = where + ", plane " + std::to_string(pair.planes.size());
    check_side(which + ", src", plane.src, pair.rows_per_page, pair.src_pages);
    check_side(which + ", dst", plane.dst, pair.rows_per_page, pair.dst_pages);
    if (plane.src.row_bytes != plane.dst.row_bytes) {
      refuse(which, "row_bytes of src and dst must be the same");
    }
    const std::int64_t row_bytes = plane.dst.row_bytes, page_bytes = row_bytes * pair.rows_per_page;
    const auto place = [&](const Side& side) {
      return Place{pair.rows_per_page / side.parts * side.stride, side.parts == 1 ? side.stride : row_bytes};
    };
    const Place src = place(plane.src), dst = place(plane.dst);
    const bool in_one_piece = pair.rows_per_page == 1 || (src.step == row_bytes && dst.step == row_bytes);
    const bool without_gaps = in_one_piece && src.page_stride == page_bytes && dst.page_stride == page_bytes;
    const auto same = std::find_if(layout.planes.begin(), layout.planes.end(), [&](const PlaneLayout& other) {
      return other.src == plane.src && other.dst == plane.dst;
    });
    pair.has_runs |= without_gaps;
    pair.planes.push_back({src, dst, row_bytes,
                           without_gaps ? CopyOf::kRun : in_one_piece ? CopyOf::kPage : CopyOf::kRow,
                           static_cast<std::size_t>(same - layout.planes.begin())});
  }
  return pair;
}

bool Planner::plan(const std::vector<Share>& shares, Plan& out) {
  out.plane_ends.clear();
  out.columns.clear();
  out.plane_bytes.clear();
  std::size_t end = 0;
  for (const Share& share : shares) {
    const Pair& pair = pairs_[share.pair];
    Pages pages{};
    if (!check(pair, share, pages)) {
      return false;
    }
    if (pair.has_runs) {
      find_runs(pages);
    }
    const std::size_t first_of_pair = out.plane_ends.size();
    for (std::size_t number = 0; number < pair.planes.size(); ++number) {
      const Plane& plane = pair.planes[number];
      if (plane.same_as == number) {
        end = write(pair, plane, pages, end, out);
      } else {
        const std::size_t same = first_of_pair + plane.same_as;
        const auto from = static_cast<std::size_t>(same == 0 ? 0 : out.plane_ends[same - 1]);
        const auto count = static_cast<std::size_t>(out.plane_ends[same]) - from;
        for (auto* values : {&out.src_offsets, &out.dst_offsets, &out.sizes}) {
          make_room(*values, end + count);
          std::copy_n(values->data() + from, count, values->data() + end);
        }
        end += count;
      }
      out.plane_ends.push_back(static_cast<std::int64_t>(end));
      out.columns.push_back(pair.first_plane + number);
      out.plane_bytes.push_back(static_cast<std::int64_t>(pages.count) * pair.rows_per_page * plane.row_bytes);
    }
  }
  for (auto* values : {&out.src_offsets, &out.dst_offsets, &out.sizes}) {
    values->resize(end);
  }
  return true;
}

bool Planner::check(const Pair& pair, const Share& share, Pages& pages) {
  if (share.num_tokens == 0) {
    return false;
  }
  if (pair.page_size == 1) {
    if (!are_in_range(share.src, share.num_tokens, pair.src_pages) ||
        !are_in_range(share.dst, share.num_tokens, pair.dst_pages)) {
      return false;
    }
    pages = {share.src, share.dst, share.num_tokens, nullptr, 0};
  } else {
    if (!are_whole(share, pair.page_size)) {
      return false;
    }
    const std::size_t count = share.num_tokens / static_cast<std::size_t>(pair.page_size);
    make_room(src_pages_, count);
    make_room(dst_pages_, count);
    const auto read = pair.page_size % 4 == 0 ? read_pages<4> : read_pages<1>;
    if (!read(share.src, count, pair.page_size, pair.src_pages, src_pages_.data()) ||
        !read(share.dst, count, pair.page_size, pair.dst_pages, dst_pages_.data())) {
      return false;
    }
    pages = {src_pages_.data(), dst_pages_.data(), count, nullptr, 0};
  }
  return is_run(pages.dst, pages.count) || are_distinct(pages.dst, pages.count);
}

bool Planner::are_distinct(const std::int64_t* pages, std::size_t count) {
  // A word is kept in hand for as long as pages are in it: to load what was just stored takes long.
  std::size_t at = static_cast<std::size_t>(pages[0]) / 64;
  std::uint64_t word = 0, twice = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto page = static_cast<std::size_t>(pages[i]);
    if (page / 64 != at) {
      is_taken_[at] = word;
      at = page / 64;
      word = is_taken_[at];
    }
    const std::uint64_t bit = std::uint64_t{1} << page % 64;
    twice |= word & bit;
    word |= bit;
  }
  for (std::size_t i = 0; i < count; ++i) {
    is_taken_[static_cast<std::size_t>(pages[i]) / 64] = 0;
  }
  return twice == 0;
}

void Planner::find_runs(Pages& pages) {
  make_room(run_starts_, pages.count + 1);
  std::size_t* starts = run_starts_.data();
  std::size_t num_runs = 1;
  starts[0] = 0;
  for (std::size_t i = 1; i < pages.count; ++i) {
    if (pages.dst[i] - pages.dst[i - 1] != 1 || pages.src[i] - pages.src[i - 1] != 1) {
      starts[num_runs++] = i;
    }
  }
  starts[num_runs] = pages.count;
  pages.run_starts = starts;
  pages.num_runs = num_runs;
}

std::size_t Planner::write(const Pair& pair, const Plane& plane, const Pages& pages, std::size_t first, Plan& out) {
  const auto rows_per_page = static_cast<std::size_t>(pair.rows_per_page);
  const bool by_runs = plane.copy_of == CopyOf::kRun && pages.num_runs < pages.count;
  const std::size_t copies_per_page = plane.copy_of == CopyOf::kRow ? rows_per_page : 1;
  const std::size_t count = by_runs ? pages.num_runs : pages.count * copies_per_page;
  make_room(out.src_offsets, first + count);
  make_room(out.dst_offsets, first + count);
  make_room(out.sizes, first + count);
  std::int64_t* __restrict src = out.src_offsets.data() + first;
  std::int64_t* __restrict dst = out.dst_offsets.data() + first;
  std::int64_t* __restrict sizes = out.sizes.data() + first;
  const std::int64_t page_bytes = pair.rows_per_page * plane.row_bytes;
  if (by_runs) {
    for (std::size_t run = 0; run < count; ++run) {
      const std::size_t begin = pages.run_starts[run];
      src[run] = pages.src[begin] * plane.src.page_stride;
      dst[run] = pages.dst[begin] * plane.dst.page_stride;
      sizes[run] = static_cast<std::int64_t>(pages.run_starts[run + 1] - begin) * page_bytes;
    }
  } else if (copies_per_page == 1) {
    for (std::size_t i = 0; i < count; ++i) {
      src[i] = pages.src[i] * plane.src.page_stride;
      dst[i] = pages.dst[i] * plane.dst.page_stride;
    }
    std::fill_n(sizes, count, page_bytes);
  } else {
    for (std::size_t i = 0; i < pages.count; ++i, src += rows_per_page, dst += rows_per_page) {
      const std::int64_t src_page = pages.src[i] * plane.src.page_stride;
      const std::int64_t dst_page = pages.dst[i] * plane.dst.page_stride;
      for (std::size_t row = 0; row < rows_per_page; ++row) {
        src[row] = src_page + static_cast<std::int64_t>(row) * plane.src.step;
        dst[row] = dst_page + static_cast<std::int64_t>(row) * plane.dst.step;
      }
    }
    std::fill_n(sizes, count, plane.row_bytes);
  }
  return first + count;
}

}  // namespace hicache

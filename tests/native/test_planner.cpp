// The planner without Python, to be run under sanitizers: `make sanitize`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../hicache_sched/native/planner.h"
#include "check.h"

using namespace hicache;

namespace {

using Int = std::int64_t;
constexpr Int kMost = std::numeric_limits<Int>::max(), kLeast = std::numeric_limits<Int>::min();

struct Random {
  std::mt19937_64 bits;
  // From `least` to `most`, both included.
  Int number(Int least, Int most) { return std::uniform_int_distribution<Int>(least, most)(bits); }
  bool chance(int of) { return number(1, of) == 1; }
  template <typename T>
  T any(std::initializer_list<T> values) {
    return values.begin()[number(0, static_cast<Int>(values.size()) - 1)];
  }
};

// -- what is planned -------------------------------------------------------------------------------------------------

// The indices of one pair's share, in memory of exactly their size.
struct Indices {
  std::size_t pair;
  std::vector<Int> src, dst, op_ends;
};

struct Held {
  explicit Held(const std::vector<Int>& values) : memory(new Int[values.size()]) {
    std::copy(values.begin(), values.end(), memory.get());
  }
  std::unique_ptr<Int[]> memory;
};

bool plan(Planner& planner, const std::vector<Indices>& burst, Plan& out) {
  std::vector<Held> held;
  std::vector<Share> shares;
  for (const Indices& of : burst) {
    held.emplace_back(of.src), held.emplace_back(of.dst), held.emplace_back(of.op_ends);
    const auto* last = held.data() + held.size();
    shares.push_back({of.pair, last[-3].memory.get(), last[-2].memory.get(), last[-1].memory.get(), of.op_ends.size(),
                      of.src.size()});
  }
  return planner.plan(shares, out);
}

Side any_side(Random& random, Int rows_per_page, Int row_bytes) {
  const Int parts = random.any({Int{1}, rows_per_page});
  return {parts * row_bytes + random.any({Int{0}, Int{0}, Int{3}, row_bytes, parts * row_bytes}), parts, row_bytes};
}

PairLayout any_pair(Random& random) {
  const Int page_size = random.any({1, 1, 2, 3, 4, 8, 12, 16});
  const Int tokens_per_row = random.any({Int{1}, page_size}), rows_per_page = page_size / tokens_per_row;
  PairLayout pair{random.number(1, 200) * page_size, random.number(1, 200) * page_size, page_size, page_size,
                  tokens_per_row, {}};
  for (Int plane = random.number(1, 3); plane > 0; --plane) {
    if (!pair.planes.empty() && random.chance(2)) {
      pair.planes.push_back(pair.planes[static_cast<std::size_t>(random.number(0, Int(pair.planes.size()) - 1))]);
    } else {
      const Int row_bytes = random.number(1, 20);
      pair.planes.push_back({any_side(random, rows_per_page, row_bytes), any_side(random, rows_per_page, row_bytes)});
    }
  }
  return pair;
}

// `count` different pages, in runs that come in any order.
std::vector<Int> any_pages(Random& random, Int num_pages, std::size_t count) {
  const Int length = random.any({Int{1}, Int{2}, Int{7}, Int{64}, num_pages});
  std::vector<Int> firsts;
  for (Int first = 0; first < num_pages; first += length) {
    firsts.push_back(first);
  }
  std::shuffle(firsts.begin(), firsts.end(), random.bits);
  std::vector<Int> pages;
  for (const Int first : firsts) {
    for (Int page = first; page < std::min(first + length, num_pages) && pages.size() < count; ++page) {
      pages.push_back(page);
    }
  }
  return pages;
}

std::vector<Int> tokens_of(const std::vector<Int>& pages, Int page_size) {
  std::vector<Int> tokens;
  for (const Int page : pages) {
    for (Int offset = 0; offset < page_size; ++offset) {
      tokens.push_back(page * page_size + offset);
    }
  }
  return tokens;
}

Indices any_share(Random& random, const PairLayout& pair, std::size_t number) {
  const Int page_size = pair.dst_page_size, src_pages = pair.src_tokens / page_size;
  const Int dst_pages = pair.dst_tokens / page_size;
  const Int count = random.any({Int{1}, dst_pages, random.number(1, dst_pages)});
  std::vector<Int> src = any_pages(random, src_pages, static_cast<std::size_t>(count));
  while (Int(src.size()) < count) {  // a source may be named as often as one likes
    src.push_back(random.number(0, src_pages - 1));
  }
  Indices share{number, tokens_of(src, page_size),
                tokens_of(any_pages(random, dst_pages, static_cast<std::size_t>(count)), page_size), {}};
  for (Int op = random.number(0, 3); op > 0; --op) {
    share.op_ends.push_back(random.number(0, count) * page_size);
  }
  share.op_ends.push_back(count * page_size);
  std::sort(share.op_ends.begin(), share.op_ends.end());
  return share;
}

Int any_index(Random& random, Int num_tokens) {
  const Int limit = random.any({Int{0}, num_tokens, Int{1} << 31, Int{1} << 32, Int{1} << 62, -(Int{1} << 62)});
  return random.any({limit + random.number(-2, 2), kMost - random.number(0, 2), kLeast + random.number(0, 2)});
}

// Changes something, wrong or not.
void damage(Random& random, const PairLayout& pair, Indices& share) {
  const bool on_host = random.chance(2);
  std::vector<Int>& tokens = on_host ? share.src : share.dst;
  const Int num_tokens = on_host ? pair.src_tokens : pair.dst_tokens, page_size = pair.dst_page_size;
  const auto any_position = [&] { return static_cast<std::size_t>(random.number(0, Int(tokens.size()) - 1)); };
  const std::size_t one = any_position(), other = any_position();
  const auto page_of = [&](std::size_t at) { return tokens.begin() + Int(at) / page_size * page_size; };
  switch (random.number(0, 8)) {
    case 0:
      tokens[one] += random.number(-2, 2);
      break;
    case 1:
      tokens[one] = any_index(random, num_tokens);
      break;
    case 2:
      tokens[one] = tokens[other];
      break;
    case 3:
      std::swap(tokens[one], tokens[other]);
      break;
    case 4:
      std::copy_n(std::vector<Int>(page_of(other), page_of(other) + page_size).begin(), page_size, page_of(one));
      break;
    case 5: {
      auto index = static_cast<std::uint64_t>(any_index(random, num_tokens) / page_size * page_size);
      std::generate_n(page_of(one), page_size, [&] { return static_cast<Int>(index++); });
      break;
    }
    case 6: {
      const Int length = random.number(1, Int(tokens.size()));
      share.src.resize(static_cast<std::size_t>(length));
      share.dst.resize(static_cast<std::size_t>(length));
      share.op_ends = {random.any({length, length / page_size * page_size})};
      break;
    }
    case 7: {
      const Int by = random.number(-2, 2);
      std::for_each(page_of(one), page_of(one) + page_size, [&](Int& token) { token += by; });
      break;
    }
    default:
      // Not what ops end with, but nothing may go wrong by it.
      share.op_ends[static_cast<std::size_t>(random.number(0, Int(share.op_ends.size()) - 1))] =
          any_index(random, num_tokens);
  }
}

// -- the same, row by row --------------------------------------------------------------------------------------------

bool is_aligned(const std::vector<Int>& tokens, Int page_size) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Int offset = Int(i) % page_size;
    if (tokens[i] % page_size != offset || (offset > 0 && tokens[i] != tokens[i - 1] + 1)) {
      return false;
    }
  }
  return true;
}

bool is_valid(const PairLayout& pair, const Indices& share) {
  const auto all_in = [](const std::vector<Int>& tokens, Int num_tokens) {
    return std::all_of(tokens.begin(), tokens.end(), [&](Int token) { return token >= 0 && token < num_tokens; });
  };
  const Int page_size = pair.dst_page_size;
  return all_in(share.src, pair.src_tokens) && all_in(share.dst, pair.dst_tokens) &&
         std::all_of(share.op_ends.begin(), share.op_ends.end(), [&](Int end) { return end % page_size == 0; }) &&
         Int(share.src.size()) % page_size == 0 && is_aligned(share.src, page_size) &&
         is_aligned(share.dst, page_size) &&
         std::set<Int>(share.dst.begin(), share.dst.end()).size() == share.dst.size();
}

Int offset_of(const Side& side, Int row) { return row / side.parts * side.stride + row % side.parts * side.row_bytes; }

void check_plan(const std::vector<PairLayout>& pairs, const std::vector<Indices>& burst, const Plan& made) {
  Plan wanted;
  for (const Indices& share : burst) {
    const PairLayout& pair = pairs[share.pair];
    std::size_t column = 0;
    for (std::size_t before = 0; before < share.pair; ++before) {
      column += pairs[before].planes.size();
    }
    for (const PlaneLayout& plane : pair.planes) {
      const Int row_bytes = plane.dst.row_bytes, rows = Int(share.src.size()) / pair.tokens_per_row;
      for (Int row = 0; row < rows; ++row) {
        const auto token = static_cast<std::size_t>(row * pair.tokens_per_row);
        const Int src = offset_of(plane.src, share.src[token] / pair.tokens_per_row);
        const Int dst = offset_of(plane.dst, share.dst[token] / pair.tokens_per_row);
        if (row > 0 && wanted.src_offsets.back() + wanted.sizes.back() == src &&
            wanted.dst_offsets.back() + wanted.sizes.back() == dst) {
          wanted.sizes.back() += row_bytes;
        } else {
          wanted.src_offsets.push_back(src), wanted.dst_offsets.push_back(dst), wanted.sizes.push_back(row_bytes);
        }
      }
      wanted.plane_ends.push_back(Int(wanted.sizes.size()));
      wanted.columns.push_back(column++);
      wanted.plane_bytes.push_back(rows * row_bytes);
    }
  }
  CHECK(made.src_offsets == wanted.src_offsets);
  CHECK(made.dst_offsets == wanted.dst_offsets);
  CHECK(made.sizes == wanted.sizes);
  CHECK(made.plane_ends == wanted.plane_ends);
  CHECK(made.columns == wanted.columns);
  CHECK(made.plane_bytes == wanted.plane_bytes);
}

// -- tests -----------------------------------------------------------------------------------------------------------

// Bursts of some of the pairs, one after the other, every other one of them damaged.
void any_bursts_of_any_pairs_are_planned_where_they_are_valid_and_refused_where_not() {
  int planned = 0, refused = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    Random random{std::mt19937_64(seed)};
    std::vector<PairLayout> pairs;
    for (Int pair = random.number(1, 3); pair > 0; --pair) {
      pairs.push_back(any_pair(random));
    }
    Planner planner(pairs);
    CHECK(planner.num_pairs() == pairs.size());
    Plan out;
    for (int round = 0; round < 20; ++round) {
      std::vector<Indices> burst;
      for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
        if (random.chance(2) || (burst.empty() && pair + 1 == pairs.size())) {
          burst.push_back(any_share(random, pairs[pair], pair));
        }
      }
      if (round % 2 == 1) {
        Indices& share = burst[static_cast<std::size_t>(random.number(0, Int(burst.size()) - 1))];
        damage(random, pairs[share.pair], share);
      }
      const bool is_good = std::all_of(burst.begin(), burst.end(),
                                       [&](const Indices& share) { return is_valid(pairs[share.pair], share); });
      CHECK(plan(planner, burst, out) == is_good);
      ++(is_good ? planned : refused);
      if (is_good) {
        check_plan(pairs, burst, out);
      }
    }
  }
  CHECK(planned > 4000 && refused > 1000);
}

void a_pool_of_nearly_64_bits_is_planned_to_its_last_byte() {
  const Int most = kMost / 4;
  const std::vector<PairLayout> pairs{
      {4, 4, 2, 2, 1,
       {{{most, 1, 9}, {most, 1, 9}}, {{9, 1, 9}, {2 * most, 2, 9}}, {{most, 1, most}, {most, 1, most}}}}};
  Planner planner(pairs);
  Plan out;
  for (const auto& src : {std::vector<Int>{2, 3, 0, 1}, std::vector<Int>{0, 1, 2, 3}}) {
    const std::vector<Indices> burst{{0, src, {0, 1, 2, 3}, {4}}};
    CHECK(plan(planner, burst, out));
    check_plan(pairs, burst, out);
  }
}

void layouts_that_no_pools_have_are_refused_in_words() {
  const PairLayout good{32, 16, 4, 4, 1, {{{8, 1, 2}, {8, 4, 2}}}};
  Planner accepted({good, good});
  std::vector<std::pair<std::string, PairLayout>> wrong;
  const auto add = [&](const char* words, auto change) {
    wrong.emplace_back(words, good);
    change(wrong.back().second);
  };
  for (const Int value : {Int{0}, Int{-1}, kLeast}) {
    add("src_tokens must be positive", [&](PairLayout& pair) { pair.src_tokens = value; });
    add("dst_tokens must be positive", [&](PairLayout& pair) { pair.dst_tokens = value; });
    add("src_page_size must be positive", [&](PairLayout& pair) { pair.src_page_size = value; });
    add("dst_page_size must be positive", [&](PairLayout& pair) { pair.dst_page_size = value; });
    add("tokens_per_row must be positive", [&](PairLayout& pair) { pair.tokens_per_row = value; });
    add("src: stride must be positive", [&](PairLayout& pair) { pair.planes[0].src.stride = value; });
    add("src: parts must be positive", [&](PairLayout& pair) { pair.planes[0].src.parts = value; });
    add("dst: row_bytes must be positive", [&](PairLayout& pair) { pair.planes[0].dst.row_bytes = value; });
  }
  add("must be the same", [](PairLayout& pair) { pair.src_page_size = 8; });
  add("whole pages", [](PairLayout& pair) { pair.src_tokens = 33; });
  add("whole pages", [](PairLayout& pair) { pair.dst_tokens = kMost; });
  add("1 or the page size", [](PairLayout& pair) { pair.tokens_per_row = 2; });
  add("no planes", [](PairLayout& pair) { pair.planes.clear(); });
  add("parts must be 1 or", [](PairLayout& pair) { pair.planes[0].src.parts = 2; });
  add("rows overlap", [](PairLayout& pair) { pair.planes[0].dst.stride = 7; });
  add("rows overlap", [](PairLayout& pair) { pair.planes[0].dst.row_bytes = kMost; });
  add("beyond 64 bits", [](PairLayout& pair) { pair.planes[0].src.stride = kMost / 31; });
  add("beyond 64 bits", [](PairLayout& pair) { pair.planes[0].dst.stride = kMost; });
  add("row_bytes of src and dst", [](PairLayout& pair) { pair.planes[0].src.row_bytes = 1; });
  for (const auto& [words, pair] : wrong) {
    std::string said;
    try {
      Planner planner({good, pair});
    } catch (const std::invalid_argument& error) {
      said = error.what();
    }
    CHECK(said.rfind("pair 1", 0) == 0);
    CHECK(said.find(words) != std::string::npos);
  }
}

void a_plan_uses_its_memory_again() {
  Planner planner({{1000, 1000, 1, 1, 1, {{{8, 1, 4}, {8, 1, 4}}}}});
  std::vector<Int> tokens(1000);
  std::iota(tokens.begin(), tokens.end(), 0);
  Plan out;
  CHECK(plan(planner, {{0, tokens, tokens, {1000}}}, out));
  const Int* memory = out.sizes.data();
  CHECK(plan(planner, {{0, {3}, {4}, {1}}}, out));
  CHECK(out.sizes.size() == 1 && out.src_offsets.size() == 1 && out.dst_offsets.size() == 1);
  CHECK(plan(planner, {{0, tokens, tokens, {1000}}}, out));
  CHECK(out.sizes.data() == memory);
}

}  // namespace

int main() {
  any_bursts_of_any_pairs_are_planned_where_they_are_valid_and_refused_where_not();
  a_pool_of_nearly_64_bits_is_planned_to_its_last_byte();
  layouts_that_no_pools_have_are_refused_in_words();
  a_plan_uses_its_memory_again();
  std::puts("native planner: all tests passed");
}

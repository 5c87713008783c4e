// Copies between addresses. Nothing here knows Python; every function may run on any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hicache {

// sizes[i] bytes from src[i] to dst[i], one copy after the other. Nothing is checked.
//
// With planes, the copies of plane p are those from plane_ends[p - 1] to plane_ends[p], and its bases are added to
// their addresses; a plane whose bases are 0 is left out.
struct Copies {
  const std::int64_t* dst = nullptr;
  const std::int64_t* src = nullptr;
  const std::int64_t* sizes = nullptr;
  std::size_t count = 0;
  const std::int64_t* plane_ends = nullptr;
  const std::int64_t* dst_base = nullptr;
  const std::int64_t* src_base = nullptr;
  std::size_t num_planes = 0;
};

// Calls each(first, last, dst_base, src_base) for copies that belong together.
template <typename Each>
void for_each_plane(const Copies& copies, Each each) {
  if (copies.plane_ends == nullptr) {
    each(std::size_t{0}, copies.count, std::int64_t{0}, std::int64_t{0});
    return;
  }
  std::size_t first = 0;
  for (std::size_t plane = 0; plane < copies.num_planes; ++plane) {
    const auto last = static_cast<std::size_t>(copies.plane_ends[plane]);
    if (copies.dst_base[plane] != 0) {
      each(first, last, copies.dst_base[plane], copies.src_base[plane]);
    }
    first = last;
  }
}

std::int64_t bytes_of(const Copies& copies);
void copy_batch(const Copies& copies);

}  // namespace hicache

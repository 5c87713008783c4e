#include "copy.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hicache {
namespace {

// From here on a batch does not stay in the caches anyway, so destinations are written past them: a cache would first
// read each line that is about to be overwritten. memcpy does so too, but looks at one copy at a time.
constexpr std::size_t kPastCaches = 8u << 20;

#if defined(__SSE2__)

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLine = 64;
constexpr std::size_t kPages = 4;

void stream_line(char* dst, const char* src) {
  for (std::size_t i = 0; i < kLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  }
}

// Some pages at a time, as the prefetcher of the CPU follows a stream within a page only, but several at once.
void copy_past_caches(char* dst, const char* src, std::size_t size) {
  const std::size_t head = std::min(size, (16 - reinterpret_cast<std::uintptr_t>(dst) % 16) % 16);
  std::memcpy(dst, src, head);
  dst += head, src += head, size -= head;
  for (; size >= kPages * kPage; dst += kPages * kPage, src += kPages * kPage, size -= kPages * kPage) {
    for (std::size_t i = 0; i < kPage; i += kLine) {
      for (std::size_t page = 0; page < kPages; ++page) {
        stream_line(dst + page * kPage + i, src + page * kPage + i);
      }
    }
  }
  for (; size >= kLine; dst += kLine, src += kLine, size -= kLine) {
    stream_line(dst, src);
  }
  std::memcpy(dst, src, size);
}

void finish_past_caches() { _mm_sfence(); }

#else

void copy_past_caches(char* dst, const char* src, std::size_t size) { std::memcpy(dst, src, size); }
void finish_past_caches() {}

#endif

}  // namespace

std::int64_t bytes_of(const Copies& copies) {
  std::int64_t total = 0;
  for_each_plane(copies, [&](std::size_t first, std::size_t last, std::int64_t, std::int64_t) {
    total = std::accumulate(copies.sizes + first, copies.sizes + last, total);
  });
  return total;
}

void copy_batch(const Copies& copies) {
  const bool past_caches = static_cast<std::size_t>(bytes_of(copies)) >= kPastCaches;
  for_each_plane(copies, [&](std::size_t first, std::size_t last, std::int64_t dst_base, std::int64_t src_base) {
    for (std::size_t i = first; i < last; ++i) {
      auto* to = reinterpret_cast<char*>(dst_base + copies.dst[i]);
      const auto* from = reinterpret_cast<const char*>(src_base + copies.src[i]);
      const auto size = static_cast<std::size_t>(copies.sizes[i]);
      if (past_caches && size < kPastCaches) {
        copy_past_caches(to, from, size);
      } else {
        std::memcpy(to, from, size);
      }
    }
  });
  if (past_caches) {
    finish_past_caches();
  }
}

}  // namespace hicache

// Copies between addresses. Nothing here knows Python; every function may run on any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hicache {

// sizes[i] bytes from src[i] to dst[i], one copy after the other. Nothing is checked.
void copy_batch(const std::int64_t* dst, const std::int64_t* src, const std::int64_t* sizes, std::size_t count);

}  // namespace hicache

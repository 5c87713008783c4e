#include "cuda_plane.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace hicache {
namespace {

constexpr CudaResult kSuccess = 0;                            // CUDA_SUCCESS
constexpr unsigned kBlockingSync = 1, kDisableTiming = 2;     // CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;                             // CU_MEMHOSTALLOC_PORTABLE
constexpr int kMemoryOfHost = 1, kMemoryOfDevice = 2;         // CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
constexpr int kOrderStream = 1, kOrderAny = 3;                // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and _ANY
constexpr std::int64_t kMaxPitch = 0x7fffffff;                // bytes: CU_DEVICE_ATTRIBUTE_MAX_PITCH, of every device
constexpr std::int64_t kValue = sizeof(std::int64_t);         // bytes
constexpr std::size_t kFirstCapacity = std::size_t{1} << 15;  // values

// cuMemcpyBatchAsync of CUDA 12.8 and of 13.0
using BatchWithIndex = CudaResult (*)(const std::int64_t* dst, const std::int64_t* src, const std::int64_t* sizes,
                                      std::size_t count, const CudaCopyAttributes*, const std::size_t* apply_from,
                                      std::size_t num_attributes, std::size_t* failed, Handle stream);
using BatchWithoutIndex = CudaResult (*)(const std::int64_t* dst, const std::int64_t* src, const std::int64_t* sizes,
                                         std::size_t count, const CudaCopyAttributes*, const std::size_t* apply_from,
                                         std::size_t num_attributes, Handle stream);

Status status_of(const char* call, CudaResult code) {
  Status status;
  if (code != kSuccess) {
    status.kind = Status::kDriver;
    status.call = call;
    status.code = code;
  }
  return status;
}

}  // namespace

CudaPlaneDevice::CudaPlaneDevice(const CudaFunctions& functions, Handle h2d, Handle index, bool has_failure_index,
                                 bool stable_source, std::vector<std::int64_t> borders)
    : functions_(functions),
      h2d_(h2d),
      index_(index),
      has_failure_index_(has_failure_index),
      attributes_{stable_source ? kOrderAny : kOrderStream, {0, 0}, {0, 0}, 0},
      borders_(std::move(borders)),
      process_(getpid()) {}

// On any thread, whatever context is current there. Where the context is dead it has taken everything with it, and a
// forked child has nothing of its parent's to free. What the device may still write to is left to the context's end.
CudaPlaneDevice::~CudaPlaneDevice() {
  if (context_ == 0 || getpid() != process_ || functions_.cuCtxPushCurrent_v2(context_) != kSuccess) {
    return;
  }
  if (read_done_ != 0) {
    functions_.cuEventDestroy_v2(read_done_);
  }
  if (may_be_written_) {
    buffers_.clear();
  }
  for (void* buffer : buffers_) {
    functions_.cuMemFreeHost(buffer);
  }
  CudaContext ours;
  functions_.cuCtxPopCurrent_v2(&ours);
}

Status CudaPlaneDevice::synchronize(Handle event, Caller) {
  return status_of("cuEventSynchronize", functions_.cuEventSynchronize(event));
}

bool CudaPlaneDevice::is_reached(Handle event) { return functions_.cuEventQuery(event) == kSuccess; }

Status CudaPlaneDevice::wait_on_index_stream(Handle event) {
  return status_of("cuStreamWaitEvent", functions_.cuStreamWaitEvent(index_, event, 0));
}

Status CudaPlaneDevice::wait_on_h2d_stream(Handle event) {
  return status_of("cuStreamWaitEvent", functions_.cuStreamWaitEvent(h2d_, event, 0));
}

Status CudaPlaneDevice::record(Handle event) {
  return status_of("cuEventRecord", functions_.cuEventRecord(event, h2d_));
}

// -- reading ---------------------------------------------------------------------------------------------------------

Status CudaPlaneDevice::read(const std::vector<Read>& reads, std::shared_ptr<const void>) {
  std::size_t count = 0;
  for (const Read& read : reads) {
    count += read.count;
  }
  if (count == 0) {
    return {};
  }
  Status status = make_ready(count);
  if (!status.is_ok()) {
    return status;
  }
  auto* const values = static_cast<std::int64_t*>(buffers_.back());
  may_be_written_ = true;
  std::size_t at = 0;
  for (const Read& read : reads) {
    status = put(read, values + at);
    if (!status.is_ok()) {
      return status;
    }
    at += read.count;
  }
  status = status_of("cuEventRecord", functions_.cuEventRecord(read_done_, index_));
  if (status.is_ok()) {
    // The event sleeps where a wait for the stream may spin (CU_EVENT_BLOCKING_SYNC).
    status = synchronize(read_done_, Caller::kSubmitter);
  }
  if (!status.is_ok()) {
    return status;
  }
  may_be_written_ = false;
  at = 0;
  for (const Read& read : reads) {
    std::memcpy(read.to, values + at, read.count * sizeof(std::int64_t));
    at += read.count;
  }
  return status;
}

// Has the event and page-locked memory for so many values.
Status CudaPlaneDevice::make_ready(std::size_t count) {
  Status status;
  if (context_ == 0) {
    status = status_of("cuCtxGetCurrent", functions_.cuCtxGetCurrent(&context_));
  }
  if (status.is_ok() && read_done_ == 0) {
    status = status_of("cuEventCreate", functions_.cuEventCreate(&read_done_, kBlockingSync | kDisableTiming));
  }
  if (status.is_ok() && count > capacity_) {
    const std::size_t capacity = std::max({count, 2 * capacity_, kFirstCapacity});
    void* buffer = nullptr;
    const std::size_t bytes = capacity * sizeof(std::int64_t);
    status = status_of("cuMemHostAlloc", functions_.cuMemHostAlloc(&buffer, bytes, kPortable));
    if (status.is_ok()) {
      buffers_.push_back(buffer);
      capacity_ = capacity;
    }
  }
  return status;
}

// Puts a read on the index stream.
Status CudaPlaneDevice::put(const Read& read, std::int64_t* to) {
  if (read.count == 0) {
    return {};
  }
  if (read.stride == 1 || read.count == 1) {
    const std::size_t bytes = read.count * sizeof(std::int64_t);
    return status_of("cuMemcpyDtoHAsync_v2", functions_.cuMemcpyDtoHAsync_v2(to, read.from, bytes, index_));
  }
  if (read.stride >= 1 && read.stride <= kMaxPitch / kValue) {
    // Rows of one value.
    CudaCopy2d copy{};
    copy.src_type = kMemoryOfDevice;
    copy.src_device = read.from;
    copy.src_pitch = static_cast<std::size_t>(read.stride * kValue);
    copy.dst_type = kMemoryOfHost;
    copy.dst_host = to;
    copy.dst_pitch = copy.width = static_cast<std::size_t>(kValue);
    copy.height = read.count;
    return status_of("cuMemcpy2DAsync_v2", functions_.cuMemcpy2DAsync_v2(&copy, index_));
  }
  // No pitch: one value for all of them (a stride of 0), or values further apart than a pitch goes.
  Status status;
  for (std::size_t i = 0; status.is_ok() && i < read.count; ++i) {
    const std::int64_t from = read.from + static_cast<std::int64_t>(i) * read.stride * kValue;
    status = status_of("cuMemcpyDtoHAsync_v2", functions_.cuMemcpyDtoHAsync_v2(to + i, from, kValue, index_));
  }
  return status;
}

// -- copying ---------------------------------------------------------------------------------------------------------

Status CudaPlaneDevice::copy(const Copies& copies, std::int64_t, std::shared_ptr<const void>) {
  expand(copies);
  const std::size_t count = sizes_.size(), apply_from = 0;  // the one set of attributes is that of every copy
  if (count == 0) {
    return {};  // the driver takes no empty batch
  }
  std::size_t failed = Status::kNoCopy;
  CudaResult code;
  if (has_failure_index_) {
    const auto call = reinterpret_cast<BatchWithIndex>(functions_.cuMemcpyBatchAsync);
    code = call(dst_.data(), src_.data(), sizes_.data(), count, &attributes_, &apply_from, 1, &failed, h2d_);
  } else {
    const auto call = reinterpret_cast<BatchWithoutIndex>(functions_.cuMemcpyBatchAsync);
    code = call(dst_.data(), src_.data(), sizes_.data(), count, &attributes_, &apply_from, 1, h2d_);
  }
  Status status = status_of("cuMemcpyBatchAsync", code);
  if (!status.is_ok()) {
    status.copy = origin_of(copies, failed);
  }
  return status;
}

// Calls each(number of the copy, dst, src, size) for each part of each copy.
template <typename Each>
void CudaPlaneDevice::for_each_part(const Copies& copies, Each each) const {
  for_each_plane(copies, [&](std::size_t first, std::size_t last, std::int64_t dst_base, std::int64_t src_base) {
    for (std::size_t i = first; i < last; ++i) {
      std::int64_t dst = dst_base + copies.dst[i], src = src_base + copies.src[i];
      const std::int64_t end = src + copies.sizes[i];
      auto border = std::upper_bound(borders_.begin(), borders_.end(), src);
      for (; border != borders_.end() && *border < end; ++border) {
        each(i, dst, src, *border - src);
        dst += *border - src;
        src = *border;
      }
      each(i, dst, src, end - src);
    }
  });
}

void CudaPlaneDevice::expand(const Copies& copies) {
  dst_.clear();
  src_.clear();
  sizes_.clear();
  if (!borders_.empty()) {
    for_each_part(copies, [&](std::size_t, std::int64_t dst, std::int64_t src, std::int64_t size) {
      dst_.push_back(dst);
      src_.push_back(src);
      sizes_.push_back(size);
    });
    return;
  }
  // As above, in loops that a compiler makes much of.
  for_each_plane(copies, [&](std::size_t first, std::size_t last, std::int64_t dst_base, std::int64_t src_base) {
    const std::size_t at = sizes_.size();
    sizes_.insert(sizes_.end(), copies.sizes + first, copies.sizes + last);
    dst_.resize(sizes_.size());
    src_.resize(sizes_.size());
    const auto add = [&](const std::int64_t* offsets, std::int64_t base, std::int64_t* to) {
      std::transform(offsets + first, offsets + last, to + at, [=](std::int64_t offset) { return base + offset; });
    };
    add(copies.dst, dst_base, dst_.data());
    add(copies.src, src_base, src_.data());
  });
}

// The number of the copy that a part of the last call is of; kNoCopy for no part of it.
std::size_t CudaPlaneDevice::origin_of(const Copies& copies, std::size_t part) const {
  std::size_t number = 0, origin = Status::kNoCopy;
  for_each_part(copies, [&](std::size_t copy, std::int64_t, std::int64_t, std::int64_t) {
    if (number++ == part) {
      origin = copy;
    }
  });
  return origin;
}

}  // namespace hicache

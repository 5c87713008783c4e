// A CUDA device, as the native data plane calls it: through functions of the CUDA driver that are looked up at run
// time, so that nothing of CUDA is needed to build this. Nothing here knows Python.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "plane_device.h"

namespace hicache {

// The driver's handles and device addresses (CUstream, CUevent, CUcontext, CUdeviceptr) are integers of 64 bits here.
using CudaResult = int;  // CUresult
using CudaContext = std::uint64_t;

// CUDA_MEMCPY2D
struct CudaCopy2d {
  std::size_t src_x, src_y;
  int src_type;  // CUmemorytype
  const void* src_host;
  std::int64_t src_device;
  void* src_array;
  std::size_t src_pitch;
  std::size_t dst_x, dst_y;
  int dst_type;
  void* dst_host;
  std::int64_t dst_device;
  void* dst_array;
  std::size_t dst_pitch;
  std::size_t width, height;  // bytes, rows
};
static_assert(sizeof(CudaCopy2d) == 128, "as in cuda.h, where pointers have 64 bits");

// CUmemcpyAttributes; the hints at a location are for managed memory and stay empty.
struct CudaCopyAttributes {
  int source_order;  // CUmemcpySrcAccessOrder
  int source_location[2];
  int destination_location[2];
  unsigned flags;
};
static_assert(sizeof(CudaCopyAttributes) == 24, "as in cuda.h");

// Functions by the names that the driver's library exports them by.
struct CudaFunctions {
  CudaResult (*cuCtxGetCurrent)(CudaContext*);
  CudaResult (*cuCtxPushCurrent_v2)(CudaContext);
  CudaResult (*cuCtxPopCurrent_v2)(CudaContext*);
  CudaResult (*cuEventCreate)(Handle*, unsigned flags);
  CudaResult (*cuEventDestroy_v2)(Handle);
  CudaResult (*cuEventRecord)(Handle event, Handle stream);
  CudaResult (*cuEventSynchronize)(Handle);
  CudaResult (*cuEventQuery)(Handle);
  CudaResult (*cuStreamWaitEvent)(Handle stream, Handle event, unsigned flags);
  CudaResult (*cuMemHostAlloc)(void**, std::size_t bytes, unsigned flags);
  CudaResult (*cuMemFreeHost)(void*);
  CudaResult (*cuMemcpyDtoHAsync_v2)(void* to, std::int64_t from, std::size_t bytes, Handle stream);
  CudaResult (*cuMemcpy2DAsync_v2)(const CudaCopy2d*, Handle stream);
  // It has had two signatures: that of CUDA 12.8 takes a pointer to where it writes the index of a copy that failed,
  // that of 13.0 does not.
  void* cuMemcpyBatchAsync;
};

// A call that the driver fails gives kDriver with its name and CUresult, and is not made again. The observing thread
// calls `synchronize` and `is_reached` only, the submitting thread everything; the context of the streams has to be
// current on both.
class CudaPlaneDevice final : public PlaneDevice {
 public:
  // has_failure_index: which signature cuMemcpyBatchAsync has.
  // stable_source: whether no work of the device that is still to come writes what is copied; the driver may then read
  //   it at any time, else when the stream gets there (CUmemcpySrcAccessOrder).
  // borders: addresses, ascending, where one registration of host memory (cuMemHostRegister) ends and the next begins:
  //   a copy that would read across one is made in parts.
  CudaPlaneDevice(const CudaFunctions& functions, Handle h2d, Handle index, bool has_failure_index, bool stable_source,
                  std::vector<std::int64_t> borders);
  ~CudaPlaneDevice() override;
  CudaPlaneDevice(const CudaPlaneDevice&) = delete;
  CudaPlaneDevice& operator=(const CudaPlaneDevice&) = delete;

  Status synchronize(Handle event, Caller caller) override;
  bool is_reached(Handle event) override;
  Status wait_on_index_stream(Handle event) override;
  Status wait_on_h2d_stream(Handle event) override;
  Status record(Handle event) override;
  Status read(const std::vector<Read>& reads, std::shared_ptr<const void> memory) override;
  // One call of cuMemcpyBatchAsync, which reads its arrays before it returns. Where it fails and blames a copy, that is
  // named by its number in `copies`.
  Status copy(const Copies& copies, std::int64_t nbytes, std::shared_ptr<const void> memory) override;

 private:
  Status make_ready(std::size_t count);
  Status put(const Read& read, std::int64_t* to);
  void expand(const Copies& copies);
  std::size_t origin_of(const Copies& copies, std::size_t part) const;
  template <typename Each>
  void for_each_part(const Copies& copies, Each each) const;

  const CudaFunctions functions_;
  const Handle h2d_, index_;
  const bool has_failure_index_;
  const CudaCopyAttributes attributes_;
  const std::vector<std::int64_t> borders_;
  const pid_t process_;

  // Of the last call of cuMemcpyBatchAsync.
  std::vector<std::int64_t> dst_, src_, sizes_;

  // What is read goes to page-locked memory first. Only the device writes there, in the order of the index stream, so
  // it is used again whatever became of the last read. Freeing may wait for the device (cuMemFreeHost), so what has
  // become too small is kept; all of it together is less than twice the last.
  std::vector<void*> buffers_;
  std::size_t capacity_ = 0;     // values, of the last
  bool may_be_written_ = false;  // the device may still write there
  Handle read_done_ = 0;         // recorded behind a read
  CudaContext context_ = 0;      // of buffers and event
};

}  // namespace hicache

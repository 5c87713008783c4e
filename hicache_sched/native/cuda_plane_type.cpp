#include "cuda_plane_type.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "arrays.h"
#include "capsules.h"
#include "cuda_plane.h"

namespace hicache {
namespace {

// False, with a Python error, where there is no such function.
template <typename Function>
bool find(PyObject* functions, const char* name, Function& function) {
  PyObject* address = PyDict_GetItemString(functions, name);
  void* pointer = address == nullptr ? nullptr : PyLong_AsVoidPtr(address);
  if (pointer == nullptr && PyErr_Occurred() == nullptr) {
    PyErr_Format(PyExc_ValueError, "functions must have the address of %s", name);
  }
  function = reinterpret_cast<Function>(pointer);
  return pointer != nullptr;
}

bool find_all(PyObject* functions, CudaFunctions& found) {
  return find(functions, "cuCtxGetCurrent", found.cuCtxGetCurrent) &&
         find(functions, "cuCtxPushCurrent_v2", found.cuCtxPushCurrent_v2) &&
         find(functions, "cuCtxPopCurrent_v2", found.cuCtxPopCurrent_v2) &&
         find(functions, "cuEventCreate", found.cuEventCreate) &&
         find(functions, "cuEventDestroy_v2", found.cuEventDestroy_v2) &&
         find(functions, "cuEventRecord", found.cuEventRecord) &&
         find(functions, "cuEventSynchronize", found.cuEventSynchronize) &&
         find(functions, "cuEventQuery", found.cuEventQuery) &&
         find(functions, "cuStreamWaitEvent", found.cuStreamWaitEvent) &&
         find(functions, "cuMemHostAlloc", found.cuMemHostAlloc) &&
         find(functions, "cuMemFreeHost", found.cuMemFreeHost) &&
         find(functions, "cuMemcpyDtoHAsync_v2", found.cuMemcpyDtoHAsync_v2) &&
         find(functions, "cuMemcpy2DAsync_v2", found.cuMemcpy2DAsync_v2) &&
         find(functions, "cuMemcpyBatchAsync", found.cuMemcpyBatchAsync);
}

}  // namespace

// cuda_plane_device(functions, h2d stream, index stream, has_failure_index, stable_source, borders): addresses of the
// driver's functions by name, and handles of streams; makes no call of the driver. For the rest see CudaPlaneDevice.
PyObject* cuda_plane_device(PyObject*, PyObject* args) {
  PyObject *functions = nullptr, *borders = nullptr;
  long long h2d = 0, index = 0;
  int has_failure_index = 0, stable_source = 0;
  if (!PyArg_ParseTuple(args, "O!LLppO", &PyDict_Type, &functions, &h2d, &index, &has_failure_index, &stable_source,
                        &borders)) {
    return nullptr;
  }
  CudaFunctions found{};
  Int64s addresses;
  if (!find_all(functions, found) || !addresses.borrow(borders, "borders")) {
    return nullptr;
  }
  std::vector<std::int64_t> ascending(addresses.data(), addresses.data() + addresses.size());
  if (!std::is_sorted(ascending.begin(), ascending.end())) {
    PyErr_SetString(PyExc_ValueError, "borders must ascend");
    return nullptr;
  }
  return wrap<PlaneDevice>(std::make_shared<CudaPlaneDevice>(found, h2d, index, has_failure_index != 0,
                                                             stable_source != 0, std::move(ascending)));
}

}  // namespace hicache

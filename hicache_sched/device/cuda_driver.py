"""The CUDA driver library through ctypes, as far as torch does not offer what is needed."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

SUCCESS = 0
_CUDA_12_8 = 12080
_CUDA_13_0 = 13000
_MEMORY_TYPE, _RANGE_START, _RANGE_SIZE = 2, 11, 12  # CUpointer_attribute
_HOST = 1  # CUmemorytype
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_FOR_PLANE = (
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpy2DAsync_v2",
)


class CudaDriverError(RuntimeError):
    """A driver call failed.

    Attributes:
        function: its name.
        status: the `CUresult`.
        error_name: what the driver calls that status.
    """

    def __init__(self, function: str, status: int, error_name: str) -> None:
        super().__init__(f"{function} failed with {error_name}")
        self.function = function
        self.status = status
        self.error_name = error_name


class BatchFunction(NamedTuple):
    """`cuMemcpyBatchAsync` as the driver has it.

    Attributes:
        call: the function.
        has_failure_index: whether it takes a pointer to where it writes the index of a copy that failed, as it does
            before CUDA 13.
    """

    call: Any
    has_failure_index: bool

    @property
    def address(self) -> int:
        """Where it is, for a native caller."""
        return _address_of(self.call)


class CudaDriver:
    """The driver library; needs `torch.cuda` to be initialised for all that needs a context.

    :param library: by default the system's.
    :raises OSError: there is none.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def call(self, name: str, *args: Any) -> None:
        """
        :raises CudaDriverError: the call failed.
        """
        status = getattr(self._library, name)(*args)
        if status != SUCCESS:
            raise self.error(name, status)

    def error(self, function: str, status: int) -> CudaDriverError:
        """What a call of `function` that gave `status` is to raise."""
        return CudaDriverError(function, status, self.error_name(status))

    def error_name(self, status: int) -> str:
        """`CUDA_ERROR_INVALID_VALUE` and the like."""
        name = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name)) == SUCCESS and name.value:
            return name.value.decode()
        return f"CUresult {status}"

    @property
    def version(self) -> str:
        """The newest CUDA that the driver supports."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def use_primary_context(self, index: int) -> None:
        """Make the context that torch uses the calling thread's, where it has none: `torch.cuda.set_device` need not.

        :param index: the device, as `torch.cuda` numbers it.
        """
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value:
            return
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        # torch holds the primary context for the life of the process, so ours need not.
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    def batch_function(self) -> BatchFunction | None:
        """`cuMemcpyBatchAsync`, None where the driver is older than CUDA 12.8.

        Asked for by version and not by symbol: the same name has had two signatures (CUDA driver API,
        `cuGetProcAddress`). The older one is taken where there are both, as it says which copy failed.
        """
        for version, has_failure_index in ((_CUDA_12_8, True), (_CUDA_13_0, False)):
            address = self._entry_point(b"cuMemcpyBatchAsync", version)
            if address:
                arrays = [ctypes.c_void_p] * 3
                attributes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
                index = [ctypes.c_void_p] if has_failure_index else []
                prototype = ctypes.CFUNCTYPE(
                    ctypes.c_int, *arrays, ctypes.c_size_t, *attributes, *index, ctypes.c_void_p
                )
                return BatchFunction(prototype(address), has_failure_index)
        return None

    def plane_functions(self) -> dict[str, int]:
        """Addresses of what a native data plane calls beside `batch_function`, by name."""
        return {name: _address_of(getattr(self._library, name)) for name in _FOR_PLANE}

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory for every context; needs a current one.

        :raises CudaDriverError: it cannot be.
        """
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def registration_borders(self, start: int, end: int) -> list[int] | None:
        """Where in `start` to `end` one registration of host memory ends and the next begins.

        A driver that does not say how far a registration goes is taken to mean that there is one.

        :return: addresses, ascending; None if some of the memory is not page-locked.
        """
        borders: list[int] = []
        while self._pointer_attribute(_MEMORY_TYPE, start) == _HOST:
            first = self._pointer_attribute(_RANGE_START, start)
            size = self._pointer_attribute(_RANGE_SIZE, start)
            if not first or not size or first + size <= start:
                return borders if self._pointer_attribute(_MEMORY_TYPE, end - 1) == _HOST else None
            start = first + size
            if start >= end:
                return borders
            borders.append(start)
        return None

    def _pointer_attribute(self, attribute: int, address: int) -> int | None:
        value = ctypes.c_uint64()
        status = self._library.cuPointerGetAttribute(
            ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_uint64(address)
        )
        return value.value if status == SUCCESS else None

    def _entry_point(self, symbol: bytes, version: int) -> int | None:
        function = getattr(self._library, "cuGetProcAddress_v2", None)
        if function is None:  # a driver older than CUDA 12
            return None
        address, found = ctypes.c_void_p(), ctypes.c_int()
        status = function(symbol, ctypes.byref(address), ctypes.c_int(version), ctypes.c_uint64(0), ctypes.byref(found))
        return address.value if status == SUCCESS else None


def _address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def initialised_driver() -> CudaDriver:
    """The system's driver, with the context of torch's current device current on the calling thread.

    :raises RuntimeError: there is no CUDA.
    """
    torch.cuda.init()
    driver = CudaDriver()
    driver.use_primary_context(torch.cuda.current_device())
    return driver

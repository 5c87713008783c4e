"""Whether and how a device makes a batch of copies in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hicache_sched import native
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.cuda_driver import BatchFunction, CudaDriver
from hicache_sched.device.emulated import EmulatedDevice

ORDER_STREAM, ORDER_ANY = 1, 3  # CUmemcpySrcAccessOrder
_NO_INDEX = 2**64 - 1


class BatchError(RuntimeError):
    """A batch was refused.

    Attributes:
        index: which of its copies the device blames, None where it does not say; which copy of the plan, where the
            message names one.
    """

    def __init__(self, message: str, index: int | None) -> None:
        super().__init__(message)
        self.index = index


class BatchedCopy(Protocol):
    """Puts batches of copies from the host on the calling thread's current stream.

    Attributes:
        name: what it is called in logs.
        keeps_arrays: whether the arrays of a batch are read until it has been made, and not only during `enqueue`.
    """

    name: str
    keeps_arrays: bool

    def enqueue(self, batch: CopyBatch) -> None:
        """Put one batch on the current stream.

        :raises BatchError: the device refused it.
        """


class NoBatchedCopy(NamedTuple):
    """A device that makes copies one by one.

    Attributes:
        reason: why, for logs.
    """

    reason: str


def batched_copy_for(
    device: DeviceBinding,
    h2d_stream: Any,
    source: Iterable[tuple[int, int]],
    *,
    stable_source: bool,
    driver: CudaDriver | None = None,
) -> BatchedCopy | NoBatchedCopy:
    """How `device` makes batches of copies from `source`, if it can.

    :param h2d_stream: the stream that they will be put on.
    :param source: first and last-plus-one addresses of the memory that will be read.
    :param stable_source: see `CudaBatchedCopy`.
    :param driver: the CUDA driver library, by default the system's.
    """
    if isinstance(device.runtime, EmulatedDevice):
        return EmulatedBatchedCopy(device.runtime)
    if not device.is_cuda:
        return NoBatchedCopy(f"{device.name} is no CUDA device")
    if not h2d_stream.cuda_stream:
        return NoBatchedCopy("the h2d stream is the default stream, which takes no batches: pass one of your own")
    driver = CudaDriver() if driver is None else driver
    function = driver.batch_function()
    if function is None:
        return NoBatchedCopy(f"the driver supports CUDA {driver.version} and batches need 12.8")
    driver.use_primary_context(device.index)
    borders: set[int] = set()
    for start, end in source:
        inside = driver.registration_borders(start, end)
        if inside is None:
            return NoBatchedCopy("a host pool is not page-locked")
        borders.update(inside)
    return CudaBatchedCopy(
        driver,
        function,
        lambda: device.current_stream().cuda_stream,  # type: ignore[attr-defined] # torch's streams have it
        stable_source=stable_source,
        borders=np.array(sorted(borders), dtype=np.int64),
    )


class EmulatedBatchedCopy:
    """A batch is one operation of the emulated device."""

    keeps_arrays = True

    def __init__(self, runtime: EmulatedDevice) -> None:
        self._runtime = runtime
        self.name = "emulated"
        if native.module is None:
            self.name = f"emulated with numpy, because the native part is missing: {native.missing_because}"

    def enqueue(self, batch: CopyBatch) -> None:
        self._runtime.enqueue_copies(batch)


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`; the hints at a location are for managed memory and stay empty."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaBatchedCopy:
    """A batch is one call of `cuMemcpyBatchAsync`, on the arrays as they are.

    The driver reads the arrays during the call, and the copies of a batch are made in any order.

    :param driver: the driver library.
    :param function: the call, as the driver has it.
    :param current_stream: the handle of the calling thread's current stream; never the default stream's, which the call
        does not take.
    :param stable_source: whether no work of the device that is still to come writes what is read; the driver may then
        read it at any time ("any"), else when the stream gets there ("stream").
    :param borders: addresses, ascending, where one registration of host memory ends and the next begins: a copy that
        would read across one is made in parts, as the call must not (it is one range of memory that it looks up).

    Attributes:
        driver: the driver library.
    """

    name = "cuMemcpyBatchAsync"
    keeps_arrays = False

    def __init__(
        self,
        driver: CudaDriver,
        function: BatchFunction,
        current_stream: Callable[[], int],
        *,
        stable_source: bool,
        borders: NDArray[np.int64],
    ) -> None:
        self.driver = driver
        self._batch_function = function
        self._function = function.call
        self._stable_source = stable_source
        self._current_stream = current_stream
        self._borders = borders
        self._attributes = _Attributes(source_order=ORDER_ANY if stable_source else ORDER_STREAM)
        self._attributes_at = ctypes.addressof(self._attributes)
        self._applies_from = ctypes.c_size_t(0)  # the one set of attributes is that of every copy
        self._applies_from_at = ctypes.addressof(self._applies_from)
        self._failure = ctypes.c_size_t()
        self._failure_at = (ctypes.addressof(self._failure),) if function.has_failure_index else ()

    def enqueue(self, batch: CopyBatch) -> None:
        origins: NDArray[np.int64] | None = None
        if len(self._borders):
            batch, origins = _cut(batch, self._borders)
        self._failure.value = _NO_INDEX
        status = self._function(
            batch.dst.ctypes.data,
            batch.src.ctypes.data,
            batch.sizes.ctypes.data,
            len(batch.sizes),
            self._attributes_at,
            self._applies_from_at,
            1,
            *self._failure_at,
            self._current_stream(),
        )
        if status:
            error = self.driver.error(self.name, status)
            index = self._failure.value if self._failure.value < len(batch.sizes) else None
            raise BatchError(str(error), index if index is None or origins is None else int(origins[index])) from error

    def plane_device(self, h2d_stream: Any, index_stream: Any) -> Any:
        """The device, as a native data plane calls it: it makes the same batches, on `h2d_stream`.

        :param index_stream: the stream that device indices are read on.
        """
        return native.module.cuda_plane_device(
            self.driver.plane_functions() | {self.name: self._batch_function.address},
            h2d_stream.cuda_stream,
            index_stream.cuda_stream,
            self._batch_function.has_failure_index,
            self._stable_source,
            self._borders,
        )


def _cut(batch: CopyBatch, borders: NDArray[np.int64]) -> tuple[CopyBatch, NDArray[np.int64] | None]:
    """Cut copies whose source goes across a border; also which copy each part is of, None if none had to be cut."""
    first = np.searchsorted(borders, batch.src, side="right")
    crossed = np.searchsorted(borders, batch.src + batch.sizes, side="left") - first
    if not crossed.any():
        return batch, None
    parts = crossed + 1
    origins = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(origins)) - np.repeat(np.cumsum(parts) - parts, parts)
    src, ends = batch.src[origins], (batch.src + batch.sizes)[origins]
    border = first[origins] + part  # the first border behind the start of each part
    starts = np.where(part == 0, src, borders[border - 1])
    ends = np.where(part == crossed[origins], ends, borders[np.minimum(border, len(borders) - 1)])
    cut = batch._replace(dst=batch.dst[origins] + starts - src, src=starts, sizes=ends - starts)
    return cut, origins

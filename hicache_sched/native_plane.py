"""The native data plane, as Python sees it: which bursts it gets, what it is told of them, what its errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hicache_sched import native
from hicache_sched.burst import Burst
from hicache_sched.copy.backend import BurstBackend
from hicache_sched.copy.merge import MergedOps
from hicache_sched.copy.planned import PlannedBackend
from hicache_sched.copy.pooled import PooledBackend
from hicache_sched.copy.submit import refused
from hicache_sched.device.batched_copy import CudaBatchedCopy, NoBatchedCopy
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.cuda_driver import CudaDriver
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.device.runtime import Stream
from hicache_sched.errors import InvalidLoadError, SchedulerClosedError
from hicache_sched.load_op import LoadOp


class NoNativePlane(NamedTuple):
    """There is none for a device and a backend.

    Attributes:
        reason: why, for logs.
    """

    reason: str


class _Status(NamedTuple):
    """How a native call went wrong."""

    kind: str
    call: str
    code: int
    refusal: BaseException | None
    copy: int | None


class NativePlane:
    """A native data plane, its bursts, and what its errors mean.

    :param native_plane: the native object.
    :param device: where it transfers.
    :param backend: whose bursts it submits; None where Python does that, too.
    :param h2d_stream: where it submits.
    :param driver: the driver that it calls, if it calls one itself.
    """

    def __init__(
        self,
        native_plane: Any,
        device: DeviceBinding,
        backend: PooledBackend | PlannedBackend | None,
        h2d_stream: Stream,
        driver: CudaDriver | None = None,
    ) -> None:
        self.native = native_plane
        self._device = device
        self._backend = backend
        self._h2d_stream = h2d_stream
        self._driver = driver
        self._bursts: dict[int, Burst] = {}
        self._pool_numbers: dict[str, int] | None = None
        if isinstance(backend, PooledBackend):
            self._pool_numbers = {name: number for number, name in enumerate(backend.pool_names)}

    def new_progress(self, keeps_times: bool) -> Any:
        """The native half of a burst."""
        return self.native.new_burst(keeps_times)

    def new_indices(self) -> NativeIndices | None:
        """What it reads the indices of a burst from; None where it plans none."""
        return None if self._pool_numbers is None else NativeIndices(self._device, self._pool_numbers)

    def hand_over(self, burst: Burst) -> None:
        """Queue a burst, which has its events if it has not failed; on the caller's thread, never blocking."""
        self._bursts[burst.id] = burst
        self.native.hand_over(burst.progress, burst.id)

    def burst(self, burst_id: int) -> Burst | None:
        """One that was handed over; None from when its last report was popped."""
        return self._bursts.get(burst_id)

    def pop_report(self, burst_id: int, *, is_last: bool) -> None:
        """
        :param is_last: of that burst.
        """
        if is_last:
            self._bursts.pop(burst_id, None)
        self.native.pop_report(burst_id)

    def set_up(self, burst: Burst) -> None:
        """Tell the native half of a burst what it needs to know."""
        indices, events = burst.queue.indices, burst.events
        start, fence = burst.start_event, burst.fence_event
        assert events is not None
        assert start is not None
        burst.progress.set_up(
            (burst.queue.ops, indices),
            self._device.handle_of(start, self._h2d_stream),
            0 if fence is None else self._device.handle_of(fence, self._h2d_stream),
            events.handles,
            indices.native if isinstance(indices, NativeIndices) and indices.holds_all_of(burst.queue.ops) else None,
        )

    def execute(self, burst: Burst, prepared: Any) -> bool:
        """Submit a burst that Python has planned; see `PlanExecutor`."""
        plan = None if self._backend is None else self._backend.plan_of(prepared)
        if plan is None:
            return False
        burst.progress.set_plan(
            self.native,
            plan.src_offsets,
            plan.dst_offsets,
            plan.sizes,
            plan.plane_ends,
            plan.src_base.ravel(),
            plan.dst_base.ravel(),
        )
        status = self.native.submit_layers(burst.progress)
        if status is not None:
            raise self.error(burst, status)
        return True

    def error(self, burst: Burst, status: tuple[Any, ...]) -> BaseException:
        """What the Python plane would have raised."""
        kind, call, _, _, copy = _Status(*status)
        if kind == "invalid":
            return self._why_invalid(burst)
        if kind == "given up":
            assert burst.error is not None, "a burst that has begun is only given up when it fails"
            return burst.error
        if kind == "stopped":
            return SchedulerClosedError("the process is ending")
        error = self.device_error(status)
        if kind == "driver" and call == CudaBatchedCopy.name:
            return self._batch_error(burst, copy, error)
        return error

    def device_error(self, status: tuple[Any, ...]) -> BaseException:
        """What the device says of a call that it did not make."""
        kind, call, code, refusal, _ = _Status(*status)
        if refusal is not None:
            return refusal
        if kind == "driver":
            assert self._driver is not None
            return self._driver.error(call, code)
        try:
            self._h2d_stream.query()
        except Exception as exc:
            return exc
        return RuntimeError("the device failed a call, and then did not")

    @property
    def doorbell_fd(self) -> int:
        """What is readable once a layer has got where somebody waits for it."""
        number: int = self.native.doorbell_fd
        return number

    def hear_doorbell(self) -> None:
        """Those layers are going to be looked for."""
        self.native.hear_doorbell()

    @property
    def alarm_fd(self) -> int:
        """What is readable once a burst that was handed over has not ended for a while."""
        number: int = self.native.alarm_fd
        return number

    def hear_alarm(self) -> int:
        """The id of the last burst that it has gone off for, 0 for none; they are going to be looked at."""
        burst_id: int = self.native.hear_alarm()
        return burst_id

    def _batch_error(self, burst: Burst, copy: int | None, cause: BaseException) -> BaseException:
        """About the layer that is not enqueued."""
        assert self._backend is not None
        plan = self._backend.plan_of(burst.prepared)
        if plan is None:
            assert isinstance(self._backend, PooledBackend), "who else does not plan here"
            plan = self._backend.planner.rebuild(burst.progress.plan())
        error = refused(plan, burst.enqueued, copy, self._backend.pool_names, cause)
        error.__cause__ = cause
        return error

    def _why_invalid(self, burst: Burst) -> BaseException:
        """The words of the planner in Python, about the same indices."""
        assert isinstance(self._backend, PooledBackend), "who else does not plan here"
        names = self._backend.pool_names
        merged: dict[str, MergedOps] = {}
        for number, *arrays in burst.progress.read_indices():
            ends, host, device = (np.frombuffer(array, dtype=np.int64) for array in arrays)
            merged[names[number]] = MergedOps(_node_ids(burst, number, names[number]), ends, host, device)
        try:
            self._backend.planner.plan(merged)
        except InvalidLoadError as exc:
            return exc
        return InvalidLoadError("the burst's indices were refused, for no reason that can be found")


def _node_ids(burst: Burst, number: int, name: str) -> tuple[int, ...]:
    """Nodes whose ops move something in a pool, in order."""
    ops = burst.queue.ops
    if number == 0:
        return tuple(op.node_id for op in ops if op.num_tokens)
    return tuple(op.node_id for op in ops for transfer in op.pool_transfers if transfer.name == name)


class NativeIndices:
    """Where the indices of load ops are; an `IndexList`.

    Attributes:
        native: the native list.
        is_complete: whether the indices of every op that was added are in it.
    """

    __slots__ = ("_device", "_num_ops", "_numbers", "_storages", "is_complete", "native")

    def __init__(self, device: DeviceBinding, pool_numbers: Mapping[str, int]) -> None:
        """
        :param pool_numbers: of the pools, in the order of the backend's names.
        """
        self.native = native.module.Indices()
        self.is_complete = True
        self._num_ops = 0
        self._storages: list[torch.UntypedStorage] = []
        self._device = device
        self._numbers = pool_numbers

    def add(self, op: LoadOp) -> None:
        # Not complete meanwhile: Ctrl-C may end this in the middle.
        is_complete, self.is_complete = self.is_complete, False
        if op.num_tokens:
            is_complete &= self._add(0, op.host_indices, op.device_indices)
        for transfer in op.pool_transfers:
            is_complete &= self._add(self._numbers[transfer.name], transfer.host_indices, transfer.device_indices)
        self._num_ops += 1
        self.is_complete = is_complete

    def holds_all_of(self, ops: list[LoadOp]) -> bool:
        """Whether it has the indices of all of them: Ctrl-C may have come between an op and its indices."""
        return self.is_complete and self._num_ops == len(ops)

    def _add(self, pool: int, host: torch.Tensor, device: torch.Tensor) -> bool:
        """False where they are not plainly in memory."""
        src, dst = self._device.find(host), self._device.find(device)
        if src is None or dst is None:
            return False
        self._storages += (src.storage, dst.storage)  # the memory is read later, whatever becomes of the tensors
        self.native.add(pool, src.address, src.stride, src.on_device, dst.address, dst.stride, dst.held, host.shape[0])
        return True


def native_plane_for(
    device: DeviceBinding,
    backend: BurstBackend,
    h2d_stream: Any,
    index_stream: Any,
    max_layers: int,
    names: tuple[str, str],
    patience: float,
    *,
    plans: bool,
) -> NativePlane | NoNativePlane:
    """The native data plane for a backend that is bound, if there is one.

    :param max_layers: that may be in flight.
    :param names: of the threads that will live in it.
    :param patience: seconds after which its alarm goes off for a burst that has not ended.
    :param plans: whether it has to submit the copies of plans: without them Python submits.
    """
    if native.module is None:
        return NoNativePlane(f"the native part is missing: {native.missing_because}")
    served: PooledBackend | PlannedBackend | None = None
    # What a subclass does differently would not be done.
    if type(backend) is PooledBackend or (isinstance(backend, PlannedBackend) and backend.makes_batches):
        served = backend
    if served is None and (plans or device.is_cuda):
        return NoNativePlane(f"{type(backend).__name__} makes its copies in Python")
    driver = None
    if type(device.runtime) is EmulatedDevice:
        plane_device = device.runtime.plane_device(h2d_stream, index_stream, names)
    elif device.is_cuda and served is not None:
        batched_copy = served.batched_copy
        if isinstance(batched_copy, NoBatchedCopy):
            return NoNativePlane(f"copies are not made in batches: {batched_copy.reason}")
        assert isinstance(batched_copy, CudaBatchedCopy), "a bound backend on CUDA has one, or says why not"
        plane_device, driver = batched_copy.plane_device(h2d_stream, index_stream), batched_copy.driver
    else:
        runtime = type(device.runtime).__name__ if isinstance(device.runtime, EmulatedDevice) else device.name
        return NoNativePlane(f"{runtime} is not known to it")
    planner, dst_base, src_base = None, _NO_BASES, _NO_BASES
    if isinstance(served, PooledBackend):
        layout = served.planner.layout
        try:
            planner = native.module.Planner(layout.pairs, layout.planes)
        except ValueError as exc:
            return NoNativePlane(f"it does not plan such pools: {exc}")
        dst_base, src_base = layout.dst_base.ravel(), layout.src_base.ravel()
    plane = native.module.Plane(
        plane_device, planner, backend.num_layers, dst_base, src_base, backend, max_layers, patience
    )
    return NativePlane(plane, device, served, h2d_stream, driver)


_NO_BASES = np.empty(0, dtype=np.int64)


class NativeLayersInFlight:
    """`InFlight` of the native data plane, for what its Python half submits."""

    def __init__(self, plane: NativePlane) -> None:
        self._plane = plane

    def has_room_for(self, num_layers: int) -> bool:
        has_room: bool = self._plane.native.has_room_for(num_layers)
        return has_room

    def make_room(self) -> None:
        status = self._plane.native.make_room()
        if status is not None:
            raise self._plane.device_error(status)

    def add(self, burst: Burst, layer: int) -> None:
        self._plane.native.add_layer(burst.progress, layer)

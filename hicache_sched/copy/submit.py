"""Submitting a plan's copies, layer by layer: one submitter per kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_sched.copy.plan import CopyPlan
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.device.row_copy import RowCopy
from hicache_sched.device.runtime import Event
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.pools import PlaneGeometry, PoolPair

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_STAGING_BUFFERS = 2
"""One is gathered into while the other is on its way. More would only let the CPU run ahead of the link."""


class BurstCopies(Protocol):
    """The copies of one burst, on their way to the h2d stream."""

    def submit_layer(self, layer: int) -> None:
        """Put one layer's copies on the calling thread's current stream."""

    def release(self) -> None:
        """Let go of the burst's buffers; what was submitted has landed. Any thread."""


class Submitter(Protocol):
    """Submits the bursts of one pool pair; used by one thread at a time."""

    def begin(self, plan: CopyPlan) -> BurstCopies:
        """Take on a burst; makes no device call."""


def submitter_for(pair: PoolPair, device: DeviceBinding) -> Submitter:
    """The submitter for the device that `pair.device` is on.

    :raises HiCacheSchedError: the device pool is not on the scheduler's device.
    """
    where = pair.device.device
    if isinstance(device.runtime, EmulatedDevice):
        if where.type != "cpu":
            raise HiCacheSchedError(
                f"pool pair {pair.name!r}: the device pool is on {where} but the scheduler runs on an emulated "
                "device, whose memory is CPU memory; pass the runtime of that device to the scheduler"
            )
        return RowCopySubmitter(pair, device.runtime)
    if where.type == "cpu" or where.index not in (None, device.index):
        raise HiCacheSchedError(
            f"pool pair {pair.name!r}: the device pool is on {where} but the scheduler runs on {device.name}; "
            "allocate the pool there"
        )
    return StagedSubmitter(pair, device)


# -- the emulated device --------------------------------------------------------------------------------------


class RowCopySubmitter:
    """Submits to an emulated device: each layer is one operation that covers all planes."""

    def __init__(self, pair: PoolPair, runtime: EmulatedDevice) -> None:
        self.runtime = runtime
        self.layers: list[list[tuple[NDArray[Any], NDArray[Any]]]] = [
            [(dst.numpy(), src.numpy()) for dst, src in planes] for planes in _paired_layers(pair)
        ]

    def begin(self, plan: CopyPlan) -> RowCopies:
        return RowCopies(self, plan)


class RowCopies:
    """A burst on an emulated device."""

    def __init__(self, submitter: RowCopySubmitter, plan: CopyPlan) -> None:
        self._submitter = submitter
        self._dst_rows = plan.dst_selection
        self._src_rows = plan.src_selection

    def submit_layer(self, layer: int) -> None:
        dst_rows, src_rows = self._dst_rows, self._src_rows
        submitter = self._submitter
        submitter.runtime.enqueue_copies(
            [RowCopy(dst, dst_rows, src, src_rows) for dst, src in submitter.layers[layer]], engine="h2d"
        )

    def release(self) -> None:
        """Nothing to release: queued operations hold what they need."""


# -- torch devices --------------------------------------------------------------------------------------------


class StagedSubmitter:
    """Submits with plain torch calls, a few per layer and plane, however many rows there are.

    Host rows are gathered into pinned memory, moved in one copy, and scattered on the device. Where both sides
    are one run that needs neither, the run is copied as it is.

    :param pair: pools; the device pool may be on any torch device.
    :param device: whose events say when a staging buffer is free again.
    """

    def __init__(self, pair: PoolPair, device: DeviceBinding) -> None:
        self.device = device
        self.layers = _paired_layers(pair)
        self.where = pair.device.device
        self.pinned = self.where.type != "cpu"
        # The driver may stall the stream to stage pageable memory itself, so that goes through our buffers, too.
        self.readable_in_place = all(
            src.is_contiguous() and (not self.pinned or src.is_pinned()) for _, src in self.layers[0]
        )

    def begin(self, plan: CopyPlan) -> StagedCopies:
        return StagedCopies(self, plan)


class _Staging(NamedTuple):
    """One flat buffer and its parts, one [rows, units per row] per plane."""

    flat: torch.Tensor
    planes: list[torch.Tensor]


class StagedCopies:
    """A burst on a torch device.

    `submit_layer` may block: a staging buffer is used again only when its last copy has landed, so at most
    `_STAGING_BUFFERS` layers of a burst are in flight.
    """

    def __init__(self, submitter: StagedSubmitter, plan: CopyPlan) -> None:
        self._submitter = submitter
        self._plan = plan
        self._staging: list[_Staging] = []
        self._staging_landed: list[Event] = []
        self._next = 0
        self._scatter: _Scatter | None = None
        self._src_rows = torch.from_numpy(plan.src_rows)

    def submit_layer(self, layer: int) -> None:
        plan, submitter = self._plan, self._submitter
        planes = submitter.layers[layer]
        if plan.src_is_run and plan.dst_is_run and submitter.readable_in_place:
            for dst, src in planes:
                dst[plan.dst_selection].copy_(src[plan.src_selection], non_blocking=True)
            return

        staging, landed = self._free_staging(planes)
        for (_, src), staged in zip(planes, staging.planes, strict=True):
            if plan.src_is_run:
                staged.copy_(src[plan.src_selection])
            else:
                torch.index_select(src, 0, self._src_rows, out=staged)
        if plan.dst_is_run:
            for (dst, _), staged in zip(planes, staging.planes, strict=True):
                dst[plan.dst_selection].copy_(staged, non_blocking=True)
        else:
            if self._scatter is None:
                self._scatter = _Scatter(submitter, plan, staging)
            self._scatter.submit(planes, staging)
        landed.record()

    def release(self) -> None:
        self._staging.clear()
        self._staging_landed.clear()
        self._scatter = None

    def _free_staging(self, planes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[_Staging, Event]:
        """A buffer to gather into, and the event to record when its copy has been submitted."""
        if len(self._staging) < _STAGING_BUFFERS:
            num_rows = len(self._plan.src_rows)
            flat_units = num_rows * sum(src.shape[1] for _, src in planes)
            flat = torch.empty(flat_units, dtype=planes[0][1].dtype, pin_memory=self._submitter.pinned)
            self._staging.append(_split(flat, num_rows, planes))
            self._staging_landed.append(self._submitter.device.new_event())
            return self._staging[-1], self._staging_landed[-1]
        turn = self._next
        self._next = (turn + 1) % _STAGING_BUFFERS
        self._staging_landed[turn].synchronize()
        return self._staging[turn], self._staging_landed[turn]


class _Scatter:
    """A burst's buffer and row numbers on the device, made and used on the h2d stream only.

    Being on one stream they need no event: the row numbers arrive before the first layer scatters by them, and
    a layer fills the buffer after the one before has emptied it. Moving them on the index stream instead would
    take an event, and gain nothing for a few kilobytes.
    """

    def __init__(self, submitter: StagedSubmitter, plan: CopyPlan, staging: _Staging) -> None:
        # Copied through pinned memory: from pageable memory the driver may wait for the whole stream.
        self._rows_on_host = torch.empty(len(plan.dst_rows), dtype=torch.int64, pin_memory=submitter.pinned)
        self._rows_on_host.numpy()[:] = plan.dst_rows
        self._rows = torch.empty_like(self._rows_on_host, device=submitter.where)
        self._rows.copy_(self._rows_on_host, non_blocking=True)
        flat = torch.empty_like(staging.flat, device=submitter.where)
        self._staging = _split(flat, len(plan.dst_rows), submitter.layers[0])

    def submit(self, planes: Sequence[tuple[torch.Tensor, torch.Tensor]], staging: _Staging) -> None:
        self._staging.flat.copy_(staging.flat, non_blocking=True)
        for (dst, _), staged in zip(planes, self._staging.planes, strict=True):
            dst.index_copy_(0, self._rows, staged)


# -- views ----------------------------------------------------------------------------------------------------


def _paired_layers(pair: PoolPair) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each layer and plane the device's and the host's rows, [num_rows, units per row], in one unit."""
    host_rows, device_rows = pair.host_rows, pair.device_rows
    unit = _UNITS[gcd(8, *map(_alignment, (*host_rows, *device_rows)))]
    return [
        [
            (device.layers[layer].view(unit), host.layers[layer].view(unit))
            for host, device in zip(host_rows, device_rows, strict=True)
        ]
        for layer in range(pair.num_layers)
    ]


def _alignment(plane: PlaneGeometry) -> int:
    """Bytes that every row's address and length are a multiple of."""
    return gcd(plane.row_bytes, plane.row_stride, int(np.gcd.reduce(plane.base)))


def _split(flat: torch.Tensor, num_rows: int, planes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Staging:
    parts = flat.split([num_rows * src.shape[1] for _, src in planes])
    return _Staging(flat, [part.view(num_rows, -1) for part in parts])

"""Submitting with plain torch calls, where the device makes no batches."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from hicache_sched.copy.plan import CopyPlan, Int64s
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.runtime import Event
from hicache_sched.pools import PoolPair

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_LARGEST_UNIT = max(_UNITS)

_STAGING_BUFFERS = 2
"""One is gathered into while the other is on its way. More would only let the CPU run ahead of the link."""


class StagedSubmitter:
    """Submits a few torch calls per layer and plane, however many copies there are.

    What is scattered on the host is gathered into pinned memory and moved in one piece, and what is scattered on the
    device is scattered there. Where both sides are one piece that needs neither, it is copied as it is.

    :param pairs: pools; the device pools may be on any torch device.
    :param local_layers: for each pair and transfer layer its local layer, None for one that the pair does not have.
    :param device: whose events say when a staging buffer is free again.
    :param reason: why copies are not made in batches, for logs.
    """

    def __init__(
        self,
        pairs: Sequence[PoolPair],
        local_layers: Sequence[Sequence[int | None]],
        device: DeviceBinding,
        reason: str,
    ) -> None:
        self.name = f"torch, because {reason}"
        self.pairs = pairs
        self.local_layers = local_layers
        self.device = device

    def begin(self, plan: CopyPlan) -> StagedCopies:
        return StagedCopies(self, plan)


class _Staging(NamedTuple):
    """A buffer for the copies of a layer, one behind the other, and the event behind its last use."""

    flat: torch.Tensor
    landed: Event


class StagedCopies:
    """A burst on a torch device.

    `submit_layer` may block: a staging buffer is used again only when its last copy has landed, so at most
    `_STAGING_BUFFERS` layers of a burst are in flight.
    """

    def __init__(self, submitter: StagedSubmitter, plan: CopyPlan) -> None:
        self._plan = plan
        self._device = submitter.device
        firsts = np.append(0, plan.plane_ends)
        # Planes start at multiples of the largest unit that torch may view them in.
        ends = np.cumsum(-(-plan.plane_bytes // _LARGEST_UNIT) * _LARGEST_UNIT)
        starts = np.append(0, ends[:-1])
        in_plan = np.cumsum(plan.sizes) - plan.sizes
        shift = starts - (np.cumsum(plan.plane_bytes) - plan.plane_bytes)
        self._staged_offsets = in_plan + np.repeat(shift, np.diff(firsts))
        self._planes: list[_Plane] = []
        for number, pool in enumerate(plan.pools.tolist()):
            pair = submitter.pairs[pool]
            copies = slice(int(firsts[number]), int(firsts[number + 1]))
            self._planes.append(
                _Plane(
                    plan,
                    pair,
                    plane=number - int(np.searchsorted(plan.pools, pool)),
                    local_layers=submitter.local_layers[pool],
                    copies=copies,
                    staged=slice(int(starts[number]), int(starts[number] + plan.plane_bytes[number])),
                )
            )
        self._num_bytes = int(ends[-1])
        self._where = self._planes[0].where
        self._pinned = self._where.type != "cpu"
        self._buffers: list[_Staging] = []
        self._next = 0
        self._on_device: torch.Tensor | None = None

    def submit_layer(self, layer: int) -> None:
        planes = [plane for plane in self._planes if plane.local_layers[layer] is not None]
        staged = [plane for plane in planes if not plane.submit_in_place(layer)]
        if not staged:
            return
        buffer = self._free_buffer()
        address = buffer.flat.data_ptr()
        for plane in staged:
            plane.gather(layer, address + self._staged_offsets[plane.copies])
        for plane in staged:
            if plane.is_one_piece:
                plane.destination(layer).copy_(buffer.flat[plane.staged], non_blocking=True)
                continue
            if self._on_device is None:
                # Made and used on the h2d stream only: each layer fills it after the one before has emptied it.
                self._on_device = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._where)
            part = self._on_device[plane.staged]
            part.copy_(buffer.flat[plane.staged], non_blocking=True)
            plane.scatter(layer, part)
        buffer.landed.record()

    def release(self) -> None:
        self._buffers.clear()
        self._on_device = None
        self._planes.clear()

    def _free_buffer(self) -> _Staging:
        """A buffer to gather into; its event is to be recorded behind what is made of it."""
        if len(self._buffers) < _STAGING_BUFFERS:
            flat = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers.append(_Staging(flat, self._device.new_event()))
            return self._buffers[-1]
        turn = self._next
        self._next = (turn + 1) % _STAGING_BUFFERS
        self._buffers[turn].landed.synchronize()
        return self._buffers[turn]


class _Plane:
    """One plane of a burst.

    Attributes:
        local_layers: the pool's layer of each transfer layer.
        copies: which of the plan's copies are the plane's.
        staged: where its bytes are in a staging buffer.
        is_one_piece: whether it is one copy.
        where: the device that its destination is on.
    """

    def __init__(
        self,
        plan: CopyPlan,
        pair: PoolPair,
        *,
        plane: int,
        local_layers: Sequence[int | None],
        copies: slice,
        staged: slice,
    ) -> None:
        self.local_layers = local_layers
        self.copies = copies
        self.staged = staged
        self.is_one_piece = copies.stop - copies.start == 1
        self._host, self._device = pair.host.geometry[plane], pair.device.geometry[plane]
        self.where = pair.device.device
        self._src_offsets, self._dst_offsets = plan.src_offsets[copies], plan.dst_offsets[copies]
        self._sizes = plan.sizes[copies]
        self._scatter: _Scatter | None = None

    def submit_in_place(self, layer: int) -> bool:
        """Copy the layer as it is, if it is one piece and can be read by the device."""
        if not self.is_one_piece:
            return False
        source = _bytes_at(self._host.layers[self._local(layer)], int(self._src_offsets[0]), int(self._sizes[0]))
        # The driver may stall the stream to stage pageable memory itself, so that goes through our buffers.
        if self.where.type != "cpu" and not source.is_pinned():
            return False
        self.destination(layer).copy_(source, non_blocking=True)
        return True

    def gather(self, layer: int, addresses: Int64s) -> None:
        """Copy the layer's bytes to `addresses`, one for each copy; on the calling thread."""
        base = self._host.base[self._local(layer)]
        CopyBatch(addresses, base + self._src_offsets, self._sizes, int(self._sizes.sum()), owner=self).execute()

    def destination(self, layer: int) -> torch.Tensor:
        """Where a plane that is one piece goes."""
        return _bytes_at(self._device.layers[self._local(layer)], int(self._dst_offsets[0]), int(self._sizes[0]))

    def scatter(self, layer: int, staged: torch.Tensor) -> None:
        """Bring the layer's bytes from `staged`, on the device, to where they go."""
        if self._scatter is None:
            self._scatter = _Scatter(self._dst_offsets, self._sizes, self._device.layers, self.where)
        self._scatter.submit(self._device.layers[self._local(layer)], self._device.extent, staged)

    def _local(self, layer: int) -> int:
        local = self.local_layers[layer]
        assert local is not None
        return local


class _Scatter:
    """A plane's destinations as rows that torch can index: equally long, at multiples of no less than their length."""

    def __init__(self, offsets: Int64s, sizes: Int64s, layers: Sequence[torch.Tensor], where: torch.device) -> None:
        row = int(np.gcd.reduce(sizes))
        stride = int(np.gcd.reduce(offsets))  # 0 for a single one at 0
        if stride < row or (sizes != row).any():
            row = stride = gcd(row, stride)
        parts = sizes // row
        part = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
        numbers = (np.repeat(offsets, parts) + part * row) // stride
        unit = gcd(
            _LARGEST_UNIT, row, stride, *(layer.storage_offset() for layer in layers)
        )  # as torch wants it to be viewed
        self._unit, self._row, self._stride = _UNITS[unit], row // unit, stride // unit
        # Copied through pinned memory: from pageable memory the driver may wait for the whole stream.
        self._on_host = torch.empty(len(numbers), dtype=torch.int64, pin_memory=where.type != "cpu")
        self._on_host.numpy()[:] = numbers
        self._numbers = torch.empty_like(self._on_host, device=where)
        self._numbers.copy_(self._on_host, non_blocking=True)

    def submit(self, layer: torch.Tensor, extent: int, staged: torch.Tensor) -> None:
        units = _bytes_at(layer, 0, extent // self._unit.itemsize * self._unit.itemsize).view(self._unit)
        num_rows = (len(units) - self._row) // self._stride + 1
        rows = units.as_strided((num_rows, self._row), (self._stride, 1))
        rows.index_copy_(0, self._numbers, staged.view(self._unit).view(-1, self._row))


def _bytes_at(rows: torch.Tensor, offset: int, num_bytes: int) -> torch.Tensor:
    """A stretch of the memory that `rows`, uint8, start at."""
    return rows.as_strided((num_bytes,), (1,), rows.storage_offset() + offset)

"""A plan's copies as addresses, layer by layer."""

from __future__ import annotations

from collections import deque

import numpy as np

from hicache_sched.copy.plan import CopyPlan, Int64s
from hicache_sched.device.copy_batch import CopyBatch

_COPIES_AT_ONCE = 1 << 17
"""Addresses worked out together, for as many layers as that makes: a few returns from numpy instead of some per layer,
each of which may have to wait for the GIL, within a megabyte of memory a side."""

_MAX_FREE = 16


class AddressBuffers:
    """Memory for addresses that is used again: fresh memory takes longer to be mapped than to be filled.

    Given by one thread, taken back on any.
    """

    def __init__(self) -> None:
        self._free: deque[Int64s] = deque(maxlen=_MAX_FREE)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_addresses: int) -> Int64s:
        if num_addresses > _COPIES_AT_ONCE:
            return np.empty(num_addresses, dtype=np.int64)
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(_COPIES_AT_ONCE, dtype=np.int64)

    def give_back(self, buffer: Int64s) -> None:
        """Nothing may refer to it any more."""
        if len(buffer) == _COPIES_AT_ONCE:
            self._free.append(buffer)


class LayerBatches:
    """A plan's layers as batches; for layers in ascending order each is worked out once.

    :param owner: whatever keeps the memory of the plan's pools alive.
    :param keep: whether batches are read after the next layer has been asked for.
    """

    def __init__(self, plan: CopyPlan, owner: object, buffers: AddressBuffers, *, keep: bool) -> None:
        self._plan = plan
        self._owner = owner
        self._buffers = buffers
        self._keep = keep
        self._used: list[Int64s] = []
        self._copies_per_plane = np.diff(plan.plane_ends, prepend=0)
        self._has_planes = plan.dst_base != 0
        self._bytes_per_layer = (self._has_planes * plan.plane_bytes).sum(axis=1).tolist()
        self._is_complete = self._has_planes.all(axis=1).tolist()
        self._layers_at_once = max(1, _COPIES_AT_ONCE // max(1, len(plan.sizes)))
        self._first = 0
        self._dst = self._src = np.empty((0, 0), dtype=np.int64)

    def layer(self, layer: int) -> CopyBatch | None:
        """The copies of a layer; None where there is nothing to copy."""
        if not len(self._plan.sizes):
            return None
        row = layer - self._first
        if not 0 <= row < len(self._dst):
            self._work_out(layer)
            row = 0
        nbytes = self._bytes_per_layer[layer]
        batch = CopyBatch(self._dst[row], self._src[row], self._plan.sizes, nbytes, self._owner)
        if self._is_complete[layer]:
            return batch
        kept = self.positions(layer)
        if not len(kept):
            return None
        return batch._replace(dst=batch.dst[kept], src=batch.src[kept], sizes=batch.sizes[kept])

    def positions(self, layer: int) -> Int64s:
        """Which copies of the plan a layer's batch is made of."""
        return np.flatnonzero(np.repeat(self._has_planes[layer], self._copies_per_plane))

    def release(self) -> None:
        """Give the memory of all batches back; nobody reads them any more."""
        self._dst = self._src = np.empty((0, 0), dtype=np.int64)
        while self._used:
            self._buffers.give_back(self._used.pop())

    def _work_out(self, first: int) -> None:
        if not self._keep:
            self.release()
        plan, layers = self._plan, slice(first, first + self._layers_at_once)
        shape = len(plan.dst_base[layers]), len(plan.sizes)
        self._dst, self._src = self._array(shape), self._array(shape)
        start = 0
        for plane, end in enumerate(plan.plane_ends.tolist()):
            copies = slice(start, end)
            np.add(plan.dst_base[layers, plane, None], plan.dst_offsets[copies], out=self._dst[:, copies])
            np.add(plan.src_base[layers, plane, None], plan.src_offsets[copies], out=self._src[:, copies])
            start = end
        self._first = first

    def _array(self, shape: tuple[int, int]) -> Int64s:
        buffer = self._buffers.take(shape[0] * shape[1])
        self._used.append(buffer)
        return buffer[: shape[0] * shape[1]].reshape(shape)

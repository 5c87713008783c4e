"""A native data plane on the driver stand-in, and bursts for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from hicache_sched import native
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.pooled import PooledBackend
from hicache_sched.device.batched_copy import CudaBatchedCopy, batched_copy_for
from hicache_sched.load_op import LoadOp, PoolTransfer
from hicache_sched.native_plane import NativePlane
from hicache_sched.pools import PoolPair
from tests.driver.stand_in import INDEX_STREAM, STREAM, StandIn, Stream, cuda_like

Status = tuple[str, str, int, BaseException | None, int | None]


class Events(NamedTuple):
    """Handles of a burst's events."""

    start: int
    fence: int
    all: Any

    @property
    def layers(self) -> list[int]:
        return [int(event) for event in self.all[1:-1]]


class Where(NamedTuple):
    """Indices as an address.

    Attributes:
        stride: in values.
    """

    address: int
    stride: int
    on_device: bool


def place(indices: torch.Tensor, *, on_device: bool) -> Where:
    return Where(indices.data_ptr(), indices.stride(0), on_device)


def host_ranges(pairs: Sequence[PoolPair]) -> list[tuple[int, int]]:
    return [
        (base, base + plane.extent) for pair in pairs for plane in pair.host.geometry for base in plane.base.tolist()
    ]


def batched(driver: StandIn, pairs: Sequence[PoolPair], *, stable_source: bool = False) -> CudaBatchedCopy:
    copy = batched_copy_for(cuda_like(), Stream(), host_ranges(pairs), stable_source=stable_source, driver=driver)
    assert isinstance(copy, CudaBatchedCopy)
    return copy


class _Backend(PooledBackend):
    """What a native plane asks of a backend whose burst has failed."""

    def __init__(self, planner: BurstPlanner, names: tuple[str, ...]) -> None:
        self._planner, self._names = planner, names


class Sut:
    """A plane that moves bursts of some pairs; whatever waits for the stand-in does so without the GIL.

    :param local_layers: for each pair and transfer layer its local layer; None for the same as the transfer layer.
    """

    def __init__(
        self,
        driver: StandIn,
        pairs: Sequence[PoolPair],
        local_layers: Sequence[Sequence[int | None]] | None = None,
        *,
        stable_source: bool = False,
        max_layers: int = 1000,
    ) -> None:
        if local_layers is None:
            num_layers = max(pair.num_layers for pair in pairs)
            local_layers = [[n if n < pair.num_layers else None for n in range(num_layers)] for pair in pairs]
        self.num_layers = len(local_layers[0])
        self.driver = driver
        self.planner = BurstPlanner(pairs, local_layers)
        self._numbers = {pair.name: number for number, pair in enumerate(pairs)}
        layout = self.planner.layout
        device = batched(driver, pairs, stable_source=stable_source).plane_device(Stream(), Stream(INDEX_STREAM))
        self.plane = native.module.Plane(
            device,
            native.module.Planner(layout.pairs, layout.planes),
            self.num_layers,
            layout.dst_base.ravel(),
            layout.src_base.ravel(),
            pairs,
            max_layers,
            1000.0,
        )
        self._num_bursts = 0
        self._kept: list[Any] = []
        driver.forget_calls()

    def hand_over(self, ops: Sequence[LoadOp], *, on_device: bool = True, fence: bool = False) -> tuple[Any, Events]:
        """Queue the burst of some ops, whose device indices are in device memory or not."""
        indices = native.module.Indices()
        for op in ops:
            parts: list[tuple[int, LoadOp | PoolTransfer]] = [(0, op)]
            parts += [(self._numbers[transfer.name], transfer) for transfer in op.pool_transfers]
            for pool, part in parts:
                if part.num_tokens:
                    where = place(part.device_indices, on_device=on_device)
                    self.add(indices, pool, place(part.host_indices, on_device=False), where, part.num_tokens)
        self._kept.append(ops)
        return self.hand_over_indices(indices, fence=fence)

    @staticmethod
    def add(indices: Any, pool: int, host: Where, device: Where, num_tokens: int) -> None:
        indices.add(pool, *host, *device, num_tokens)

    def hand_over_indices(self, indices: Any, *, fence: bool = False) -> tuple[Any, Events]:
        made = [self.driver.new_event() for _ in range(self.num_layers + 4)]
        events = Events(made[0], made[1] if fence else 0, np.array(made[2:], dtype=np.int64))
        for event in made[:2]:
            self.driver.record(event, STREAM)
        self._kept.append(events)  # the burst has their addresses only
        burst = self.plane.new_burst(False)
        burst.set_up(self._kept, events.start, events.fence, events.all, indices)
        self._num_bursts += 1
        self.plane.hand_over(burst, self._num_bursts)
        self.driver.forget_calls()
        return burst, events

    def submit(self) -> Status | None:
        """Submit what is queued; how that failed, after which the burst counts as submitted."""
        self.plane.stop()
        stop = self.plane.submit()
        if stop is None:
            return None
        why, _, status = stop
        assert why == "failed"
        return cast(Status, status)

    def load(self, ops: Sequence[LoadOp], *, on_device: bool = True, fence: bool = False) -> Status | None:
        """Submit the burst of some ops."""
        burst, _ = self.hand_over(ops, on_device=on_device, fence=fence)
        status = self.submit()
        burst.mark_submitted()
        return status

    def error(self, burst: Any, status: Status, names: Sequence[str]) -> BaseException:
        """What Python makes of a status."""
        python: Any = SimpleNamespace(progress=burst, enqueued=burst.enqueued, prepared=None)
        return self.python_plane(names).error(python, status)

    def python_plane(self, names: Sequence[str]) -> NativePlane:
        """Its Python half, of a backend with these pools."""
        backend = _Backend(self.planner, tuple(names))
        return NativePlane(self.plane, cuda_like(), backend, cast(Any, None), self.driver)

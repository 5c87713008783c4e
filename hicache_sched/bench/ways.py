"""Ways to load a burst, which benchmarks set against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from hicache_sched import BurstBackend, LoadOp, SchedulerConfig, TransferScheduler


class Burst(Protocol):
    """A burst on its way, however it was handed out; a `LoadHandle` is one."""

    def layer_landed(self, layer: int) -> bool: ...

    def done(self) -> bool:
        """Whether all of it has landed."""

    def wait_layer(self, layer: int) -> None:
        """Order the calling thread's current stream behind a layer; where that runs inline, block until it landed."""


HandOut = Callable[[Sequence[LoadOp]], Burst]
"""Hands load ops out as a burst."""

Way = Callable[[Any, BurstBackend], AbstractContextManager[HandOut]]
"""Made for a runtime and a backend."""


def scheduled(config: SchedulerConfig) -> Way:
    """By a scheduler of this package."""

    @contextmanager
    def way(runtime: Any, backend: BurstBackend) -> Iterator[HandOut]:
        with TransferScheduler(backend, runtime=runtime, config=config) as scheduler:

            def hand_out(ops: Sequence[LoadOp]) -> Burst:
                for op in ops:
                    scheduler.load(op)
                handle = scheduler.start_loading_sync()
                assert handle is not None
                scheduler.pop_acks()
                return handle

            yield hand_out

    return way

"""A backend that takes as long to describe a layer's copies as an engine does that makes one for each page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hicache_sched import LoadOp
from hicache_sched.copy import PooledBackend
from hicache_sched.pools import PoolPair


class SlowBackend:
    """As the built-in backend, but that describing a layer's copies keeps a core, and the GIL, busy."""

    def __init__(self, pairs: Sequence[PoolPair], seconds: float) -> None:
        """
        :param seconds: of CPU time for each layer of all pools.
        """
        self._pooled = PooledBackend(pairs)
        self.num_layers, self.pool_names = self._pooled.num_layers, self._pooled.pool_names
        self._seconds = seconds

    def bind(self, scheduler: Any) -> None:
        self._pooled.bind(scheduler)

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        return self._pooled.prepare(ops)

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        keep_busy(self._seconds)
        self._pooled.enqueue_layer(prepared, layer)

    def finish(self, prepared: Any) -> None:
        self._pooled.finish(prepared)


def keep_busy(seconds: float) -> None:
    """Use so much CPU time, in Python, with the GIL."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

"""Reloads: bursts on their way back to the device, as the forwards that need them see them."""

from __future__ import annotations

import asyncio
from typing import Any

from hicache_sched import LoadHandle


class Reload:
    """One burst, with a stopwatch on the waits for its layers.

    :param handle: the burst.
    :param runtime: whose events the stopwatch is made of.

    Attributes:
        settled: done when the burst has ended and its nodes say what is in them.
    """

    settled: asyncio.Task[None]

    def __init__(self, handle: LoadHandle, runtime: Any) -> None:
        self.handle = handle
        self._runtime = runtime
        self._waits: list[tuple[Any, Any]] = []

    def wait_layer(self, layer: int) -> None:
        """`LoadHandle.wait_layer`, between two events on the model's stream."""
        before, after = (self._runtime.Event(enable_timing=True) for _ in range(2))
        before.record()
        self.handle.wait_layer(layer)
        after.record()
        self._waits.append((before, after))

    def take_waited_ms(self) -> float:
        """How long the model's stream has stood still for layers since the last call; after a synchronisation."""
        waits, self._waits = self._waits, []
        waited_ms: float = sum(before.elapsed_time(after) for before, after in waits)
        return waited_ms

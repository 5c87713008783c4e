"""What is in flight on the h2d stream, kept within what the stream can hold."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from hicache_sched.burst import Burst

OPS_PER_BURST = 4
"""The waits for start and fence event, and the records of the ack's two events."""


def max_layers_in_flight(queue_ops: int, num_slots: int, ops_per_layer: int) -> int:
    """
    :param queue_ops: operations that the stream holds.
    :param num_slots: bursts that may be in flight.
    :param ops_per_layer: operations that the backend submits for a layer.
    """
    # Each layer's event is one more.
    return max(1, (queue_ops - OPS_PER_BURST * num_slots) // (ops_per_layer + 1))


class InFlight(Protocol):
    """Layers that are on the h2d stream and have not landed; on the data plane's thread.

    A stream's queue is finite, and a driver that waits for room in it may keep a lock that every other thread's device
    calls need, the engine scheduler's among them. So the data plane waits itself, holding nothing.
    """

    def has_room_for(self, num_layers: int) -> bool:
        """Whether that many may be submitted without waiting."""

    def make_room(self) -> None:
        """Block until one more layer may be submitted.

        :raises Exception: what the device raises when it is asked to wait.
        """

    def add(self, burst: Burst, layer: int) -> None:
        """A layer has been submitted."""


class LayersInFlight:
    """`InFlight` of the Python data plane.

    :param max_layers: that may be in flight.
    """

    def __init__(self, max_layers: int) -> None:
        self._max_layers = max_layers
        self._layers: deque[tuple[Burst, int]] = deque()

    def has_room_for(self, num_layers: int) -> bool:
        self._forget_landed()
        return len(self._layers) + num_layers <= self._max_layers

    def make_room(self) -> None:
        """It waits for half of what is in flight, so that the next ones need not each wait for one."""
        if self.has_room_for(1):
            return
        layers = self._layers
        half = max(1, self._max_layers // 2)
        burst, layer = layers[half - 1]
        if burst.landed <= layer and (events := burst.events) is not None:
            # Its events are not recorded again meanwhile: this thread would do it. Where this raises, all may still
            # be in flight.
            events.layers[layer].synchronize()
        for _ in range(half):
            layers.popleft()

    def add(self, burst: Burst, layer: int) -> None:
        self._layers.append((burst, layer))

    def _forget_landed(self) -> None:
        while self._layers and _has_landed(*self._layers[0]):
            self._layers.popleft()


def _has_landed(burst: Burst, layer: int) -> bool:
    return burst.landed > layer or burst.ended

"""Event sets: the per-layer device events of one burst."""

from __future__ import annotations

from collections import deque

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.runtime import Event


class EventSet:
    """Events of one burst, used again by a later one once nobody can still wait for them.

    Attributes:
        ack_start: timed; recorded on the h2d stream before the first copy.
        layers: recorded behind the copies of each layer.
        ack_finish: timed; recorded behind everything that was submitted, the finish event.
    """

    __slots__ = ("ack_finish", "ack_start", "layers")

    def __init__(self, device: DeviceBinding, num_layers: int) -> None:
        self.ack_start: Event = device.new_event(timed=True)
        self.layers: list[Event] = [device.new_event() for _ in range(num_layers)]
        self.ack_finish: Event = device.new_event(timed=True)


class EventSetPool:
    """Event sets that no burst uses at the moment; from any thread."""

    def __init__(self, device: DeviceBinding, num_layers: int) -> None:
        self._device = device
        self._num_layers = num_layers
        self._free: deque[EventSet] = deque()

    def take(self) -> EventSet:
        try:
            return self._free.popleft()
        except IndexError:
            return EventSet(self._device, self._num_layers)

    def give_back(self, events: EventSet) -> None:
        self._free.append(events)

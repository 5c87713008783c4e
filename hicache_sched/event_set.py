"""Event sets: the per-layer device events of one burst."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.runtime import Event, Stream


class EventSet:
    """Events of one burst, used again by a later one once nobody can still wait for them.

    :param stream: where they can be recorded for the first time; given where the data plane is native.

    Attributes:
        ack_start: timed; recorded on the h2d stream before the first copy.
        layers: recorded behind the copies of each layer.
        ack_finish: timed; recorded behind everything that was submitted, the finish event.
        handles: by which a native data plane knows all of them, in that order; None where it is not.
    """

    __slots__ = ("ack_finish", "ack_start", "handles", "layers")

    def __init__(self, device: DeviceBinding, num_layers: int, stream: Stream | None) -> None:
        self.ack_start: Event = device.new_event(timed=True)
        self.layers: list[Event] = [device.new_event() for _ in range(num_layers)]
        self.ack_finish: Event = device.new_event(timed=True)
        self.handles: NDArray[np.int64] | None = None
        if stream is not None:
            events = [self.ack_start, *self.layers, self.ack_finish]
            self.handles = np.array([device.handle_of(event, stream) for event in events], dtype=np.int64)


class EventSetPool:
    """Event sets that no burst uses at the moment; from any thread.

    :param stream: see `EventSet`.
    """

    def __init__(self, device: DeviceBinding, num_layers: int, stream: Stream | None = None) -> None:
        self._device = device
        self._num_layers = num_layers
        self._stream = stream
        self._free: deque[EventSet] = deque()

    def take(self) -> EventSet:
        try:
            return self._free.popleft()
        except IndexError:
            return self._new()

    def stock(self, count: int) -> None:
        """Have so many at hand, for takers that should not take the time to make any."""
        for _ in range(count - len(self._free)):
            self._free.append(self._new())

    def give_back(self, events: EventSet) -> None:
        self._free.append(events)

    def _new(self) -> EventSet:
        return EventSet(self._device, self._num_layers, self._stream)

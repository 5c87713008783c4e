"""What an engine would write itself: a FIFO queue, one thread, and a flag per layer.

It makes the same copies, by the same backend, behind the same events as a data plane in Python; what it lacks is all
that follows a failure, a full queue or a close.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hicache_sched import BurstBackend, LoadOp
from hicache_sched.bench.ways import HandOut
from hicache_sched.device.binding import DeviceBinding


class LoaderBurst:
    """A burst of the plain loader thread: for each layer a flag that says that its event has been recorded."""

    def __init__(self, runtime: Any, ops: Sequence[LoadOp], num_layers: int) -> None:
        self.ops, self.num_layers = ops, num_layers
        self.start = runtime.Event()
        self.start.record()
        self.events = [runtime.Event(blocking=True) for _ in range(num_layers)]
        self.flags = [threading.Event() for _ in range(num_layers)]
        self._runtime = runtime

    def layer_landed(self, layer: int) -> bool:
        return self.flags[layer].is_set() and self.events[layer].query()

    def done(self) -> bool:
        return self.layer_landed(self.num_layers - 1)

    def wait_layer(self, layer: int) -> None:
        """Order the calling thread's current stream behind a layer."""
        self.flags[layer].wait()
        self._runtime.current_stream().wait_event(self.events[layer])


class _Point:
    """What a backend is bound to, without a scheduler."""

    def __init__(self, runtime: Any) -> None:
        self.device, self.runtime = DeviceBinding(runtime), runtime
        self.h2d_stream, self.index_stream = runtime.Stream(), runtime.Stream()


@contextmanager
def plain_loader(runtime: Any, backend: BurstBackend) -> Iterator[HandOut]:
    """A way to load, with a loader thread while it lasts."""
    point = _Point(runtime)
    backend.bind(point)
    bursts: queue.SimpleQueue[LoaderBurst | None] = queue.SimpleQueue()

    def load() -> None:
        unfinished: deque[tuple[Any, Any]] = deque()
        while (burst := bursts.get()) is not None:
            while unfinished and unfinished[0][1].query():
                backend.finish(unfinished.popleft()[0])
            point.index_stream.wait_event(burst.start)
            with runtime.stream(point.index_stream):
                prepared = backend.prepare(burst.ops)
            with runtime.stream(point.h2d_stream):
                point.h2d_stream.wait_event(burst.start)
                for layer in range(burst.num_layers):
                    backend.enqueue_layer(prepared, layer)
                    burst.events[layer].record()
                    burst.flags[layer].set()
            unfinished.append((prepared, burst.events[-1]))

    def hand_out(ops: Sequence[LoadOp]) -> LoaderBurst:
        burst = LoaderBurst(runtime, ops, backend.num_layers)
        bursts.put(burst)
        return burst

    thread = threading.Thread(target=load, name="plain-loader")
    thread.start()
    try:
        yield hand_out
    finally:
        bursts.put(None)
        thread.join()

"""Waiters of every kind, to be parked on a burst and asked how it went for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import uvloop

from hicache_sched import LoadAck, LoadFailedError, LoadHandle
from hicache_sched.device import EmulatedDevice

WAIT = 20.0
"""Seconds after which something counts as hung."""


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do; its order with anything else is not what is tested."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.001)


class Loops:
    """Two event loops of different kinds, each on a thread of its own."""

    def __init__(self) -> None:
        self._loops: list[asyncio.AbstractEventLoop] = [asyncio.SelectorEventLoop(), uvloop.new_event_loop()]
        self._threads = [threading.Thread(target=loop.run_forever, daemon=True) for loop in self._loops]
        for thread in self._threads:
            thread.start()

    def run(self, make_coroutine: Callable[[], Any]) -> list[Future[Any]]:
        """Run one coroutine on each loop."""
        return [asyncio.run_coroutine_threadsafe(make_coroutine(), loop) for loop in self._loops]

    def close(self) -> None:
        for loop in self._loops:
            asyncio.run_coroutine_threadsafe(_cancel_all_tasks(), loop).result(WAIT)
            loop.call_soon_threadsafe(loop.stop)
        for thread, loop in zip(self._threads, self._loops, strict=True):
            thread.join(WAIT)
            loop.close()


async def _cancel_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_thread(fn: Callable[[], object]) -> Future[Any]:
    """Run `fn` on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return future


class Crowd:
    """Waiters of every kind on every layer of one burst, from threads and from two event loops.

    Attributes:
        ends: who waits for the end.
        iterations: who iterates over the layers; they give the layers they got and what was raised then.
        enqueued, layers, waits: who waits for a layer, by layer; `waits` are `wait_layer` on a plain thread, whose
            stream runs inline, and on a thread with a stream of its own.
    """

    def __init__(self, handle: LoadHandle, device: EmulatedDevice, loops: Loops) -> None:
        layers = range(handle.num_layers)
        self.ends = [*loops.run(partial(_end, handle)), in_thread(partial(handle.result, WAIT))]
        self.iterations = loops.run(partial(_iterate, handle))
        self.enqueued = {layer: loops.run(partial(handle.enqueued, layer)) for layer in layers}
        self.layers = {layer: loops.run(partial(handle.layer, layer)) for layer in layers}
        self.waits = {
            layer: [
                in_thread(partial(handle.wait_layer, layer, WAIT)),
                in_thread(partial(_wait_on_stream, handle, device, layer)),
            ]
            for layer in layers
        }

    @property
    def everybody(self) -> list[Future[Any]]:
        by_layer = [*self.enqueued.values(), *self.layers.values(), *self.waits.values()]
        return [*self.ends, *self.iterations, *(waiter for waiters in by_layer for waiter in waiters)]


def parked_crowd(handle: LoadHandle, device: EmulatedDevice, loops: Loops) -> Crowd:
    """A crowd all of whom already wait; the burst must not have been enqueued."""
    crowd = Crowd(handle, device, loops)
    eventually(lambda: _num_parked(handle) == len(crowd.everybody))
    return crowd


async def _end(handle: LoadHandle) -> LoadAck:
    return await handle


def _wait_on_stream(handle: LoadHandle, device: EmulatedDevice, layer: int) -> None:
    with device.stream(device.Stream()):
        handle.wait_layer(layer, WAIT)


async def _iterate(handle: LoadHandle) -> tuple[list[int], BaseException | None]:
    seen: list[int] = []
    try:
        async for layer in handle.layers():
            seen.append(layer)  # noqa: PERF401 - what it got before it raised counts
    except LoadFailedError as exc:
        return seen, exc
    return seen, None


def _num_parked(handle: LoadHandle) -> int:
    """How many wait for the burst at the moment, the scheduler's own threads and jobs not counted."""
    burst = handle._burst
    with burst.lock:
        return sum(bool(waiter.name) for waiters in burst._waiters.values() for waiter in waiters)


def errors_of(futures: Sequence[Future[Any]]) -> list[BaseException | None]:
    return [future.exception(WAIT) for future in futures]

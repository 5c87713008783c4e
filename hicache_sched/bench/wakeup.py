"""`bench wakeup`: how soon whoever waits for a layer goes on, and what waiting costs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hicache_sched import LoadHandle, LoadOp, SchedulerConfig, TransferScheduler, native
from hicache_sched.bench.measure import Series, Side, measure
from hicache_sched.bench.report import Report, Row
from hicache_sched.bench.workload import hand_out
from hicache_sched.device import EmulatedDevice

NUM_LAYERS = 4


@dataclass(frozen=True)
class WakeupBench:
    """What to measure.

    Attributes:
        bursts: of four layers each, for each figure.
        window: seconds for which CPU time is counted.
        rounds: how often each side is measured.
        seed: of the order of the sides.
    """

    bursts: int
    window: float
    rounds: int
    seed: int

    @property
    def num_rounds(self) -> int:
        """How often `on_round` will be called."""
        return self.rounds + 1

    def run(self, on_round: Callable[[], None]) -> Report:
        """
        :param on_round: called now and then, for progress.
        """
        rng = random.Random(self.seed)
        sides: dict[str, Side] = {}
        with ExitStack() as stack:
            for plane in PLANES:
                device = stack.enter_context(EmulatedDevice())
                backend = StampingBackend(device)
                name = f"bench-{plane}"
                config = SchedulerConfig(plane=plane, thread_name=name)  # type: ignore[arg-type]
                scheduler = stack.enter_context(TransferScheduler(backend, runtime=device, config=config))
                point = Point(device, backend, scheduler, name)
                for waiter, wait in WAITERS.items():
                    sides[f"{waiter}, {plane} plane"] = partial(_delays, point, wait, self.bursts)
                sides[f"idle, {plane} plane"] = partial(_cpu_idle, point, self.window)
                sides[f"waiting, {plane} plane"] = partial(_cpu_waiting, point, self.window)
            measured = measure(sides, rounds=self.rounds, rng=rng, on_round=on_round)
        return Report("wakeup", asdict(self), NOTES, tuple(self._rows(measured)))

    def _rows(self, measured: Mapping[str, Mapping[str, Series]]) -> Iterator[Row]:
        for plane in PLANES:
            for waiter in WAITERS:
                case = f"{waiter}, {plane} plane"
                target = "<= 200" if waiter == "coroutine" else None
                yield Row("landed to resumed, p50", case, measured[case]["p50"], "us", target=target)
                yield Row("landed to resumed, p99", case, measured[case]["p99"], "us")
            for state in ("idle", "waiting"):
                case = f"{state}, {plane} plane"
                yield Row("CPU time", case, measured[case]["cpu"], "ms/s")


class StampingBackend:
    """A layer is an operation that notes when it is done."""

    num_layers = NUM_LAYERS
    pool_names = ("kv",)

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.landed: list[float] = []

    def bind(self, scheduler: Any) -> None:
        """It has its device."""

    def prepare(self, ops: Sequence[LoadOp]) -> None:
        self.landed = []

    def enqueue_layer(self, prepared: None, layer: int) -> None:
        self._device.launch(lambda: self.landed.append(time.perf_counter()), engine="h2d")

    def finish(self, prepared: None) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class Point:
    """A scheduler and what is below it."""

    device: EmulatedDevice
    backend: StampingBackend
    scheduler: TransferScheduler
    thread_name: str

    @contextmanager
    def held_burst(self) -> Iterator[LoadHandle]:
        """A burst that is enqueued, and held until the end."""
        self.device.hold("h2d")
        try:
            handle = hand_out(self.scheduler, LoadOp(1, _ONE, _ONE))
            while not handle.layer_enqueued(NUM_LAYERS - 1):
                time.sleep(0.0001)
            yield handle
        finally:  # also after Ctrl-C: a close waits for the burst
            self.device.resume("h2d")

    def let_land(self) -> None:
        """One layer after the other, each when the last has long landed."""
        for _ in range(NUM_LAYERS):
            time.sleep(0.002)
            self.device.step("h2d")


_ONE = torch.zeros(1, dtype=torch.int64)


def _in_a_thread(handle: LoadHandle, resumed: list[float]) -> None:
    for layer in range(NUM_LAYERS):
        handle.wait_layer(layer)
        resumed.append(time.perf_counter())


def _in_a_coroutine(handle: LoadHandle, resumed: list[float]) -> None:
    async def wait() -> None:
        resumed.extend([time.perf_counter() async for _ in handle.layers()])

    asyncio.run(wait())


WAITERS: dict[str, Callable[[LoadHandle, list[float]], None]] = {
    "coroutine": _in_a_coroutine,
    "blocked thread": _in_a_thread,
}


def _delays(point: Point, wait: Callable[[LoadHandle, list[float]], None], bursts: int) -> dict[str, float]:
    """Microseconds from a layer's landing until whoever waits for it goes on."""
    delays: list[float] = []
    for _ in range(bursts):
        resumed: list[float] = []
        with point.held_burst() as handle:
            thread = threading.Thread(target=wait, args=(handle, resumed))
            thread.start()
            point.let_land()
        thread.join()
        handle.result()
        point.scheduler.pop_acks()
        delays += [(after - landed) * 1e6 for landed, after in zip(point.backend.landed, resumed, strict=True)]
    p50, p99 = np.percentile(delays, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def _cpu_idle(point: Point, window: float, waiters: Sequence[threading.Thread] = ()) -> dict[str, float]:
    """CPU milliseconds, of the scheduler's threads and of those that wait, in a second in which nothing happens."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(point.thread_name)]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in (*ours, *waiters) if thread.ident is not None]
    before = [time.clock_gettime(clock) for clock in clocks]
    time.sleep(window)
    after = [time.clock_gettime(clock) for clock in clocks]
    return {"cpu": (sum(after) - sum(before)) / window * 1e3}


def _cpu_waiting(point: Point, window: float) -> dict[str, float]:
    """The same while a burst does not get on and a thread and a coroutine wait for it."""
    with point.held_burst() as handle:
        threads = [threading.Thread(target=wait, args=(handle, [])) for wait in WAITERS.values()]
        for thread in threads:
            thread.start()
        time.sleep(0.05)  # until they sleep
        measured = _cpu_idle(point, window, threads)
    for thread in threads:
        thread.join()
    handle.result()
    point.scheduler.pop_acks()
    return measured


PLANES = ("python", "native") if native.module is not None else ("python",)

NOTES = (
    "the device is emulated, and its operations are Python here: a layer has landed when its operation takes the time",
    "a coroutine waits on an event loop of its own, on a thread of its own",
)

"""`bench interference`: what a busy engine scheduler and its bursts cost each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hicache_sched import LoadOp, SchedulerConfig, native
from hicache_sched.bench import ways
from hicache_sched.bench.measure import Series, Side, measure, ratio
from hicache_sched.bench.plain_loader import plain_loader
from hicache_sched.bench.report import Report, Row
from hicache_sched.bench.ways import Burst
from hicache_sched.bench.workload import make_op, make_pair, runtime_of
from hicache_sched.copy import PooledBackend
from hicache_sched.copy.layers import AddressBuffers, LayerBatches
from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.device import EmulatedDevice
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.emulated import EmulatedEvent
from hicache_sched.pools import PoolPair

Work = Callable[[], object]
"""One step of the engine scheduler, a fraction of a millisecond long."""


Way = Callable[[], Burst]
"""Hands the same burst out once more."""


@dataclass(frozen=True)
class InterferenceBench:
    """What to measure.

    Attributes:
        device: "emulated" or "cuda".
        layers: layers of the pool.
        pages: pages of a burst, scattered.
        row_bytes: bytes of a page in one layer of K, and of V.
        window: seconds for which bursts are handed out, one after the other, each time.
        rounds: how often each combination is measured.
        seed: of the pages and of the order of the sides.
    """

    device: str
    layers: int
    pages: int
    row_bytes: int
    window: float
    rounds: int
    seed: int

    @property
    def num_rounds(self) -> int:
        """How often `on_round` will be called."""
        return self.rounds + 1

    @property
    def _ways(self) -> dict[str, MakeWay]:
        return {name: way for name, way in WAYS.items() if self.device == "emulated" or name != ALONE}

    def run(self, on_round: Callable[[], None]) -> Report:
        """
        :param on_round: called now and then, for progress.
        """
        on_cuda = self.device == "cuda"
        pair = make_pair(self.pages, self.layers, self.row_bytes, "page_first_direct", on_cuda=on_cuda)
        op = make_op(self.pages, self.seed)
        sides: dict[str, Side] = {}
        with ExitStack() as stack:
            for name, make_way in self._ways.items():
                runtime = stack.enter_context(runtime_of(self.device))
                way = stack.enter_context(make_way(runtime, pair, op))
                sides[f"{name}, {IDLE}"] = partial(self._idle, runtime, way)
                for load, work in LOADS.items():
                    sides[f"{name}, {load}"] = partial(self._busy, runtime, work, way)
            measured = measure(sides, rounds=self.rounds, rng=random.Random(self.seed), on_round=on_round)
        rows = [row for name in self._ways for row in self._rows(name, measured)]
        parameters = asdict(self) | {"burst_bytes": self.pages * self.layers * self.row_bytes * 2}
        notes = NOTES if self.device == "emulated" else NOTES[len(EMULATED_NOTES) :]
        return Report("interference", parameters, notes, tuple(rows))

    def _rows(self, name: str, measured: Mapping[str, Mapping[str, Series]]) -> Iterator[Row]:
        idle, is_control = measured[f"{name}, {IDLE}"], name == ALONE  # which has one operation, and no target

        def first_layer(case: str, after: Series) -> Iterator[Row]:
            if not is_control:
                yield Row("first layer landed after", case, after, "ms", target="<= 1")

        yield from first_layer(f"{name}, {IDLE}", idle["first layer"])
        for load in LOADS:
            case = f"{name}, {load}"
            busy = measured[case]
            latency = {load: busy["latency"], IDLE: idle["latency"]}
            yield Row.ratio("burst latency", case, "ms", latency, None if is_control else "<= 1.5")
            yield from first_layer(case, busy["first layer"])
            own = {"with bursts": busy["rate"], "without": busy["rate without"]}
            rate = Row.ratio("the engine's own rate", case, "steps/s", own, None if is_control else ">= 0.95")
            yield rate
            if ALONE in self._ways and not is_control:
                alone = measured[f"{ALONE}, {load}"]
                beside = {"own rate": rate.result, f"beside {ALONE}": ratio(alone["rate"], alone["rate without"])}
                yield Row.ratio(f"the engine's own rate, to that beside {ALONE}", case, "", beside)
            pauses = zip(busy["pause"].values, busy["pause without"].values, strict=True)
            beyond = Series(tuple(with_bursts - own for with_bursts, own in pauses))
            yield Row("longest pause beyond its own", case, beyond, "ms", target=None if is_control else "<= 1")

    def _idle(self, runtime: Any, way: Way) -> dict[str, float]:
        """An engine scheduler that does nothing but wait."""
        latencies, firsts = [], []
        start = time.perf_counter()
        until = start + self.window
        while start < until:
            burst = way()
            _wait_landed(runtime, burst, 0)
            firsts.append(time.perf_counter() - start)
            _wait_landed(runtime, burst, self.layers - 1)
            now = time.perf_counter()
            latencies.append(now - start)
            start = now
        return {"latency": _median_ms(latencies), "first layer": _median_ms(firsts)}

    def _busy(self, runtime: Any, work: Work, way: Way) -> dict[str, float]:
        """Steps of an engine scheduler that hands out the next burst when it sees that the last has landed; and, half
        before and half after that, so that a machine that becomes slower slows both, the same steps without."""
        before = self._between(runtime, work, way)
        _work_until_landed(work, way)
        bursts: list[_BusyBurst] = []
        begin = last = time.perf_counter()
        while last < begin + self.window:
            bursts.append(_work_until_landed(work, way))
            last = time.perf_counter()
        after = self._between(runtime, work, way)
        return {
            "latency": _median_ms([burst.landed for burst in bursts]),
            "first layer": _median_ms([burst.first_landed for burst in bursts]),
            "rate": sum(burst.steps for burst in bursts) / (last - begin),
            "pause": max(burst.longest_step for burst in bursts) * 1e3,
            "rate without": (before.steps + after.steps) / (before.seconds + after.seconds),
            "pause without": max(before.longest_step, after.longest_step) * 1e3,
        }

    def _between(self, runtime: Any, work: Work, way: Way) -> _Steps:
        """The same steps, and looks at a burst that has landed, without another burst; for half as long."""
        burst = way()
        _wait_landed(runtime, burst, self.layers - 1)
        while not burst.done():
            time.sleep(1e-4)
        steps, longest = 0, 0.0
        begin = last = time.perf_counter()
        while last < begin + self.window / 2:
            work()
            steps += 1
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            burst.done()
        return _Steps(steps, last - begin, longest)


class _Steps(NamedTuple):
    """What an engine scheduler did; times in seconds."""

    steps: int
    seconds: float
    longest_step: float


class _BusyBurst(NamedTuple):
    """A burst, as a busy engine scheduler saw it; times in seconds, the first two from before its hand-out."""

    first_landed: float
    landed: float
    steps: int
    longest_step: float


def _work_until_landed(work: Work, way: Way) -> _BusyBurst:
    begin = last = time.perf_counter()
    burst = way()
    first_landed: float | None = None
    steps, longest = 0, 0.0
    while True:
        work()
        steps += 1
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        has_landed = burst.done()
        if first_landed is None and (has_landed or burst.layer_landed(0)):
            first_landed = now - begin
        if has_landed:
            assert first_landed is not None, "with the last layer at the latest"
            return _BusyBurst(first_landed, now - begin, steps, longest)


def _wait_landed(runtime: Any, burst: Burst, layer: int) -> None:
    burst.wait_layer(layer)
    runtime.current_stream().synchronize()  # which a stream that runs inline has long done


def _median_ms(seconds: list[float]) -> float:
    return float(np.median(seconds)) * 1e3


# -- what the engine scheduler does ---------------------------------------------------------------------------------


def _python_step() -> int:
    total = 0
    for number in range(1000):
        total += number * number
    return total


_NUMBERS = torch.ones(64)


def _mixed_step() -> torch.Tensor:
    numbers = _NUMBERS
    for _ in range(5):
        numbers = numbers * 1.001 + 1
        for _ in range(50):
            pass
    return numbers


LOADS: dict[str, Work] = {"pure Python": _python_step, "Python and torch": _mixed_step}


# -- ways to load ---------------------------------------------------------------------------------------------------


MakeWay = Callable[[Any, PoolPair, LoadOp], AbstractContextManager[Way]]


def _burst_by_burst(way: ways.Way) -> MakeWay:
    @contextmanager
    def made(runtime: Any, pair: PoolPair, op: LoadOp) -> Iterator[Way]:
        with way(runtime, PooledBackend([pair])) as hand_out:
            yield lambda: hand_out([op])

    return made


class _BatchBurst:
    """A burst that is one operation of the device."""

    def __init__(self, landed: EmulatedEvent) -> None:
        self._landed = landed

    def layer_landed(self, layer: int) -> bool:
        return self._landed.query()

    def done(self) -> bool:
        return self._landed.query()

    def wait_layer(self, layer: int) -> None:
        self._landed.synchronize()


@contextmanager
def _one_operation(device: EmulatedDevice, pair: PoolPair, op: LoadOp) -> Iterator[Way]:
    """What nobody can do better: the copies are planned, all layers together, before anything is measured."""
    planner = BurstPlanner([pair], [range(pair.num_layers)])
    plan = planner.plan(merge_ops([op], DeviceBinding(device), [pair.name]))
    batches = LayerBatches(plan, pair, AddressBuffers(), keep=True)
    layers = [batch for layer in range(pair.num_layers) if (batch := batches.layer(layer)) is not None]
    dst, src, sizes = (np.concatenate([layer[part] for layer in layers]) for part in range(3))
    batch, stream = CopyBatch(dst, src, sizes, plan.num_bytes, pair), device.Stream()

    def hand_out() -> Burst:
        landed = device.Event(blocking=True)
        with device.stream(stream):
            device.enqueue_copies(batch)
            landed.record()
        return _BatchBurst(landed)

    yield hand_out


ALONE = "copies alone"
IDLE = "idle"
WAYS: dict[str, MakeWay] = {
    ALONE: _one_operation,
    "inline": _burst_by_burst(ways.scheduled(SchedulerConfig(mode="inline"))),
    "plain loader thread": _burst_by_burst(plain_loader),
    "async, Python plane": _burst_by_burst(ways.scheduled(SchedulerConfig(plane="python"))),
}
if native.module is not None:
    WAYS["async, native plane"] = _burst_by_burst(ways.scheduled(SchedulerConfig(plane="native")))

EMULATED_NOTES = (
    "the device is emulated: copies are made by the CPU, on a core of their own where there is one",
    f"{ALONE}: the whole burst as one operation, planned before: what the copies themselves cost here",
    "the first burst of each window is not counted: during it the thread that makes the copies, which a GPU does not "
    "need, often shares a core with the engine scheduler for some milliseconds, until the kernel moves it",
)
NOTES = (
    *EMULATED_NOTES,
    "without bursts: the same steps with the same looks at a burst, one that has landed",
    "burst latency: from hand-out to the first step of the engine scheduler that sees the burst landed",
    "the plain loader thread is a FIFO queue, one thread and a flag per layer; it makes the same planned copies",
    "inline: the engine scheduler submits the burst itself, which counts as a pause",
)

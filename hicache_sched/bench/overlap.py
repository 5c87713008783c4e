"""`bench overlap`: how much of the copies' time a layer-wise forward hides."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from hicache_sched import LoadOp, SchedulerConfig
from hicache_sched.bench.measure import Series, Side, measure
from hicache_sched.bench.plain_loader import plain_loader
from hicache_sched.bench.report import Report, Row
from hicache_sched.bench.slow_backend import SlowBackend
from hicache_sched.bench.ways import Burst, Way, scheduled
from hicache_sched.bench.workload import make_op, make_pair
from hicache_sched.copy import BurstBackend, PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import PoolPair

RATIOS = (0.5, 1.0, 2.0)
"""Compute time of a layer to its copy time."""
BACK_TO_BACK = 4
PAGES, ROW_BYTES = 8, 512
"""Of a burst: few, so that the time its copies take is the link's."""
WAYS: dict[str, Way] = {
    "inline": scheduled(SchedulerConfig(mode="inline")),
    "plain loader thread": plain_loader,
    "async": scheduled(SchedulerConfig()),
}


@dataclass(frozen=True)
class OverlapBench:
    """What to measure.

    Attributes:
        layers: of the model.
        copy_ms: what a layer's copies take on the link.
        enqueue_ms: CPU time, with the GIL, to submit a layer, where that is not planned.
        rounds: how often each side is measured.
        seed: of the pages and of the order of the sides.
    """

    layers: int
    copy_ms: float
    enqueue_ms: float
    rounds: int
    seed: int

    @property
    def num_rounds(self) -> int:
        """How often `on_round` will be called."""
        return self.rounds + 1

    @property
    def bandwidth(self) -> float:
        """Of the link, in bytes/s: a layer's copies take `copy_ms` on it."""
        return PAGES * ROW_BYTES * 2 / (self.copy_ms * 1e-3)

    def load(self) -> tuple[PoolPair, LoadOp]:
        """What is loaded, and into what."""
        return make_pair(PAGES, self.layers, ROW_BYTES, "page_first_direct"), make_op(PAGES, self.seed)

    def run(self, on_round: Callable[[], None]) -> Report:
        """
        :param on_round: called now and then, for progress.
        """
        pair, op = self.load()
        sides: dict[str, Side] = {}
        cases: dict[str, _Case] = {}
        with ExitStack() as stack:
            device = stack.enter_context(EmulatedDevice(h2d_bandwidth=self.bandwidth))
            for enqueue_ms in dict.fromkeys((0.0, self.enqueue_ms)):
                for way, make_way in WAYS.items():
                    hand_out = partial(stack.enter_context(make_way(device, backend_of(pair, enqueue_ms))), [op])
                    for compute in RATIOS:
                        for bursts in (1, BACK_TO_BACK):
                            case = _Case(way, compute, bursts, enqueue_ms)
                            cases[case.name] = case
                            compute_ms = compute * self.copy_ms
                            sides[case.name] = partial(_forwards, device, hand_out, self.layers, compute_ms, bursts)
            rng = random.Random(self.seed)
            measured = measure(sides, rounds=self.rounds, rng=rng, on_round=on_round)
        rows = [row for name, case in cases.items() for row in self._rows(case, measured[name]["makespan"])]
        return Report("overlap", asdict(self), NOTES, tuple(rows))

    def _rows(self, case: _Case, makespan: Series) -> Iterator[Row]:
        num_layers = case.bursts * self.layers
        compute_ms, copies = case.compute * self.copy_ms, num_layers * self.copy_ms
        optimum = Series((optimum_ms(num_layers, self.copy_ms, compute_ms, case.enqueue_ms),) * len(makespan.values))
        both = {"makespan": makespan, "optimum": optimum}
        target = "<= 1.05" if case.way == "async" else None
        yield Row.ratio("makespan to its optimum", case.name, "ms", both, target)
        if not case.enqueue_ms:  # else it is the submission that is not hidden
            beyond = [each - num_layers * compute_ms for each in makespan.values]
            hidden = Series(tuple(100 * (1 - each / copies) for each in beyond))
            yield Row("copy time hidden", case.name, hidden, "%")


@dataclass(frozen=True)
class _Case:
    """One of the things that are measured.

    Attributes:
        compute: time of a layer to its copies' time.
        bursts: back to back.
        enqueue_ms: to submit a layer.
    """

    way: str
    compute: float
    bursts: int
    enqueue_ms: float

    @property
    def name(self) -> str:
        many = "one burst" if self.bursts == 1 else f"{self.bursts} bursts back to back"
        submission = "planned" if not self.enqueue_ms else f"{self.enqueue_ms:g} ms to submit a layer"
        return f"{self.way}, compute {self.compute:g} x copy, {many}, {submission}"


def optimum_ms(num_layers: int, copy_ms: float, compute_ms: float, enqueue_ms: float) -> float:
    """When the last of so many layers can be computed at the earliest: each after its copy, which is after its
    submission, one of each at a time."""
    enqueued = copied = computed = 0.0
    for _ in range(num_layers):
        enqueued += enqueue_ms
        copied = max(copied, enqueued) + copy_ms
        computed = max(computed, copied) + compute_ms
    return computed


def _forwards(
    device: EmulatedDevice, hand_out: Callable[[], Burst], num_layers: int, compute_ms: float, bursts: int
) -> dict[str, float]:
    """Milliseconds from the first hand-out until the last forward is through."""
    compute = device.Stream()
    start = time.perf_counter()
    for _ in range(bursts):
        burst = hand_out()
        with device.stream(compute):
            for layer in range(num_layers):
                burst.wait_layer(layer)
                device.launch(None, duration=compute_ms * 1e-3)
    compute.synchronize()
    makespan = (time.perf_counter() - start) * 1e3
    while not burst.done():  # its slot is then free for the next
        time.sleep(1e-4)
    return {"makespan": makespan}


def backend_of(pair: PoolPair, enqueue_ms: float) -> BurstBackend:
    """The built-in backend, or one that takes its time to submit a layer."""
    return SlowBackend([pair], enqueue_ms * 1e-3) if enqueue_ms else PooledBackend([pair])


NOTES = (
    "the device is emulated: copies and layers take the time that was asked for, and a layer computes nothing",
    "optimum: computed from the times asked for, not measured: each layer after its copy, and each copy after its "
    "submission, one of each at a time",
    "the plain loader thread is a FIFO queue, one thread and a flag per layer; it makes the same copies",
    "copy time hidden: the part of the copies' time that the forwards do not take longer for",
)

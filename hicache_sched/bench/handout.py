"""`bench handout`: how long the engine scheduler is blocked in a hand-out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hicache_sched import LoadOp, PoolTransfer, SchedulerConfig, TransferScheduler, native
from hicache_sched.bench.measure import Side, measure
from hicache_sched.bench.report import Report, Row
from hicache_sched.bench.workload import PAGE_SIZE, hand_out, make_op, make_pair, runtime_of
from hicache_sched.copy import BurstBackend, PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import PoolPair

SMALL = 64
"""Pages and layers of what grows, where the other grows."""
LAYERS = (16, 78, 1024)
PAGES = (64, 1024, 65536)
IN_FLIGHT = (0, 1, 2)
PAUSE = 0.05
PAUSED = f"after {PAUSE * 1e3:g} ms in which the process slept"


@dataclass(frozen=True)
class HandoutBench:
    """What to measure.

    Attributes:
        device: "emulated" or "cuda".
        layers: layers of the pools.
        pages: pages of a burst in each of two pools, scattered.
        row_bytes: bytes of a page in one layer of K, and of V.
        growth: whether to measure hand-outs of bursts of other sizes as well.
        hand_outs: for each figure of an async hand-out.
        rounds: how often each side is measured.
        seed: of the pages and of the order of the sides.
    """

    device: str
    layers: int
    pages: int
    row_bytes: int
    growth: bool
    hand_outs: int
    rounds: int
    seed: int

    @property
    def num_rounds(self) -> int:
        """How often `on_round` will be called."""
        return (2 if self.growth else 1) * (self.rounds + 1)

    def run(self, on_round: Callable[[], None]) -> Report:
        """
        :param on_round: called now and then, for progress.
        """
        rng = random.Random(self.seed)
        rows = [*self._ways(rng, on_round)]
        if self.growth:
            rows += self._growth(rng, on_round)
        parameters = asdict(self) | {"page_size": PAGE_SIZE}
        notes = NOTES if self.device == "emulated" else NOTES[1:]
        return Report("handout", parameters, notes, tuple(rows))

    def _ways(self, rng: random.Random, on_round: Callable[[], None]) -> Iterator[Row]:
        """Every way to hand out the same burst."""
        with ExitStack() as stack:
            load = two_pools(self.pages, self.layers, self.row_bytes, self.seed, on_cuda=self.device == "cuda")
            sides: dict[str, Side] = {}
            for name, way in WAYS.items():
                scheduler = stack.enter_context(way.scheduler(stack.enter_context(runtime_of(self.device)), load.pairs))
                sides[name] = partial(_blocked, scheduler, load.op, way.hand_outs or self.hand_outs)
            measured = measure(sides, rounds=self.rounds, rng=rng, on_round=on_round)
        for name in WAYS:
            if name != PER_PAGE:
                target = ">= 1000" if name.startswith("async") else None
                both = {PER_PAGE: measured[PER_PAGE]["p50"], name: measured[name]["p50"]}
                yield Row.ratio("blocked in a hand-out, p50", name, "us", both, target)

    def _growth(self, rng: random.Random, on_round: Callable[[], None]) -> Iterator[Row]:
        """What grows with the burst, and with those before it."""
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            before: Callable[[], object] | None = None
            for name, (layers, pages, in_flight) in cases().items():
                load = two_pools(pages, layers, 32, self.seed, on_cuda=self.device == "cuda")
                scheduler = stack.enter_context(
                    ASYNC.scheduler(stack.enter_context(runtime_of(self.device)), load.pairs)
                )
                before = before or partial(_load, scheduler, load.op)  # of the smallest, before each of all
                count = self.hand_outs if layers * pages < 2**18 else max(10, self.hand_outs // 10)
                sides[name] = partial(_blocked, scheduler, load.op, count, in_flight, before)
                if not in_flight:
                    sides[f"{name}, {PAUSED}"] = partial(
                        _blocked, scheduler, load.op, 10, 0, partial(time.sleep, PAUSE)
                    )
            measured = measure(sides, rounds=self.rounds, rng=rng, on_round=on_round)
        first = next(iter(cases()))
        smallest, smallest_paused = measured[first]["p50"], measured[f"{first}, {PAUSED}"]["p50"]
        for name, values in measured.items():
            if name.endswith(PAUSED):
                to = {f"smallest, {PAUSED}": smallest_paused}
            else:
                to = {"smallest": smallest}
                yield Row("load() before it, p50", name, values["load"], "us")
                yield Row("hand-out, p50", name, values["p50"], "us", target="<= 40")
                yield Row("hand-out, p99", name, values["p99"], "us", target="<= 400")
            if not name.startswith(first):  # which is the smallest
                yield Row.ratio("growth of p50", name, "us", {name: values["p50"]} | to, "<= 1.5")


def cases() -> dict[str, tuple[int, int, int]]:
    """(layers, pages, bursts in flight) by name, the smallest first."""
    made = {f"{layers} layers x {SMALL} pages": (layers, SMALL, 0) for layers in LAYERS}
    made |= {f"{LAYERS[0]} layers x {pages} pages": (LAYERS[0], pages, 0) for pages in PAGES}
    return made | {f"{number} in flight": (LAYERS[0], SMALL, number) for number in IN_FLIGHT if number}


def _load(scheduler: TransferScheduler, op: LoadOp, bursts: int = 5) -> None:
    for _ in range(bursts):
        hand_out(scheduler, op).result()
        scheduler.pop_acks()


def _blocked(
    scheduler: TransferScheduler,
    op: LoadOp,
    hand_outs: int,
    in_flight: int = 0,
    before: Callable[[], object] | None = None,
) -> Mapping[str, float]:
    """Microseconds for which hand-outs, and loads before them, block their caller, behind bursts that have not landed.

    :param before: done before each.
    """
    device = scheduler.runtime if isinstance(scheduler.runtime, EmulatedDevice) else None
    loaded, blocked = [], []
    for _ in range(hand_outs):
        if before is not None:
            before()
        try:
            if in_flight and device is not None:
                device.hold("h2d")
            ahead = [hand_out(scheduler, op) for _ in range(in_flight)]
            start = time.perf_counter()
            scheduler.load(op)
            middle = time.perf_counter()
            handle = scheduler.start_loading_sync()
            end = time.perf_counter()
        finally:  # also after Ctrl-C: a close waits for them
            if in_flight and device is not None:
                device.resume("h2d")
        assert handle is not None
        loaded.append((middle - start) * 1e6)
        blocked.append((end - middle) * 1e6)
        for each in (*ahead, handle):
            each.result()
        scheduler.pop_acks()
    p50, p99 = np.percentile(blocked, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "load": float(np.median(loaded))}


# -- what is loaded -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A burst, and the pools that it is loaded into."""

    pairs: tuple[PoolPair, ...]
    op: LoadOp


def two_pools(pages: int, layers: int, row_bytes: int, seed: int, *, on_cuda: bool = False) -> Load:
    """As many pages of an anchor and of a side pool, of K and V each."""
    anchor, side = (make_pair(pages, layers, row_bytes, "page_first_direct", on_cuda=on_cuda) for _ in range(2))
    side = PoolPair("side", side.host, side.device)
    first, second = make_op(pages, seed), make_op(pages, seed + 1)
    transfer = PoolTransfer("side", second.host_indices, second.device_indices)
    return Load((anchor, side), LoadOp(1, first.host_indices, first.device_indices, (transfer,)))


# -- ways to hand out -------------------------------------------------------------------------------------------------


class PerPageBackend:
    """What engines do: one copy for each page, layer, pool, and of K and V."""

    def __init__(self, pairs: Sequence[PoolPair]) -> None:
        self._pooled = PooledBackend(pairs)
        self.num_layers, self.pool_names = self._pooled.num_layers, self._pooled.pool_names
        self._runtime: Any = None
        self._pairs = {pair.name: pair for pair in pairs}

    def bind(self, scheduler: Any) -> None:
        self._runtime = scheduler.runtime

    def prepare(self, ops: Sequence[LoadOp]) -> list[tuple[PoolPair, list[int], list[int]]]:
        anchor = self.pool_names[0]
        return [
            (self._pairs[name], _pages(host), _pages(device))
            for op in ops
            for name, host, device in (
                (anchor, op.host_indices, op.device_indices),
                *((each.name, each.host_indices, each.device_indices) for each in op.pool_transfers),
            )
        ]

    def enqueue_layer(self, prepared: list[tuple[PoolPair, list[int], list[int]]], layer: int) -> None:
        for pair, host_pages, device_pages in prepared:
            for src, dst in zip(pair.host.planes, pair.device.planes, strict=True):
                rows = dst[layer].view(-1, PAGE_SIZE, *dst.shape[2:])
                for host, device in zip(host_pages, device_pages, strict=True):
                    self._copy(rows[device], src[host, layer])

    def finish(self, prepared: Any) -> None:
        """Nothing is kept."""

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if isinstance(self._runtime, EmulatedDevice):
            self._runtime.launch(partial(dst.copy_, src), engine="h2d")
        else:
            dst.copy_(src, non_blocking=True)


def _pages(tokens: torch.Tensor) -> list[int]:
    pages: list[int] = (tokens[::PAGE_SIZE] // PAGE_SIZE).tolist()
    return pages


@dataclass(frozen=True)
class Way:
    """A way to hand out.

    Attributes:
        hand_outs: for each figure, where that is not what was asked for.
    """

    backend: Callable[[Sequence[PoolPair]], BurstBackend]
    config: SchedulerConfig
    hand_outs: int | None = None

    @contextmanager
    def scheduler(self, runtime: Any, pairs: Sequence[PoolPair]) -> Iterator[TransferScheduler]:
        with TransferScheduler(self.backend(pairs), runtime=runtime, config=self.config) as scheduler:
            yield scheduler


PER_PAGE = "inline, one copy per page"
ASYNC = Way(PooledBackend, SchedulerConfig(plane="auto"))
WAYS = {
    PER_PAGE: Way(PerPageBackend, SchedulerConfig(mode="inline"), hand_outs=1),
    "inline, batched": Way(PooledBackend, SchedulerConfig(mode="inline"), hand_outs=5),
    "async, Python plane": Way(PooledBackend, SchedulerConfig(plane="python")),
}
if native.module is not None:
    WAYS["async, native plane"] = ASYNC

NOTES = (
    "the device is emulated: its operations are queued in CPU memory, as a driver's are in its own",
    "blocked: in start_loading_sync(), with a slot free; a round has one hand-out with one copy per page, five batched "
    "ones, and as many async ones as were asked for, whose caches are warm by then",
    "large bursts are handed out a tenth as often, and after a pause ten times; bursts in flight are held on the "
    "emulated device, while on a GPU they may have landed",
    "growth is that of the plane that is chosen where nothing is said; each hand-out follows on bursts of the "
    "smallest size, so that all find the same in the caches, or on the same pause, so that all find nothing",
)

"""`bench serving`: requests with shared prefixes through a small engine, whose load-back is inline or not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from hicache_sched import BurstBackend, LoadOp, SchedulerConfig, TransferScheduler
from hicache_sched.bench.measure import Series, Side, measure
from hicache_sched.bench.plain_loader import plain_loader
from hicache_sched.bench.prefill_engine import PAGE_SIZE, HandOut, Model, PrefillEngine, PrefixCache, Request
from hicache_sched.bench.report import Report, Row
from hicache_sched.bench.slow_backend import SlowBackend
from hicache_sched.bench.ways import Burst
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice

INLINE = "inline"


@dataclass(frozen=True)
class ServingBench:
    """What to measure. Times are real ones, and scaled by `scale`.

    Attributes:
        requests: how many.
        concurrency: clients, each of which sends a request when its last has been served.
        batch: requests that are computed together.
        prefixes: how many there are; each request has one of them, some are more popular than others.
        prefix_pages: pages of a prefix.
        device_prefixes: how many of them the device has room for; at least as many as a batch may need.
        new_tokens: of a request, on average; from half to one and a half times as many.
        layers: of the model.
        token_bytes: of a token and layer in the anchor pool.
        side_token_bytes: the same in the side pool.
        link_gb_per_s: of the link from host to device.
        submit_ms: CPU time, with the GIL, to submit a layer of one pool where it is not planned.
        compute_us: of a token, in all layers.
        chunk: tokens of a forward.
        request_cpu_ms: CPU time, with the GIL, that the engine spends on a request that comes in.
        scale: of all times.
        rounds: how often each way serves all requests.
        seed: of the requests, of where pages are, and of the order of the ways.
    """

    requests: int
    concurrency: int
    batch: int
    prefixes: int
    prefix_pages: int
    device_prefixes: int
    new_tokens: int
    layers: int
    token_bytes: int
    side_token_bytes: int
    link_gb_per_s: float
    submit_ms: float
    compute_us: float
    chunk: int
    request_cpu_ms: float
    scale: float
    rounds: int
    seed: int

    @property
    def num_rounds(self) -> int:
        """How often `on_round` will be called."""
        return self.rounds + 1

    @property
    def model(self) -> Model:
        return Model(
            layers=self.layers,
            token_bytes=self.token_bytes,
            side_token_bytes=self.side_token_bytes,
            link_gb_per_s=self.link_gb_per_s,
            compute_us=self.compute_us,
            chunk=self.chunk,
            request_cpu_ms=self.request_cpu_ms,
            scale=self.scale,
        )

    def run(self, on_round: Callable[[], None]) -> Report:
        """
        :param on_round: called now and then, for progress.
        """
        rng = np.random.default_rng(self.seed)
        requests = make_requests(self.requests, self.prefixes, self.new_tokens, rng)
        cache = PrefixCache(self.prefixes, self.prefix_pages, self.device_prefixes, self.layers, rng)
        with ExitStack() as stack:
            device = stack.enter_context(EmulatedDevice(h2d_bandwidth=self.model.emulated_bandwidth))
            sides: dict[str, Side] = {
                name: partial(self._serve, device, cache, way, requests) for name, way in WAYS.items()
            }
            measured = measure(sides, rounds=self.rounds, rng=random.Random(self.seed), on_round=on_round)
        parameters = asdict(self) | {"page_size": PAGE_SIZE, "emulated_bandwidth": self.model.emulated_bandwidth}
        return Report("serving", parameters, NOTES, tuple(_rows(measured)))

    def _serve(
        self, device: EmulatedDevice, cache: PrefixCache, way: Way, requests: Sequence[Request]
    ) -> dict[str, float]:
        """All requests once, from a device that has no prefix yet."""
        cache.clear()
        planned = PooledBackend(cache.pairs)
        submit = len(cache.pairs) * self.submit_ms * 1e-3 * self.scale
        backend = planned if way.is_planned else SlowBackend(cache.pairs, submit)
        with way.load(device, backend) as hand_out:
            engine = PrefillEngine(device, self.model, cache, hand_out, self.batch)
            served = asyncio.run(engine.serve(requests, self.concurrency))
        cache.check()
        ttft = np.asarray(served.ttft)
        p50, p95, p99 = np.percentile(ttft, [50, 95, 99])
        return {
            "throughput": len(ttft) / served.seconds,
            "wall time": served.seconds,
            "TTFT mean": float(ttft.mean()),
            "TTFT p50": float(p50),
            "TTFT p95": float(p95),
            "TTFT p99": float(p99),
            "blocked": served.blocked,
            "loaded": served.loaded_tokens,
        }


def make_requests(number: int, prefixes: int, new_tokens: int, rng: np.random.Generator) -> list[Request]:
    """Requests whose prefixes are the more popular the smaller their number (as 1 / number)."""
    popularity = 1 / np.arange(1, prefixes + 1)
    chosen = rng.choice(prefixes, size=number, p=popularity / popularity.sum())
    tokens = rng.integers(new_tokens // 2, new_tokens + new_tokens // 2, size=number, endpoint=True)
    return [Request(int(prefix), int(new)) for prefix, new in zip(chosen, tokens, strict=True)]


REFERENCE = {
    "throughput": ("requests/s", "+8.8 %"),
    "wall time": ("s", "-8.1 %"),
    "TTFT mean": ("s", "-7.9 %"),
    "TTFT p50": ("s", "-10.0 %"),
    "TTFT p95": ("s", "-7.7 %"),  # 22.12 s -> 20.41 s
    "TTFT p99": ("s", "flat"),
}
"""Unit, and what a plain loader thread changed in SGLang on 8 x H100 (TP 8, 500 requests)."""


def _rows(measured: Mapping[str, Mapping[str, Series]]) -> Iterator[Row]:
    inline = measured[INLINE]
    for name, values in measured.items():
        if name == INLINE:
            continue
        for what, (unit, reference) in REFERENCE.items():
            sides = {name: values[what], INLINE: inline[what]}
            pairs = zip(values[what].values, inline[what].values, strict=True)
            change = Series(tuple(100 * (with_it / without - 1) for with_it, without in pairs))
            yield Row(f"{what}, change in %", name, change, unit, sides, f"reference, loader thread: {reference}")
    for name, values in measured.items():
        yield Row("blocked in hand-outs", name, values["blocked"], "s")
        yield Row("tokens loaded", name, values["loaded"], "tokens")


# -- ways to load -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to load.

    Attributes:
        load: hands bursts out.
        is_planned: whether copies are planned, or described page by page.
    """

    load: Callable[[EmulatedDevice, BurstBackend], AbstractContextManager[HandOut]]
    is_planned: bool = False


def _scheduled(config: SchedulerConfig) -> Callable[[EmulatedDevice, BurstBackend], AbstractContextManager[HandOut]]:
    @contextmanager
    def load(device: EmulatedDevice, backend: BurstBackend) -> Iterator[HandOut]:
        with TransferScheduler(backend, runtime=device, config=config) as scheduler:

            async def hand_out(ops: Sequence[LoadOp]) -> Burst:
                for op in ops:
                    scheduler.load(op)
                handle = await scheduler.start_loading()
                assert handle is not None
                scheduler.pop_acks()
                return handle

            yield hand_out

    return load


@contextmanager
def _plain_loader(device: EmulatedDevice, backend: BurstBackend) -> Iterator[HandOut]:
    with plain_loader(device, backend) as hand_out_now:

        async def hand_out(ops: Sequence[LoadOp]) -> Burst:
            return hand_out_now(ops)

        yield hand_out


WAYS = {
    INLINE: Way(_scheduled(SchedulerConfig(mode="inline"))),
    "plain loader thread": Way(_plain_loader),
    "async, the engine's own copies": Way(_scheduled(SchedulerConfig())),
    "async, planned copies": Way(_scheduled(SchedulerConfig()), is_planned=True),
    "inline, planned copies": Way(_scheduled(SchedulerConfig(mode="inline")), is_planned=True),
}

NOTES = (
    "emulated: the device, its copies (real bytes, a few for each token, on a link slower by as much), and what is "
    "computed, which only takes its time; describing copies page by page only takes its CPU time, with the GIL",
    "real: hand-outs, waits, threads and the GIL, which are not scaled as the rest is",
    "reference: what a plain loader thread changed in SGLang on 8 x H100 (TP 8, 500 requests); how much was computed "
    "for each burst there is not known: new_tokens is chosen so that a plain loader thread changes as much here",
    "the gain of a loader thread is that the engine's thread does not submit; that of planned copies, that nobody does "
    "for long, so that layers land as fast as the link is",
)

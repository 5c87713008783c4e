"""`bench serving`: every way serves every request from pages that were loaded as they are, and says what changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hicache_sched import LoadOp, PoolTransfer
from hicache_sched.bench import prefill_engine
from hicache_sched.bench.prefill_engine import Model, PrefillEngine, PrefixCache, Request
from hicache_sched.bench.serving import INLINE, REFERENCE, WAYS, ServingBench, make_requests
from hicache_sched.bench.ways import Burst
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from tests.bench.reporting import report_of
from tests.bench.test_command import run

SMALL = ServingBench(
    requests=12,
    concurrency=4,
    batch=3,
    prefixes=5,
    prefix_pages=2,
    device_prefixes=3,
    new_tokens=100,
    layers=2,
    token_bytes=1152,
    side_token_bytes=132,
    link_gb_per_s=50.0,
    submit_ms=0.5,
    compute_us=25.0,
    chunk=64,
    request_cpu_ms=0.1,
    scale=0.1,
    rounds=3,
    seed=0,
)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_prefixes=4, pages=2, num_on_device=2, layers=2, rng=np.random.default_rng(0))


def load(cache: PrefixCache, ops: Sequence[LoadOp]) -> None:
    for op in ops:
        of_pools: list[LoadOp | PoolTransfer] = [op, *op.pool_transfers]
        for pair, indices in zip(cache.pairs, of_pools, strict=True):
            host = pair.host.planes[0].transpose(1, 2).flatten(0, 1)  # [token, layer, ...]
            pair.device.planes[0][:, indices.device_indices] = host[indices.host_indices].transpose(0, 1)


def test_the_prefix_used_longest_ago_makes_room(cache: PrefixCache) -> None:
    assert [op.node_id for op in cache.admit([0, 1])] == [0, 1]
    assert cache.admit([0]) == []
    assert [op.node_id for op in cache.admit([2, 2])] == [2], "in place of 1"
    assert cache.admit([0]) == []
    assert [op.node_id for op in cache.admit([1])] == [1]


def test_what_was_loaded_as_it_is_passes_the_check(cache: PrefixCache) -> None:
    load(cache, cache.admit([3, 1]))
    load(cache, cache.admit([2]))
    cache.check()


@pytest.mark.parametrize("pool", [0, 1])
def test_a_byte_that_was_not_loaded_is_found(cache: PrefixCache, pool: int) -> None:
    (op,) = cache.admit([3])
    load(cache, [op])
    cache.pairs[pool].device.planes[0][1, op.device_indices[-1]] = 0
    with pytest.raises(RuntimeError, match=f"prefix 3 .* pool {cache.pairs[pool].name!r}"):
        cache.check()


@pytest.mark.parametrize("name", WAYS)
def test_each_way_serves_every_request(name: str) -> None:
    requests = make_requests(SMALL.requests, SMALL.prefixes, SMALL.new_tokens, np.random.default_rng(0))
    cache = PrefixCache(
        SMALL.prefixes, SMALL.prefix_pages, SMALL.device_prefixes, SMALL.layers, np.random.default_rng(0)
    )
    with EmulatedDevice() as device:
        served = SMALL._serve(device, cache, WAYS[name], requests)  # which checks the bytes
    assert served["throughput"] * served["wall time"] == pytest.approx(SMALL.requests)
    assert served["TTFT p50"] <= served["TTFT p95"] <= served["TTFT p99"] <= served["wall time"]
    assert served["loaded"] >= SMALL.prefix_pages * 64


def test_what_was_not_loaded_as_it_is_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PooledBackend, "enqueue_layer", lambda *args: None)
    with pytest.raises(RuntimeError, match="was not loaded as it is"):
        SMALL.run(lambda: None)


def test_each_run_begins_with_nothing_on_the_device() -> None:
    cache = PrefixCache(4, 2, 4, SMALL.layers, np.random.default_rng(0))
    requests = [Request(prefix, 10) for prefix in range(4)]
    with EmulatedDevice() as device:
        loaded = [SMALL._serve(device, cache, WAYS[INLINE], requests)["loaded"] for _ in range(2)]
    assert loaded == [4 * 2 * 64] * 2


def test_a_layer_is_computed_behind_its_copies_and_only_in_the_first_chunk(cache: PrefixCache) -> None:
    model = Model(2, 1152, 132, 50.0, compute_us=1.0, chunk=10, request_cpu_ms=0.0, scale=1.0)
    waits: list[tuple[int, int]] = []
    launched: list[float] = []

    class WatchedDevice(EmulatedDevice):
        def launch(self, fn: object, *, duration: float = 0.0, **how: object) -> None:
            launched.append(duration)

    class Watched:
        def layer_landed(self, layer: int) -> bool:
            return True

        def done(self) -> bool:
            return True

        def wait_layer(self, layer: int) -> None:
            waits.append((layer, len(launched)))

    async def hand_out(ops: Sequence[LoadOp]) -> Burst:
        load(cache, ops)
        return Watched()

    with WatchedDevice() as device:
        engine = PrefillEngine(device, model, cache, hand_out, batch=1)
        asyncio.run(engine.serve([Request(0, 25)], concurrency=1))
    assert waits == [(0, 0), (1, 1)]
    assert launched == pytest.approx([5e-6, 5e-6, 15e-6])


def test_a_failing_hand_out_ends_the_run(cache: PrefixCache) -> None:
    async def hand_out(ops: Sequence[LoadOp]) -> Burst:
        raise OSError("no link")

    with EmulatedDevice() as device:
        engine = PrefillEngine(device, SMALL.model, cache, hand_out, batch=1)
        with pytest.raises(ExceptionGroup) as failed:
            asyncio.run(engine.serve([Request(0, 25)] * 3, concurrency=2))
    assert failed.group_contains(OSError, match="no link")


def test_every_change_is_that_of_the_sides_it_is_made_of() -> None:
    report = report_of(SMALL)

    changes = [row for row in report.rows if row.what.endswith("change in %")]
    assert [(row.what.removesuffix(", change in %"), row.case) for row in changes] == [
        (what, way) for way in WAYS if way != INLINE for what in REFERENCE
    ]
    for row in changes:
        way, inline = row.sides.values()
        assert row.result.values == tuple(100 * (a / b - 1) for a, b in zip(way.values, inline.values, strict=True))
        assert row.target is not None
    assert {row.case for row in report.rows if row.what == "blocked in hand-outs"} == set(WAYS)
    loaded = {row.result.values for row in report.rows if row.what == "tokens loaded"}
    assert len(loaded) == 1, "every way loads the same"


def test_the_link_takes_as_long_for_a_token_as_the_real_one_scaled() -> None:
    model = SMALL.model
    real_seconds = (1152 + 132) / 50e9
    assert sum(prefill_engine.EMULATED_BYTES) / model.emulated_bandwidth == pytest.approx(real_seconds * model.scale)


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "serving.json"

    few = ["--requests", "8", "--layers", "2", "--new-tokens", "100", "--batch", "2", "--prefixes", "4"]
    ended = run("bench", "serving", *few, "--prefix-pages", "2", "--rounds", "3", "--json", str(file))

    assert (ended.returncode, ended.stderr) == (0, "")
    written = json.loads(file.read_text())
    assert written["benchmark"] == "serving"
    assert written["parameters"]["new_tokens"] == 100
    assert any("emulated" in note for note in written["notes"])


def test_too_few_prefixes_on_the_device_are_named() -> None:
    ended = run("bench", "serving", "--device-prefixes", "3", "--batch", "4")

    assert ended.returncode == 2
    assert "--device-prefixes must be at least 4" in ended.stderr

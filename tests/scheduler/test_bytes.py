"""Random bytes through a scheduler and `PooledBackend`: what was named arrives, nothing else changes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched import (
    AckStatus,
    LoadHandle,
    LoadOp,
    SchedulerConfig,
    TransferScheduler,
    TransferTimeoutError,
    native,
)
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import Layout, PoolPair
from tests.builders import MakeScheduler
from tests.copy.builders import (
    DTYPES,
    LAYOUTS,
    expected_bytes,
    make_pair,
    page_lists,
    page_op,
    raw_bytes,
    token_in,
)

TIMEOUT = 30.0

CONFIGS = [
    pytest.param(SchedulerConfig(mode="inline"), id="inline"),
    pytest.param(SchedulerConfig(plane="python"), id="python"),
    pytest.param(
        SchedulerConfig(plane="native"),
        id="native",
        marks=pytest.mark.skipif(native.module is None, reason="needs the native part"),
    ),
]


class Traffic(NamedTuple):
    """Bursts between two pools, and the steps in which the h2d engine gets on with them.

    Attributes:
        pair: the pools that are loaded.
        twin: pools of the same bytes, to be loaded token by token.
        bursts: each a list of load ops, handed out in this order.
        bytes_per_token: of all planes and layers together.
        steps: numbers of layers, which the bursts' layers add up to.
    """

    pair: PoolPair
    twin: PoolPair
    bursts: list[list[LoadOp]]
    bytes_per_token: int
    steps: list[int]


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    page_size = draw(st.sampled_from((1, 2, 4)))
    num_layers, num_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    head_dim, dtype = draw(st.sampled_from((1, 3, 4))), draw(st.sampled_from(DTYPES))
    shape: dict[str, Any] = {
        "host_pages": draw(st.integers(1, 12)),
        "device_pages": draw(st.integers(1, 12)),
        "page_size": page_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "host_layout": draw(st.sampled_from(LAYOUTS)),
        "seed": draw(st.integers(0, 99)),
    }
    pair, twin = make_pair(**shape), make_pair(**shape)
    bursts = [draw(burst_ops(pair)) for _ in range(draw(st.integers(1, 3)))]
    num_copies = num_layers * len(bursts)
    cuts = sorted(draw(st.sets(st.integers(0, num_copies))) | {0, num_copies})
    steps = [end - start for start, end in itertools.pairwise(cuts)]
    return Traffic(pair, twin, bursts, 2 * num_layers * num_heads * head_dim * dtype.itemsize, steps)


@st.composite
def burst_ops(draw: st.DrawFn, pair: PoolPair) -> list[LoadOp]:
    """Ops of one burst: different destinations, any sources."""
    device_pages = draw(page_lists(pair.device.num_rows))
    sources = st.integers(0, pair.host.num_rows - 1)
    host_pages = draw(st.lists(sources, min_size=len(device_pages), max_size=len(device_pages)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(device_pages) - 1)), max_size=2)) | {0, len(device_pages)})
    return [
        page_op(node_id, host_pages[start:end], device_pages[start:end], pair.device.page_size)
        for node_id, (start, end) in enumerate(itertools.pairwise(cuts))
    ]


def land(pair: PoolPair, ops: Sequence[LoadOp], layer: int) -> None:
    """Load one layer token by token, by the documented shape of each layout."""
    page_size = pair.device.page_size
    for plane, host_plane in zip(pair.device.planes, pair.host.planes, strict=True):
        for op in ops:
            for src, dst in zip(op.host_indices.tolist(), op.device_indices.tolist(), strict=True):
                token_in(plane, layer, dst, page_size).copy_(token_in(host_plane, layer, src, page_size))


@pytest.mark.parametrize("config", CONFIGS)
@settings(deadline=None, max_examples=40)  # a busy machine is no failure
@given(traffic=traffic())
def test_the_bytes_of_every_layer_arrive_in_order_and_no_other_byte_changes(
    config: SchedulerConfig, traffic: Traffic
) -> None:
    pair, twin = traffic.pair, traffic.twin
    host = raw_bytes(pair.host)
    copies = iter([(ops, layer) for ops in traffic.bursts for layer in range(pair.num_layers)])
    with structlog.testing.capture_logs(), EmulatedDevice() as device:
        with TransferScheduler(PooledBackend([pair]), runtime=device, config=config) as scheduler:
            device.hold("h2d")
            try:
                handles = [hand_out(scheduler, ops) for ops in traffic.bursts]
                for step in traffic.steps:
                    device.step("h2d", step)
                    for _ in range(step):
                        land(twin, *next(copies))
                    assert raw_bytes(pair.device) == raw_bytes(twin.device)
                acks = [handle.result(TIMEOUT) for handle in handles]
            finally:
                device.resume("h2d")  # or the scheduler would not close

    assert raw_bytes(pair.device) == raw_bytes(twin.device)
    assert raw_bytes(pair.host) == host
    assert [ack.status for ack in acks] == [AckStatus.OK] * len(handles)
    num_tokens = [sum(op.num_tokens for op in ops) for ops in traffic.bursts]
    assert [ack.num_tokens for ack in acks] == num_tokens
    assert [ack.num_tokens_by_pool for ack in acks] == [{"kv": number} for number in num_tokens]
    assert [ack.num_bytes for ack in acks] == [number * traffic.bytes_per_token for number in num_tokens]


def hand_out(scheduler: TransferScheduler, ops: Sequence[LoadOp]) -> LoadHandle:
    for op in ops:
        scheduler.load(op)
    handle = scheduler.start_loading_sync(TIMEOUT)
    assert handle is not None
    return handle


# -- one layer at a time ------------------------------------------------------------------------------------------

OPS = [page_op(1, [5, 2], [1, 6]), page_op(2, [7], [0])]


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_bytes_of_a_layer_are_there_when_it_was_awaited_and_those_of_later_layers_are_not(
    device: EmulatedDevice, make_scheduler: MakeScheduler, layout: Layout, mode: str
) -> None:
    pair = make_pair(num_layers=3, host_layout=layout)
    after = [expected_bytes(pair, OPS, layers=range(num_layers)) for num_layers in range(4)]
    scheduler = make_scheduler(PooledBackend([pair]), mode=mode)
    device.hold("h2d")
    handle = hand_out(scheduler, OPS)
    assert raw_bytes(pair.device) == after[0]
    for layer in range(3):
        landed = asyncio.create_task(handle.layer(layer))
        await asyncio.sleep(0)
        assert not landed.done()
        stepping = asyncio.create_task(asyncio.to_thread(device.step, "h2d"))
        await asyncio.wait_for(landed, TIMEOUT)
        assert raw_bytes(pair.device) == after[layer + 1]
        await stepping


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_a_layer_are_there_when_wait_layer_has_returned_and_those_of_later_layers_are_not(
    device: EmulatedDevice, make_scheduler: MakeScheduler, layout: Layout, mode: str
) -> None:
    pair = make_pair(num_layers=3, host_layout=layout)
    after = [expected_bytes(pair, OPS, layers=range(num_layers)) for num_layers in range(4)]
    scheduler = make_scheduler(PooledBackend([pair]), mode=mode)
    device.hold("h2d")
    handle = hand_out(scheduler, OPS)
    seen: SimpleQueue[bytes] = SimpleQueue()

    def forward() -> None:
        for layer in range(3):
            handle.wait_layer(layer, TIMEOUT)
            seen.put(raw_bytes(pair.device))

    with ThreadPoolExecutor() as pool:
        running = pool.submit(forward)
        for layer in range(3):
            assert seen.empty()
            device.step("h2d")
            assert seen.get(timeout=TIMEOUT) == after[layer + 1]
        running.result(TIMEOUT)


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_kernel_on_a_stream_that_waits_for_a_layer_reads_its_bytes(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    pair = make_pair(num_layers=3)
    after = expected_bytes(pair, OPS, layers=[0, 1])
    scheduler = make_scheduler(PooledBackend([pair]), mode=mode)
    device.hold("h2d")
    handle = hand_out(scheduler, OPS)
    seen: list[bytes] = []
    compute = device.Stream()
    with device.stream(compute):
        handle.wait_layer(1, TIMEOUT)
        device.launch(lambda: seen.append(raw_bytes(pair.device)))
    device.step("h2d", 2)
    compute.synchronize()

    assert seen == [after]


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_later_burst_to_the_same_pages_wins(device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str) -> None:
    pair = make_pair()
    first, second = page_op(1, [5, 2], [1, 6]), page_op(2, [7], [6])
    twin = make_pair()
    for op in (first, second):
        for layer in range(pair.num_layers):
            land(twin, [op], layer)
    scheduler = make_scheduler(PooledBackend([pair]), mode=mode)
    hand_out(scheduler, [first])
    hand_out(scheduler, [second]).result(TIMEOUT)

    assert raw_bytes(pair.device) == raw_bytes(twin.device)


def test_device_indices_may_be_written_until_the_start_event(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    pair = make_pair()
    right = torch.arange(4, 8)
    wanted = expected_bytes(pair, [LoadOp(1, torch.arange(4), right)])
    scheduler = make_scheduler(PooledBackend([pair]))
    late = torch.full((4,), -1)
    device.hold("compute")
    with device.stream(device.Stream()):
        device.launch(lambda: late.copy_(right))
        handle = hand_out(scheduler, [LoadOp(1, torch.arange(4), late)])
    with pytest.raises(TransferTimeoutError):  # read too early, it would fail of the index -1
        handle.result(timeout=0.05)
    device.resume("compute")
    handle.result(TIMEOUT)

    assert raw_bytes(pair.device) == wanted

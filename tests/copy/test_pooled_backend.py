"""Bursts through `PooledBackend` and its submitters, checked on every byte of the pools."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.pooled import PooledBackend
from hicache_sched.copy.staged import StagedSubmitter
from hicache_sched.copy.submit import BatchSubmitter, Submitter
from hicache_sched.device.batched_copy import EmulatedBatchedCopy
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.errors import HiCacheSchedError, InvalidLoadError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import Layout, Pool, PoolPair
from tests.copy.builders import (
    LAYOUTS,
    Burst,
    Point,
    bound,
    bursts,
    expected_bytes,
    load,
    load_with_torch,
    make_pair,
    move,
    page_op,
    raw_bytes,
    staged,
    token_op,
)

# -- bytes ----------------------------------------------------------------------------------------------------


@settings(deadline=None)  # a busy machine is no failure
@given(bursts())
def test_every_byte_named_arrives_and_no_other_changes(point: Point, burst: Burst) -> None:
    wanted, host = expected_bytes(burst.pair, burst.ops), raw_bytes(burst.pair.host)

    load(burst.pair, burst.ops, point)

    assert raw_bytes(burst.pair.device) == wanted
    assert raw_bytes(burst.pair.host) == host


@settings(deadline=None)  # a busy machine is no failure
@given(bursts())
def test_the_torch_submitter_moves_the_same_bytes(point: Point, burst: Burst) -> None:
    wanted, host = expected_bytes(burst.pair, burst.ops), raw_bytes(burst.pair.host)

    load_with_torch(burst.pair, burst.ops, point.device)

    assert raw_bytes(burst.pair.device) == wanted
    assert raw_bytes(burst.pair.host) == host


def test_a_layer_is_one_operation_that_moves_k_and_v_of_that_layer_only() -> None:
    with EmulatedDevice() as device:
        point = Point(DeviceBinding(device))
        pair, ops = make_pair(num_layers=3), [page_op(1, [5, 2], [1, 6])]
        before, first = raw_bytes(pair.device), expected_bytes(pair, ops, layers=[0])
        both = expected_bytes(pair, ops, layers=[0, 1])
        backend = bound(pair, point)
        prepared = backend.prepare(ops)
        device.hold("h2d")
        with device.stream(point.h2d_stream):
            for layer in range(3):
                backend.enqueue_layer(prepared, layer)
        assert raw_bytes(pair.device) == before

        device.step("h2d")
        assert raw_bytes(pair.device) == first
        device.step("h2d")
        assert raw_bytes(pair.device) == both


def test_device_indices_are_read_behind_the_work_that_writes_them(point: Point) -> None:
    pair, op = make_pair(), page_op(1, [5, 2], [1, 6])
    wanted, right = expected_bytes(pair, [op]), op.device_indices.clone()
    op.device_indices.fill_(-1)
    with point.runtime.stream(point.index_stream):
        point.runtime.launch(lambda: op.device_indices.copy_(right), duration=0.02)

    load(pair, [op], point)

    assert raw_bytes(pair.device) == wanted


BAD_OPS = {
    "host index out of range": token_op(2, [32, 33, 34, 35], [0, 1, 2, 3]),
    "device index out of range": token_op(2, [0, 1, 2, 3], [32, 33, 34, 35]),
    "negative index": token_op(2, [0, 1, 2, 3], [-4, -3, -2, -1]),
    "destination named twice": page_op(2, [0], [6]),
    "cut page": token_op(2, [0, 1], [0, 1]),
    "unaligned run": token_op(2, [0, 1, 2, 3], [1, 2, 3, 4]),
}


@pytest.mark.parametrize("bad", BAD_OPS.values(), ids=BAD_OPS.keys())
def test_a_burst_with_a_bad_op_fails_before_any_byte_is_copied(point: Point, bad: LoadOp) -> None:
    pair = make_pair()
    before = raw_bytes(pair.device)

    with pytest.raises(InvalidLoadError, match="node 2"):
        load(pair, [page_op(1, [5], [6]), bad], point)

    assert raw_bytes(pair.device) == before


# -- the backend ----------------------------------------------------------------------------------------------


def test_a_prepared_burst_says_how_many_bytes_it_moves(point: Point) -> None:
    pair = make_pair(num_layers=3, page_size=4, num_heads=1, head_dim=4, dtype=torch.float16)

    prepared = bound(pair, point).prepare([page_op(1, [5, 2], [1, 6])])

    assert prepared.num_bytes == 2 * 3 * (2 * 4) * (1 * 4) * 2  # planes, layers, tokens, elements, bytes each


def test_the_backend_is_named_and_layered_as_its_pair() -> None:
    backend = PooledBackend([make_pair(num_layers=3)])

    assert (backend.num_layers, backend.pool_names) == (3, ("kv",))


def test_a_backend_without_a_pair_is_refused() -> None:
    with pytest.raises(HiCacheSchedError, match="needs a pool pair"):
        PooledBackend([])


def test_preparing_before_bind_says_what_is_missing() -> None:
    with pytest.raises(HiCacheSchedError, match="not bound"):
        PooledBackend([make_pair()]).prepare([page_op(1, [0], [0])])


def test_a_device_pool_that_is_not_on_the_emulated_device_is_refused(point: Point) -> None:
    host = make_pair().host
    elsewhere = Pool.mha(8, 4, 2, 1, 4, torch.float16, device="meta")

    with pytest.raises(HiCacheSchedError, match="the device pool is on meta"):
        bound(PoolPair("kv", host, elsewhere), point)


class OtherRuntime:
    """A runtime that is no emulated device."""

    def current_device(self) -> int:
        return 0

    def Stream(self, device: object = None) -> object:  # noqa: N802 - torch's name
        return object()


def test_a_device_pool_in_cpu_memory_is_refused_by_a_real_device() -> None:
    with pytest.raises(HiCacheSchedError, match="the device pool is on cpu but the scheduler runs on OtherRuntime:0"):
        PooledBackend([make_pair()]).bind(Point(DeviceBinding(OtherRuntime())))


def test_the_memory_of_a_bursts_addresses_is_used_again_once_it_has_landed(point: Point) -> None:
    backend = PooledBackend([make_pair()])
    move(backend, [page_op(1, [5, 2], [1, 6])], range(2), point)
    submitter = backend._submitter
    assert isinstance(submitter, BatchSubmitter)
    free = submitter._buffers.num_free

    for _ in range(3):
        move(backend, [page_op(1, [5, 2], [1, 6])], range(2), point)

    assert submitter._buffers.num_free == free == 2, "one for the addresses of each side"


# -- what a burst costs ---------------------------------------------------------------------------------------


def calls_made(work: Callable[[], object]) -> int:
    """Python and C calls that `work` makes on this thread."""
    count = 0

    def tick(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # its callbacks would be counted, too
    sys.setprofile(tick)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["emulated", "torch"])
def test_planning_and_submitting_make_the_same_calls_for_two_pages_and_for_a_thousand(
    kind: str, layout: Layout, page_size: int
) -> None:
    def cost(num_pages: int) -> int:
        pair = make_pair(host_pages=1024, device_pages=1024, page_size=page_size, head_dim=1, host_layout=layout)
        with EmulatedDevice() as device:
            binding = DeviceBinding(device)
            layers = [range(pair.num_layers)]
            submitter: Submitter = BatchSubmitter(EmulatedBatchedCopy(device), ["kv"], pair)
            if kind == "torch":
                submitter = StagedSubmitter([pair], layers, binding, "it is tested")
            pages = list(range(num_pages))[::-1]
            merged = merge_ops([page_op(1, pages, pages, page_size)], binding, ["kv"])
            planner = BurstPlanner([pair], layers)
            device.hold("h2d")  # its thread does not take part
            with device.stream(device.Stream()):

                def plan_and_submit() -> None:
                    copies = submitter.begin(planner.plan(merged))
                    for layer in range(pair.num_layers):
                        copies.submit_layer(layer)

                return calls_made(plan_and_submit)

    assert cost(2) == cost(1024)


# -- staging --------------------------------------------------------------------------------------------------


class LoggedEvent:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def record(self, stream: object = None) -> None:
        self._log.append(f"record {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"synchronize {self._name}")


class LoggingDevice(DeviceBinding):
    """A binding whose events only write down what is done to them."""

    def __init__(self, runtime: EmulatedDevice) -> None:
        super().__init__(runtime)
        self.log: list[str] = []
        self.num_events = 0

    def new_event(self, *, timed: bool = False) -> Any:
        self.num_events += 1
        return LoggedEvent(self.log, "ab"[self.num_events - 1])


def test_a_staging_buffer_is_filled_again_only_after_its_copy_has_landed(emulated: EmulatedDevice) -> None:
    device = LoggingDevice(emulated)
    copies = staged(make_pair(num_layers=4), [page_op(1, [5, 2], [1, 6])], device)

    for layer in range(4):
        copies.submit_layer(layer)

    assert device.log == ["record a", "record b", "synchronize a", "record a", "synchronize b", "record b"]


def test_a_burst_that_is_one_run_on_both_sides_needs_no_staging(emulated: EmulatedDevice) -> None:
    device = LoggingDevice(emulated)
    pair, op = make_pair(host_layout="layer_first"), page_op(1, [2, 3], [5, 6])
    wanted = expected_bytes(pair, [op])
    copies = staged(pair, [op], device)

    for layer in range(2):
        copies.submit_layer(layer)

    assert raw_bytes(pair.device) == wanted
    assert device.log == []

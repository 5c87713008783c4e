"""Batches through `cuMemcpyBatchAsync`, on a driver that checks every argument and copies in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.pooled import PooledBackend
from hicache_sched.copy.submit import BatchSubmitter
from hicache_sched.device.batched_copy import (
    ORDER_ANY,
    ORDER_STREAM,
    BatchError,
    NoBatchedCopy,
    batched_copy_for,
)
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.load_op import LoadOp, PoolTransfer
from hicache_sched.pools import PoolPair
from tests.copy.any_pool import MAKERS, AnyBurst, AnyPool, Sizes, any_bursts, fill
from tests.copy.builders import Point, make_pair, page_op, tokens_of
from tests.driver.plane import batched, host_ranges
from tests.driver.stand_in import StandIn, Stream, cuda_like

SIZES = Sizes(planes=(6, 4), page_size=4, num_layers=3, dtype=torch.float16)


def load(driver: StandIn, pairs: Sequence[PoolPair], ops: Sequence[LoadOp], num_layers: int) -> None:
    """Move a burst; the driver has to know the memory."""
    local = [[layer if layer < pair.num_layers else None for layer in range(num_layers)] for pair in pairs]
    names = [pair.name for pair in pairs]
    plan = BurstPlanner(pairs, local).plan(merge_ops(ops, cuda_like(), names))
    copies = BatchSubmitter(batched(driver, pairs), names, pairs).begin(plan)
    for layer in range(num_layers):
        copies.submit_layer(layer)
    copies.release()


def a_burst(host_kind: str, device_kind: str) -> AnyBurst:
    host, device = fill(MAKERS[host_kind](SIZES, 6), 1), fill(MAKERS[device_kind](SIZES, 6), 2)
    ops = [page_op(1, [3, 4], [5, 0]), page_op(2, [5, 3], [1, 2])]
    return AnyBurst(PoolPair("kv", host.pool, device.pool), host, device, ops)


# -- what is called -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", MAKERS)
@pytest.mark.parametrize("device", MAKERS)
@pytest.mark.parametrize(
    ("version", "has_failure_index"), [(12080, True), (13000, True), (13000, False)], ids=["12.8", "13.0", "only 13.0"]
)
def test_every_kind_of_pool_is_loaded_into_every_other_by_one_valid_call_a_layer(
    driver: StandIn, host: str, device: str, version: int, has_failure_index: bool
) -> None:
    driver.reset(version, has_failure_index=has_failure_index)
    burst = a_burst(host, device)
    driver.knows(host=burst.host.memory, device=burst.device.memory)
    expected, host_before = burst.expected_bytes(), burst.host.raw_bytes()

    load(driver, [burst.pair], burst.ops, SIZES.num_layers)

    assert burst.device.raw_bytes() == expected
    assert burst.host.raw_bytes() == host_before
    assert driver.lib.stand_in_calls() == SIZES.num_layers


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # a busy machine is no failure; the driver is reset for each example
@given(burst=any_bursts())
def test_the_driver_moves_every_byte_named_and_no_other(driver: StandIn, burst: AnyBurst) -> None:
    driver.reset()
    driver.knows(host=burst.host.memory, device=burst.device.memory)
    expected = burst.expected_bytes()

    load(driver, [burst.pair], burst.ops, burst.pair.num_layers)

    assert burst.device.raw_bytes() == expected


@pytest.mark.parametrize(("stable_source", "order"), [(True, ORDER_ANY), (False, ORDER_STREAM)])
def test_the_source_is_read_at_any_time_only_where_it_is_stable(
    driver: StandIn, stable_source: bool, order: int
) -> None:
    burst = a_burst("layer_first", "layer_first")
    driver.knows(host=burst.host.memory, device=burst.device.memory)
    plan = BurstPlanner([burst.pair], [range(3)]).plan(merge_ops(burst.ops, cuda_like(), ["kv"]))
    copy = batched(driver, [burst.pair], stable_source=stable_source)

    BatchSubmitter(copy, ["kv"], None).begin(plan).submit_layer(0)

    assert driver.lib.stand_in_source_order() == order


@pytest.mark.parametrize("stable_host", [True, False])
def test_whether_the_source_is_stable_is_for_the_user_of_the_backend_to_say(
    monkeypatch: pytest.MonkeyPatch, stable_host: bool
) -> None:
    asked: list[dict[str, object]] = []

    def answer(*args: object, **kwargs: object) -> NoBatchedCopy:
        asked.append(kwargs)
        return NoBatchedCopy("it is only asked")

    monkeypatch.setattr("hicache_sched.copy.pooled.batched_copy_for", answer)
    with EmulatedDevice() as device:
        PooledBackend([make_pair()], stable_host=stable_host).bind(Point(DeviceBinding(device)))

    assert asked == [{"stable_source": stable_host}]


def test_the_driver_is_asked_with_torchs_context_current(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(driver, "use_primary_context", asked.append)
    burst = a_burst("layer_first", "layer_first")
    driver.knows(host=burst.host.memory)

    batched(driver, [burst.pair])

    assert asked == [0]


def test_rows_that_follow_each_other_on_both_sides_are_one_copy(driver: StandIn) -> None:
    burst = a_burst("layer_first", "layer_first")
    driver.knows(host=burst.host.memory, device=burst.device.memory)

    load(driver, [burst.pair], [page_op(1, [1, 2, 3], [0, 1, 2]), page_op(2, [4], [3])], 3)

    assert driver.lib.stand_in_copies() == 2  # K and V


# -- failures -----------------------------------------------------------------------------------------------------


def side_pool() -> tuple[PoolPair, AnyPool, AnyPool]:
    sizes = Sizes(planes=(8,), page_size=1, num_layers=3, dtype=torch.uint8)
    host, device = fill(MAKERS["layer_first"](sizes, 6), 3), fill(MAKERS["layer_first"](sizes, 6), 4)
    return PoolPair("states", host.pool, device.pool), host, device


@pytest.mark.parametrize("has_failure_index", [True, False])
def test_a_copy_that_fails_is_named_by_pool_plane_layer_and_row(driver: StandIn, has_failure_index: bool) -> None:
    driver.reset(13000, has_failure_index=has_failure_index)
    burst = a_burst("page_first_direct", "layer_first")
    states, states_host, states_device = side_pool()
    driver.knows(host=[*burst.host.memory, *states_host.memory], device=[*burst.device.memory, *states_device.memory])
    ops = [page_op(1, [3, 4], [5, 0]), LoadOp(2, tokens_of([5], 4), tokens_of([1], 4), ())]
    ops.append(LoadOp(3, tokens_of([], 4), tokens_of([], 4), (PoolTransfer("states", *map(torch.tensor, ([2], [4]))),)))
    named = {
        0: "pool 'kv', plane 0, layer 0, row 5 of the device pool from row 3 of the host pool",
        5: "pool 'kv', plane 1, layer 0, row 1 of the device pool from row 5 of the host pool",
        6: "pool 'states', plane 0, layer 0, row 4 of the device pool from row 2 of the host pool",
    }
    before = burst.device.raw_bytes()

    for copy, where in named.items():
        driver.fail(copy, 2)
        with pytest.raises(BatchError) as failed:
            load(driver, [burst.pair, states], ops, 3)
        words = where if has_failure_index else "layer 0"
        assert str(failed.value) == f"{words}: cuMemcpyBatchAsync failed with CUDA_ERROR_OUT_OF_MEMORY"

    assert burst.device.raw_bytes() == before


def test_a_failure_in_a_layer_that_lacks_a_plane_names_the_right_copy(driver: StandIn) -> None:
    burst = a_burst("layer_first", "page_first")
    states, states_host, states_device = side_pool()
    driver.knows(host=[*burst.host.memory, *states_host.memory], device=[*burst.device.memory, *states_device.memory])
    ops = [LoadOp(1, tokens_of([3], 4), tokens_of([5], 4), (PoolTransfer("states", *map(torch.tensor, ([2], [4]))),))]
    pairs = [burst.pair, states]
    plan = BurstPlanner(pairs, [[None, 0, 1, 2], [0, None, 1, 2]]).plan(merge_ops(ops, cuda_like(), ["kv", "states"]))
    copies = BatchSubmitter(batched(driver, pairs), ["kv", "states"], None).begin(plan)
    driver.fail(0, 999)

    with pytest.raises(BatchError, match=r"^pool 'states', plane 0, layer 0, row 4 .*: .* failed with CUresult 999$"):
        copies.submit_layer(0)
    with pytest.raises(BatchError, match=r"^pool 'kv', plane 0, layer 1, row 20 of the device pool from row 3 of"):
        copies.submit_layer(1)


def test_memory_that_the_driver_does_not_know_is_refused_and_named(driver: StandIn) -> None:
    burst = a_burst("layer_first", "layer_first")
    driver.knows(host=burst.host.memory, device=burst.device.memory[:1])

    with pytest.raises(BatchError, match=r"pool 'kv', plane 1, layer 0, row 5 of the device pool.*INVALID_VALUE"):
        load(driver, [burst.pair], burst.ops, 3)


# -- registrations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", MAKERS)
@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 40])
def test_no_copy_reads_across_a_border_of_two_registrations(driver: StandIn, host: str, pieces: int) -> None:
    burst = a_burst(host, "layer_first")
    driver.knows(device=burst.device.memory)
    for tensor in burst.host.memory:
        driver.knows(host=tensor.view(torch.uint8).flatten().tensor_split(pieces))
    expected = burst.expected_bytes()

    load(driver, [burst.pair], [page_op(1, [3, 4], [5, 0]), page_op(2, [5, 3], [1, 2])], 3)

    assert burst.device.raw_bytes() == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(burst=any_bursts(), data=st.data())
def test_wherever_registrations_meet_every_byte_arrives(driver: StandIn, burst: AnyBurst, data: st.DataObject) -> None:
    driver.reset()
    driver.knows(device=burst.device.memory)
    for tensor in burst.host.memory:
        cuts = data.draw(st.lists(st.integers(1, max(1, tensor.nbytes - 1)), max_size=5, unique=True))
        parts = tensor.view(torch.uint8).flatten().tensor_split(sorted(cuts))
        driver.knows(host=[part for part in parts if len(part)])
    expected = burst.expected_bytes()

    load(driver, [burst.pair], burst.ops, burst.pair.num_layers)

    assert burst.device.raw_bytes() == expected


def test_a_copy_that_is_cut_at_a_border_and_fails_is_named_as_a_whole(driver: StandIn) -> None:
    burst = a_burst("layer_first", "layer_first")
    driver.knows(device=burst.device.memory)
    for tensor in burst.host.memory:
        driver.knows(host=tensor.view(torch.uint8).flatten().split(20))
    row = SIZES.page_size * SIZES.planes[0] * 2
    parts_of_first = len(np.unique(np.arange(3 * row, 4 * row) // 20))
    driver.fail(parts_of_first, 1)

    with pytest.raises(BatchError, match="plane 0, layer 0, row 0 of the device pool from row 4 of the host pool"):
        load(driver, [burst.pair], [page_op(1, [3, 4], [5, 0])], 3)


def test_a_driver_that_does_not_tell_ranges_is_taken_to_have_one_registration(driver: StandIn) -> None:
    burst = a_burst("page_first_direct", "layer_first")
    driver.knows(host=burst.host.memory, device=burst.device.memory)
    driver.lib.stand_in_hide_ranges()
    expected = burst.expected_bytes()

    load(driver, [burst.pair], burst.ops, 3)

    assert burst.device.raw_bytes() == expected


# -- when there are no batches ------------------------------------------------------------------------------------


def reason(driver: StandIn, pair: PoolPair, stream: Stream | None = None) -> str:
    copy = batched_copy_for(cuda_like(), stream or Stream(), host_ranges([pair]), stable_source=False, driver=driver)
    assert isinstance(copy, NoBatchedCopy)
    return copy.reason


def test_an_older_driver_makes_no_batches(driver: StandIn) -> None:
    driver.reset(12040)

    assert reason(driver, a_burst("layer_first", "layer_first").pair) == (
        "the driver supports CUDA 12.4 and batches need 12.8"
    )


def test_a_default_stream_takes_no_batches(driver: StandIn) -> None:
    assert "default stream" in reason(driver, a_burst("layer_first", "layer_first").pair, Stream(0))


@pytest.mark.parametrize("part", ["nothing", "the first half", "all but the last byte"])
@pytest.mark.parametrize("tells_ranges", [True, False])
def test_memory_that_is_not_all_page_locked_is_not_read_in_batches(
    driver: StandIn, part: str, tells_ranges: bool
) -> None:
    burst = a_burst("page_first_direct", "layer_first")
    for tensor in burst.host.memory:
        raw = tensor.view(torch.uint8).flatten()
        locked = {"nothing": 0, "the first half": len(raw) // 2, "all but the last byte": len(raw) - 1}[part]
        if locked:
            driver.knows(host=[raw[:locked]])
    if not tells_ranges:
        driver.lib.stand_in_hide_ranges()

    assert reason(driver, burst.pair) == "a host pool is not page-locked"


def test_a_runtime_that_is_not_cuda_makes_no_batches(driver: StandIn) -> None:
    device = cuda_like()
    device.is_cuda = False

    copy = batched_copy_for(device, Stream(), (), stable_source=False, driver=driver)

    assert copy == NoBatchedCopy("CudaLikeRuntime:0 is no CUDA device")

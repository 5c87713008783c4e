"""The native data plane on CUDA: its calls of the driver, on one that checks their arguments and lists them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_sched import native
from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.submit import BatchSubmitter
from hicache_sched.device.batched_copy import ORDER_ANY, ORDER_STREAM, BatchError
from hicache_sched.device.cuda_driver import CudaDriverError
from hicache_sched.load_op import LoadOp, PoolTransfer
from hicache_sched.native_plane import NativeLayersInFlight
from hicache_sched.pools import PoolPair
from tests.copy.any_pool import MAKERS, AnyBurst, AnyPool, Sizes, any_bursts, bytes_after, fill
from tests.copy.builders import page_op, tokens_of
from tests.driver.plane import Events, Sut, Where, batched, place
from tests.driver.stand_in import ENGINE_STREAM, INDEX_STREAM, STREAM, Copy, StandIn, cuda_like

pytestmark = pytest.mark.skipif(native.module is None, reason="needs the native part")

SIZES = Sizes(planes=(6, 4), page_size=4, num_layers=3, dtype=torch.float16)
VERSIONS = pytest.mark.parametrize(
    ("version", "has_failure_index"), [(12080, True), (13000, True), (13000, False)], ids=["12.8", "13.0", "only 13.0"]
)
FIRST_CAPACITY = 1 << 15  # values that the page-locked memory first has room for
GONE = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED


@pytest.fixture
def driver(driver: StandIn) -> StandIn:
    driver.more_streams()
    return driver


def a_burst(host_kind: str = "layer_first", device_kind: str = "layer_first") -> AnyBurst:
    host, device = fill(MAKERS[host_kind](SIZES, 6), 1), fill(MAKERS[device_kind](SIZES, 6), 2)
    ops = [page_op(1, [3, 4], [5, 0]), page_op(2, [5, 3], [1, 2])]
    return AnyBurst(PoolPair("kv", host.pool, device.pool), host, device, ops)


def knows(driver: StandIn, burst: AnyBurst) -> None:
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, *(op.device_indices for op in burst.ops)])


def side_pool() -> tuple[PoolPair, AnyPool, AnyPool]:
    sizes = Sizes(planes=(8,), page_size=1, num_layers=3, dtype=torch.uint8)
    host, device = fill(MAKERS["layer_first"](sizes, 6), 3), fill(MAKERS["layer_first"](sizes, 6), 4)
    return PoolPair("states", host.pool, device.pool), host, device


def copies_in_python(driver: StandIn, burst: AnyBurst) -> list[list[Copy]]:
    """What the Python plane has the driver copy, layer by layer; undone."""
    before = [tensor.clone() for tensor in burst.device.memory]
    num_layers = burst.pair.num_layers
    plan = BurstPlanner([burst.pair], [range(num_layers)]).plan(merge_ops(burst.ops, cuda_like(), ["kv"]))
    copies = BatchSubmitter(batched(driver, [burst.pair]), ["kv"], None).begin(plan)
    driver.forget_calls()
    for layer in range(num_layers):
        copies.submit_layer(layer)
    put_back(burst, before)
    return [call.copies for call in driver.calls("cuMemcpyBatchAsync")]


def put_back(burst: AnyBurst, before: Sequence[torch.Tensor]) -> None:
    for tensor, old in zip(burst.device.memory, before, strict=True):
        tensor.copy_(old)


def names(driver: StandIn) -> list[str]:
    return [call.name for call in driver.calls()]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run on a thread of its own; what it returns is in the list afterwards."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
    thread.start()
    return thread, returned


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# -- what is called -----------------------------------------------------------------------------------------------


def layer_calls(events: Events) -> list[tuple[str, tuple[int, ...]]]:
    start, *layers, finish = events.all.tolist()
    calls: list[tuple[str, tuple[int, ...]]] = [("cuStreamWaitEvent", (STREAM, events.start))]
    if events.fence:
        calls.append(("cuStreamWaitEvent", (STREAM, events.fence)))
    calls.append(("cuEventRecord", (start, STREAM)))
    for event in layers:
        calls.append(("cuMemcpyBatchAsync", (STREAM, ORDER_STREAM)))
        calls.append(("cuEventRecord", (event, STREAM)))
    return [*calls, ("cuEventRecord", (finish, STREAM))]


def test_indices_are_read_behind_the_start_and_then_one_batch_goes_out_for_each_layer(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    _, events = sut.hand_over(burst.ops, fence=True)

    assert sut.submit() is None

    calls = [call[:2] for call in driver.calls()]
    read_done = calls[-len(layer_calls(events)) - 1][1][0]
    assert calls == [
        ("cuEventSynchronize", (events.start,)),
        ("cuStreamWaitEvent", (INDEX_STREAM, events.start)),
        ("cuCtxGetCurrent", ()),
        ("cuEventCreate", (3,)),  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
        ("cuMemHostAlloc", (8 * FIRST_CAPACITY, 1)),  # CU_MEMHOSTALLOC_PORTABLE
        *(("cuMemcpyDtoHAsync_v2", (op.device_indices.data_ptr(), 64, INDEX_STREAM)) for op in burst.ops),
        ("cuEventRecord", (read_done, INDEX_STREAM)),
        ("cuEventSynchronize", (read_done,)),
        *layer_calls(events),
    ]


def test_indices_in_cpu_memory_are_not_waited_for(driver: StandIn) -> None:
    burst = a_burst()
    driver.knows(host=burst.host.memory, device=burst.device.memory)
    sut = Sut(driver, [burst.pair])
    expected = burst.expected_bytes()
    _, events = sut.hand_over(burst.ops, on_device=False)

    assert sut.submit() is None

    assert [call[:2] for call in driver.calls()] == [
        ("cuStreamWaitEvent", (INDEX_STREAM, events.start)),
        *layer_calls(events),
    ]
    assert burst.device.raw_bytes() == expected


@pytest.mark.parametrize("host", MAKERS)
@pytest.mark.parametrize("device", MAKERS)
@VERSIONS
def test_every_kind_of_pool_is_loaded_into_every_other_by_the_batches_of_the_python_plane(
    driver: StandIn, host: str, device: str, version: int, has_failure_index: bool
) -> None:
    driver.reset(version, has_failure_index=has_failure_index)
    driver.more_streams()
    burst = a_burst(host, device)
    knows(driver, burst)
    expected, batches = burst.expected_bytes(), copies_in_python(driver, burst)

    assert Sut(driver, [burst.pair]).load(burst.ops) is None

    assert burst.device.raw_bytes() == expected
    assert [call.copies for call in driver.calls("cuMemcpyBatchAsync")] == batches


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(burst=any_bursts(), on_device=st.booleans(), data=st.data())
def test_wherever_registrations_meet_the_batches_are_those_of_the_python_plane(
    driver: StandIn, burst: AnyBurst, on_device: bool, data: st.DataObject
) -> None:
    driver.reset()
    driver.more_streams()
    driver.knows(device=[*burst.device.memory, *(op.device_indices for op in burst.ops)])
    for tensor in burst.host.memory:
        cuts = data.draw(st.lists(st.integers(1, max(1, tensor.nbytes - 1)), max_size=5, unique=True))
        parts = tensor.view(torch.uint8).flatten().tensor_split(sorted(cuts))
        driver.knows(host=[part for part in parts if len(part)])
    expected, batches = burst.expected_bytes(), copies_in_python(driver, burst)

    assert Sut(driver, [burst.pair]).load(burst.ops, on_device=on_device) is None

    assert burst.device.raw_bytes() == expected
    assert [call.copies for call in driver.calls("cuMemcpyBatchAsync")] == batches


@pytest.mark.parametrize(("stable_source", "order"), [(True, ORDER_ANY), (False, ORDER_STREAM)])
def test_the_source_is_read_at_any_time_only_where_it_is_stable(
    driver: StandIn, stable_source: bool, order: int
) -> None:
    burst = a_burst()
    knows(driver, burst)

    assert Sut(driver, [burst.pair], stable_source=stable_source).load(burst.ops) is None

    assert {call.args for call in driver.calls("cuMemcpyBatchAsync")} == {(STREAM, order)}


def hybrid(driver: StandIn) -> tuple[AnyBurst, PoolPair, AnyPool, AnyPool]:
    """A burst, and the side pair "states" of which it moves nothing yet."""
    burst = a_burst("page_first_direct", "layer_first")
    states, host, device = side_pool()
    knows(driver, burst)
    driver.knows(host=host.memory, device=device.memory)
    return burst, states, host, device


def test_pools_of_one_burst_share_a_batch_and_a_pool_without_a_layer_is_left_out_of_it(driver: StandIn) -> None:
    burst, states, states_host, states_device = hybrid(driver)
    side = PoolTransfer("states", torch.tensor([2, 5]), torch.tensor([4, 1]))
    driver.knows(device=[side.device_indices])
    expected = (
        bytes_after(burst.host, burst.device, burst.ops, range(3)),
        bytes_after(states_host, states_device, [side], range(3)),
    )
    sut = Sut(driver, [burst.pair, states], [[None, 0, 1, 2], [0, None, 1, 2]])

    assert sut.load([burst.ops[0], LoadOp(2, *indices_of(burst.ops[1]), (side,))]) is None

    assert (burst.device.raw_bytes(), states_device.raw_bytes()) == expected
    assert [len(call.copies) for call in driver.calls("cuMemcpyBatchAsync")] == [2, 8, 10, 10]


def test_a_layer_with_nothing_to_copy_makes_no_batch_but_records_its_event(driver: StandIn) -> None:
    burst, states, _, _ = hybrid(driver)
    sut = Sut(driver, [burst.pair, states], [[None, 0, 1, 2], [0, None, 1, 2]])
    _, events = sut.hand_over(burst.ops)

    assert sut.submit() is None

    assert len(driver.calls("cuMemcpyBatchAsync")) == 3
    recorded = [call.args[0] for call in driver.calls("cuEventRecord") if call.args[1] == STREAM]
    assert recorded == events.all.tolist()


def indices_of(op: LoadOp) -> tuple[torch.Tensor, torch.Tensor]:
    return op.host_indices, op.device_indices


# -- reading indices ----------------------------------------------------------------------------------------------


def load_from(sut: Sut, host: Sequence[int], device: Where) -> None:
    """Load a burst with these device indices."""
    indices = native.module.Indices()
    values = torch.tensor(host, dtype=torch.int64)
    sut.add(indices, 0, place(values, on_device=False), device, len(host))
    sut.hand_over_indices(indices)
    assert sut.submit() is None


def row_pool(num_rows: int = 64) -> AnyBurst:
    """Pools of single tokens."""
    sizes = Sizes(planes=(8,), page_size=1, num_layers=2, dtype=torch.uint8)
    host, device = fill(MAKERS["layer_first"](sizes, num_rows), 5), fill(MAKERS["layer_first"](sizes, num_rows), 6)
    return AnyBurst(PoolPair("rows", host.pool, device.pool), host, device, [])


@pytest.mark.parametrize(
    ("step", "calls"), [(1, ["cuMemcpyDtoHAsync_v2"]), (2, ["cuMemcpy2DAsync_v2"]), (7, ["cuMemcpy2DAsync_v2"])]
)
def test_strided_indices_are_one_read(driver: StandIn, step: int, calls: list[str]) -> None:
    burst, wanted = row_pool(), [9, 3, 60, 1, 0]
    memory = torch.full((5 * step,), -1)
    memory[::step] = torch.tensor(wanted)
    op = LoadOp(1, torch.tensor([5, 4, 3, 2, 1]), memory[::step])
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, memory])
    expected = bytes_after(burst.host, burst.device, [op], range(2))

    assert Sut(driver, [burst.pair]).load([op]) is None

    assert burst.device.raw_bytes() == expected
    assert [name for name in names(driver) if "HAsync" in name or "2D" in name] == calls


def test_host_indices_on_the_device_are_read_with_the_others(driver: StandIn) -> None:
    burst = row_pool()
    op = LoadOp(1, torch.arange(0, 40, 4), torch.arange(30, 10, -2))
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, *indices_of(op)])
    expected = bytes_after(burst.host, burst.device, [op], range(2))
    sut, indices = Sut(driver, [burst.pair]), native.module.Indices()
    sut.add(indices, 0, place(op.host_indices, on_device=True), place(op.device_indices, on_device=True), 10)
    sut.hand_over_indices(indices)

    assert sut.submit() is None

    assert burst.device.raw_bytes() == expected
    assert len(driver.calls("cuMemcpyDtoHAsync_v2")) == 2
    assert len(driver.calls("cuEventCreate")) == 1, "one wait for all of them"


@pytest.mark.parametrize("stride", [0, 3, -1])
def test_one_value_is_read_as_it_is_whatever_its_stride(driver: StandIn, stride: int) -> None:
    burst, memory = row_pool(), torch.tensor([7, -1])
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, memory])
    sut = Sut(driver, [burst.pair])
    expected = bytes_after(burst.host, burst.device, [LoadOp(1, torch.tensor([3]), memory[:1])], range(2))

    load_from(sut, [3], Where(memory.data_ptr(), stride, True))

    assert burst.device.raw_bytes() == expected
    assert [call.args[:2] for call in driver.calls("cuMemcpyDtoHAsync_v2")] == [(memory.data_ptr(), 8)]


def test_values_that_no_pitch_leads_through_are_read_one_by_one(driver: StandIn) -> None:
    burst = row_pool()
    backwards = torch.tensor([11, 12, 13])
    far = torch.empty((1 << 28) + 1, dtype=torch.int64)  # of which two pages are touched
    far[0], far[-1] = 21, 22
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, backwards, far])
    ops = [LoadOp(1, torch.tensor([1, 2, 3]), torch.tensor([13, 12, 11]))]
    ops.append(LoadOp(2, torch.tensor([4, 5]), torch.tensor([21, 22])))
    expected = bytes_after(burst.host, burst.device, ops, range(2))

    load_from(Sut(driver, [burst.pair]), [1, 2, 3], Where(backwards.data_ptr() + 16, -1, True))
    assert len(driver.calls("cuMemcpyDtoHAsync_v2")) == 3
    load_from(Sut(driver, [burst.pair]), [4, 5], Where(far.data_ptr(), 1 << 28, True))
    assert len(driver.calls("cuMemcpyDtoHAsync_v2")) == 2

    assert burst.device.raw_bytes() == expected
    assert driver.calls("cuMemcpy2DAsync_v2") == []


def test_an_expanded_index_is_read_as_often_as_it_stands_and_refused_as_named_twice(driver: StandIn) -> None:
    burst, memory = row_pool(), torch.tensor([7])
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, memory])
    sut = Sut(driver, [burst.pair])

    status = sut.load([LoadOp(1, torch.tensor([3, 4]), memory.expand(2))])

    assert status is not None
    assert status[0] == "invalid"
    assert len(driver.calls("cuMemcpyDtoHAsync_v2")) == 2


def test_page_locked_memory_is_used_again_and_grows_and_is_freed_in_the_end(driver: StandIn) -> None:
    burst = row_pool(3 * FIRST_CAPACITY)
    driver.knows(host=burst.host.memory, device=burst.device.memory)
    sut, allocated = Sut(driver, [burst.pair]), []
    for count in (10, 20, FIRST_CAPACITY, FIRST_CAPACITY + 1, 40, 2 * FIRST_CAPACITY + 1):
        op = LoadOp(1, torch.arange(count), torch.arange(count).flip(0))
        driver.knows(device=[op.device_indices])
        expected = bytes_of_rows(burst, op)
        assert sut.load([op]) is None
        assert burst.device.raw_bytes() == expected
        allocated.append([call.args[0] // 8 for call in driver.calls("cuMemHostAlloc")])
        assert len(driver.calls("cuEventCreate")) == (1 if count == 10 else 0)

    assert allocated == [[FIRST_CAPACITY], [], [], [2 * FIRST_CAPACITY], [], [4 * FIRST_CAPACITY]]
    assert driver.num_allocations == 3, "what may still be waited for is not freed under way"
    driver.forget_calls()
    events = driver.num_events
    del sut
    gc.collect()
    assert driver.num_allocations == 0
    assert driver.num_events == events - 1
    assert (names(driver)[0], names(driver)[-1]) == ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")


def bytes_of_rows(burst: AnyBurst, op: LoadOp) -> bytes:
    planes = [plane.clone() for plane in burst.device.pool.planes]
    for plane, host in zip(planes, burst.host.pool.planes, strict=True):
        plane[:, op.device_indices] = host[:, op.host_indices]
    return b"".join(plane.numpy().tobytes() for plane in planes)


def test_a_plane_that_has_read_nothing_calls_nothing_when_it_goes(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    assert sut.load(burst.ops, on_device=False) is None
    driver.forget_calls()

    del sut
    gc.collect()

    assert names(driver) == []


# -- order, on streams that are held ------------------------------------------------------------------------------


def test_indices_are_read_when_the_streams_before_the_start_have_written_them(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    expected = burst.expected_bytes()
    late = burst.ops[0].device_indices
    values = late.clone()
    late.fill_(-7)
    _, events = sut.hand_over(burst.ops)
    driver.hold(ENGINE_STREAM)
    driver.record(events.start, ENGINE_STREAM)
    driver.forget_calls()

    thread, returned = in_thread(sut.submit)
    await_that(lambda: names(driver) == ["cuEventSynchronize"])
    late.copy_(values)
    driver.release(ENGINE_STREAM)
    thread.join(20)

    assert returned == [None]
    assert burst.device.raw_bytes() == expected


def test_layers_are_known_to_have_landed_when_their_events_are_reached_and_not_before(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    before, expected = burst.device.raw_bytes(), burst.expected_bytes()
    driver.hold(STREAM)
    moved, events = sut.hand_over(burst.ops, on_device=False)

    assert sut.submit() is None
    thread, returned = in_thread(sut.plane.next_report)
    observing, _ = in_thread(sut.plane.observe)
    await_that(lambda: bool(driver.calls("cuEventSynchronize")))
    assert (moved.enqueued, moved.landed, moved.finish_recorded) == (3, 0, True)
    assert burst.device.raw_bytes() == before
    driver.release(STREAM)
    thread.join(20)

    sut.plane.stop()
    observing.join(20)

    assert returned == [("over", 1, None)]
    assert moved.landed == 3
    assert burst.device.raw_bytes() == expected
    waited = [call.args[0] for call in driver.calls("cuEventSynchronize")]
    assert waited == [*events.layers, int(events.all[-1])]


def test_a_full_stream_is_waited_for_by_the_event_of_a_layer(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair], max_layers=2)
    driver.hold(STREAM)
    moved, events = sut.hand_over(burst.ops, on_device=False)

    thread, returned = in_thread(sut.submit)
    await_that(lambda: bool(driver.calls("cuEventSynchronize")))
    assert moved.enqueued == 2
    driver.release(STREAM)
    thread.join(20)

    assert (returned, moved.enqueued) == ([None], 3)
    assert [call.args[0] for call in driver.calls("cuEventSynchronize")] == events.layers[:1]


def test_what_has_landed_leaves_room_though_nobody_has_observed_it(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair], max_layers=2)
    moved, _ = sut.hand_over(burst.ops, on_device=False)

    assert sut.submit() is None

    assert (moved.enqueued, moved.landed) == (3, 0)
    assert driver.calls("cuEventSynchronize") == []


def test_its_threads_live_in_it_while_bursts_are_handed_over(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    expected = burst.expected_bytes()

    def end() -> list[int]:
        ended = []
        while (report := sut.plane.next_report()) is not None:
            why, number, status = report
            assert (why, status) == ("over", None)
            sut.plane.pop_report(number)
            ended.append(number)
        return ended

    submitting, submitted = in_thread(sut.plane.submit)
    observing, observed = in_thread(sut.plane.observe)
    ending, ended = in_thread(end)
    for _ in range(20):
        sut.hand_over(burst.ops)
    sut.plane.stop()
    for thread in (submitting, observing, ending):
        thread.join(20)

    assert (submitted, observed, ended) == ([None], [None], [list(range(1, 21))])
    assert burst.device.raw_bytes() == expected


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_failure_index", [True, False])
def test_a_copy_that_fails_is_named_by_pool_plane_layer_and_row(driver: StandIn, has_failure_index: bool) -> None:
    driver.reset(13000, has_failure_index=has_failure_index)
    driver.more_streams()
    burst, states, _, _ = hybrid(driver)
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
        sut = Sut(driver, [burst.pair, states])
        moved, _ = sut.hand_over(ops, on_device=False)
        status = sut.submit()
        assert status == ("driver", "cuMemcpyBatchAsync", 2, None, copy if has_failure_index else None)
        error = sut.error(moved, status, ["kv", "states"])
        words = where if has_failure_index else "layer 0"
        assert isinstance(error, BatchError)
        assert str(error) == f"{words}: cuMemcpyBatchAsync failed with CUDA_ERROR_OUT_OF_MEMORY"
        assert isinstance(error.__cause__, CudaDriverError)
        assert (error.__cause__.function, error.__cause__.status) == ("cuMemcpyBatchAsync", 2)

    assert burst.device.raw_bytes() == before


def test_a_failure_in_a_layer_that_lacks_a_plane_names_the_right_copy(driver: StandIn) -> None:
    burst, states, _, _ = hybrid(driver)
    ops = [LoadOp(1, tokens_of([3], 4), tokens_of([5], 4), (PoolTransfer("states", *map(torch.tensor, ([2], [4]))),))]
    sut = Sut(driver, [burst.pair, states], [[None, 0, 1, 2], [0, None, 1, 2]])
    driver.fail(0, 999)

    moved, _ = sut.hand_over(ops, on_device=False)
    status = sut.submit()

    assert status == ("driver", "cuMemcpyBatchAsync", 999, None, 2), "the third of the plan is the first of the layer"
    words = str(sut.error(moved, status, ["kv", "states"]))
    assert words.startswith("pool 'states', plane 0, layer 0, row 4 of the device pool from row 2 of the host pool: ")
    assert words.endswith("cuMemcpyBatchAsync failed with CUresult 999")


def test_a_burst_of_one_pool_of_two_that_fails_names_that_pool(driver: StandIn) -> None:
    burst, states, _, _ = hybrid(driver)
    side = PoolTransfer("states", torch.tensor([0, 2]), torch.tensor([5, 3]))
    sut = Sut(driver, [burst.pair, states])
    driver.fail(1, 1)

    moved, _ = sut.hand_over([LoadOp(1, tokens_of([], 4), tokens_of([], 4), (side,))], on_device=False)
    status = sut.submit()

    assert status is not None
    assert str(sut.error(moved, status, ["kv", "states"])).startswith(
        "pool 'states', plane 0, layer 0, row 3 of the device pool from row 2 of the host pool: "
    )


def test_a_copy_that_is_cut_at_a_border_and_fails_is_named_as_a_whole(driver: StandIn) -> None:
    burst = a_burst()
    driver.knows(device=burst.device.memory)
    for tensor in burst.host.memory:
        driver.knows(host=tensor.view(torch.uint8).flatten().split(20))
    row = SIZES.page_size * SIZES.planes[0] * 2
    parts_of_first = len(range(3 * row // 20, (4 * row - 1) // 20 + 1))
    ops, sut = [page_op(1, [3, 4], [5, 0])], Sut(driver, [burst.pair])

    for part, copy in [(0, 0), (parts_of_first - 1, 0), (parts_of_first, 1)]:
        driver.fail(part, 1)
        moved, _ = sut.hand_over(ops, on_device=False)
        status = sut.submit()
        moved.mark_submitted()
        assert status == ("driver", "cuMemcpyBatchAsync", 1, None, copy)

    assert status is not None
    words = str(sut.error(moved, status, ["kv"]))
    assert "plane 0, layer 0, row 0 of the device pool from row 4 of the host pool" in words


def test_the_layer_that_fails_is_the_one_that_is_not_enqueued(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    driver.fail_calls("cuMemcpyBatchAsync", spared=2, status=2)

    moved, _ = sut.hand_over(burst.ops)
    status = sut.submit()

    assert status == ("driver", "cuMemcpyBatchAsync", 2, None, None)
    error = sut.error(moved, status, ["kv"])
    assert str(error) == "layer 2: cuMemcpyBatchAsync failed with CUDA_ERROR_OUT_OF_MEMORY"


def test_whichever_call_fails_is_named_and_the_next_burst_is_loaded(driver: StandIn) -> None:
    burst = a_burst()
    strided = torch.full((16,), -1)
    strided[::2] = burst.ops[1].device_indices
    burst = burst._replace(ops=[burst.ops[0], LoadOp(2, burst.ops[1].host_indices, strided[::2])])
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, burst.ops[0].device_indices, strided])
    expected, before = burst.expected_bytes(), [tensor.clone() for tensor in burst.device.memory]
    sut = Sut(driver, [burst.pair])
    assert sut.load(burst.ops, fence=True) is None
    calls = names(driver)
    assert set(calls) == {
        "cuCtxGetCurrent",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemHostAlloc",
        "cuMemcpy2DAsync_v2",
        "cuMemcpyBatchAsync",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamWaitEvent",
    }

    for position, name in enumerate(calls):
        put_back(burst, before)
        sut = Sut(driver, [burst.pair])
        moved, _ = sut.hand_over(burst.ops, fence=True)
        driver.fail_calls(spared=position, status=1)
        status = sut.submit()
        assert status == ("driver", name, 1, None, None), f"call {position}"
        assert len(driver.calls()) == position + 1, "nothing is called after it"
        error = sut.error(moved, status, ["kv"])
        layer = f"layer {moved.enqueued}: " if name == "cuMemcpyBatchAsync" else ""
        assert str(error) == f"{layer}{name} failed with CUDA_ERROR_INVALID_VALUE"
        moved.mark_submitted()
        assert sut.load(burst.ops, fence=True) is None
        assert burst.device.raw_bytes() == expected
        events = driver.num_events
        del sut
        gc.collect()
        assert driver.num_allocations == 0
        assert driver.num_events == events - 1


def test_a_layer_whose_event_fails_is_told_to_the_observer(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    moved, _ = sut.hand_over(burst.ops)
    assert sut.submit() is None
    driver.fail_calls("cuEventSynchronize", spared=1, status=GONE)

    sut.plane.stop()
    assert sut.plane.observe() is None
    report = sut.plane.next_report()

    assert report is not None
    why, _, status = report
    assert (why, status, moved.landed) == ("failed", ("driver", "cuEventSynchronize", GONE, None, None), 1)
    error = sut.error(moved, status, ["kv"])
    assert isinstance(error, CudaDriverError)
    assert str(error) == f"cuEventSynchronize failed with CUresult {GONE}"


def test_a_wait_for_room_that_fails_raises_what_the_driver_says(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair], max_layers=3)
    driver.hold(STREAM)
    sut.hand_over(burst.ops, on_device=False)
    assert sut.submit() is None
    in_flight = NativeLayersInFlight(sut.python_plane(["kv"]))
    driver.fail_calls("cuEventSynchronize", status=GONE)

    with pytest.raises(CudaDriverError, match=f"^cuEventSynchronize failed with CUresult {GONE}$"):
        in_flight.make_room()
    driver.release(STREAM)


def test_memory_that_the_device_may_still_write_to_is_not_freed(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    driver.hold(INDEX_STREAM)
    moved, _ = sut.hand_over(burst.ops)
    driver.fail_calls("cuMemcpyDtoHAsync_v2", spared=1)
    assert sut.submit() == ("driver", "cuMemcpyDtoHAsync_v2", 2, None, None)

    moved.mark_submitted()
    del sut, moved
    gc.collect()

    assert not driver.freed_too_early
    assert driver.num_allocations == 1, "the end of the context frees it"


def test_what_a_failed_read_still_brings_does_not_get_into_the_next(driver: StandIn) -> None:
    burst = row_pool()
    first, second = torch.tensor([60, 61, 62]), torch.tensor([3, 2, 1])
    driver.knows(host=burst.host.memory, device=[*burst.device.memory, first, second])
    op = LoadOp(2, torch.tensor([7, 8, 9]), second)
    expected = bytes_after(burst.host, burst.device, [op], range(2))
    sut = Sut(driver, [burst.pair])
    driver.hold(INDEX_STREAM)
    failed, _ = sut.hand_over([LoadOp(1, torch.tensor([4, 5, 6]), first)])
    driver.fail_calls("cuEventRecord")
    assert sut.submit() is not None
    failed.mark_submitted()

    sut.hand_over([op])
    thread, returned = in_thread(sut.submit)
    await_that(lambda: names(driver)[-2:] == ["cuEventRecord", "cuEventSynchronize"])
    driver.release(INDEX_STREAM)
    thread.join(20)

    assert returned == [None]
    assert burst.device.raw_bytes() == expected
    del sut, failed
    gc.collect()
    assert driver.num_allocations == 0
    assert not driver.freed_too_early


def test_a_dead_context_has_taken_everything_with_it(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    assert sut.load(burst.ops) is None
    driver.fail_calls(count=-1, status=GONE)
    driver.forget_calls()

    del sut
    gc.collect()

    assert names(driver) == ["cuCtxPushCurrent_v2"]


def test_a_forked_child_leaves_its_parents_memory_alone(driver: StandIn) -> None:
    burst = a_burst()
    knows(driver, burst)
    sut = Sut(driver, [burst.pair])
    assert sut.load(burst.ops) is None
    driver.forget_calls()

    child = os.fork()
    if child == 0:
        del sut
        gc.collect()
        os._exit(len(driver.calls()))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- what is asked for --------------------------------------------------------------------------------------------


def test_a_function_that_is_not_there_is_named(driver: StandIn) -> None:
    borders = batched(driver, [])._borders
    functions = driver.plane_functions() | {"cuMemcpyBatchAsync": 1}
    for name in functions:
        with pytest.raises(ValueError, match=f"^functions must have the address of {name}$"):
            native.module.cuda_plane_device(
                {key: value for key, value in functions.items() if key != name}, 1, 2, True, False, borders
            )


def test_borders_that_do_not_ascend_are_refused(driver: StandIn) -> None:
    functions = driver.plane_functions() | {"cuMemcpyBatchAsync": 1}
    with pytest.raises(ValueError, match="borders must ascend"):
        native.module.cuda_plane_device(functions, 1, 2, True, False, torch.tensor([5, 4]).numpy())

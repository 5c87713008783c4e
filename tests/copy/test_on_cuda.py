"""Batched copies on a GPU: the bytes in every layout, what a failing call says, what a burst's copies cost; and the
scheduler's native data plane, which makes them."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch

from hicache_sched import (
    AckStatus,
    LoadFailedError,
    LoadHandle,
    SchedulerConfig,
    TransferScheduler,
    native,
)
from hicache_sched.bench.copy import CopyBench
from hicache_sched.copy import PooledBackend
from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.submit import BatchSubmitter
from hicache_sched.device.batched_copy import BatchError, CudaBatchedCopy, batched_copy_for
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.cuda_driver import CudaDriver, initialised_driver
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import Layout, Pool, PoolPair
from tests.copy.builders import (
    LAYOUTS,
    Point,
    expected_bytes,
    make_pair,
    move,
    page_op,
    raw_bytes,
    staged,
    token_op,
)
from tests.device.machines import WAIT, CudaMachine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BURSTS = {
    "scattered": ([5, 2, 2, 7], [1, 6, 0, 3]),
    "into a run": ([5, 2, 2, 7], [3, 4, 5, 6]),
    "from a run": ([2, 3, 4], [7, 0, 5]),
    "run to run": ([2, 3, 4], [4, 5, 6]),
}


def ops_of(pages: tuple[list[int], list[int]]) -> list[LoadOp]:
    host, device = pages
    ops = [page_op(1, host[:2], device[:2]), page_op(2, host[2:], device[2:])]
    return [LoadOp(op.node_id, op.host_indices, op.device_indices.cuda()) for op in ops]


@pytest.fixture
def point() -> Point:
    return Point(DeviceBinding(torch.cuda))


@pytest.mark.parametrize("stable_host", [False, True])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("pages", BURSTS.values(), ids=BURSTS)
def test_every_byte_named_arrives_in_batches(
    point: Point, layout: Layout, pages: tuple[list[int], list[int]], stable_host: bool
) -> None:
    pair, ops = make_pair(num_layers=5, host_layout=layout, device="cuda"), ops_of(pages)
    wanted = expected_bytes(pair, ops)
    backend = PooledBackend([pair], stable_host=stable_host)
    torch.cuda.synchronize()

    move(backend, ops, range(5), point)

    assert raw_bytes(pair.device) == wanted
    assert backend.copy_method == "cuMemcpyBatchAsync", "or the driver is older than CUDA 12.8"


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("pages", BURSTS.values(), ids=BURSTS)
def test_every_byte_named_arrives_with_torch_calls(
    point: Point, layout: Layout, pages: tuple[list[int], list[int]]
) -> None:
    pair, ops = make_pair(num_layers=5, host_layout=layout, device="cuda"), ops_of(pages)
    wanted = expected_bytes(pair, ops)
    torch.cuda.synchronize()

    copies = staged(pair, ops, point.device)
    with torch.cuda.stream(point.h2d_stream):
        for layer in range(5):
            copies.submit_layer(layer)
    point.h2d_stream.synchronize()
    copies.release()

    assert raw_bytes(pair.device) == wanted


def test_a_host_pool_that_is_not_page_locked_is_copied_with_torch_calls(point: Point) -> None:
    pair, ops = make_pair(host_layout="layer_first", device="cuda"), ops_of(BURSTS["scattered"])
    pageable = Pool.wrap([plane.clone() for plane in pair.host.planes], page_size=4)
    pair = PoolPair("kv", pageable, pair.device)
    wanted = expected_bytes(pair, ops)
    backend = PooledBackend([pair])
    torch.cuda.synchronize()

    move(backend, ops, range(2), point)

    assert raw_bytes(pair.device) == wanted
    assert backend.copy_method == "torch, because a host pool is not page-locked"


def test_a_call_that_fails_says_why_and_where_and_breaks_nothing(point: Point) -> None:
    pair, ops = make_pair(device="cuda"), ops_of(BURSTS["scattered"])
    copy = batched_copy_for(point.device, point.h2d_stream, (), stable_source=False)
    assert isinstance(copy, CudaBatchedCopy)
    copy._attributes.source_order = 0  # CU_MEMCPY_SRC_ACCESS_ORDER_INVALID
    plan = BurstPlanner([pair], [range(2)]).plan(merge_ops(ops, point.device, ["kv"]))

    with torch.cuda.stream(point.h2d_stream), pytest.raises(BatchError, match=r"layer 1.*CUDA_ERROR_INVALID_VALUE"):
        BatchSubmitter(copy, ["kv"], pair).begin(plan).submit_layer(1)

    wanted = expected_bytes(pair, ops)
    move(PooledBackend([pair]), ops, range(2), point)
    assert raw_bytes(pair.device) == wanted


def test_pages_are_locked_by_one_registration_a_plane_and_let_go_with_the_pool() -> None:
    pool = Pool.mha(8, 4, 2, 1, 4, torch.float16)
    assert all(plane.is_pinned() for plane in pool.planes)


def test_a_bursts_throughput_against_one_large_copy_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report = CopyBench("cuda", pages=512, layers=8, row_bytes=65536, rounds=5, seed=0).run(lambda: None)

    with capsys.disabled():
        for row in report.rows:
            print(f"\n{row.what}, {row.case}: {row.result.median:.3g}", end="")
    assert all(value > 0 for row in report.rows for value in row.result.values)


# -- the native data plane ----------------------------------------------------------------------------------------

needs_native = pytest.mark.skipif(native.module is None, reason="needs the native part")
MakeScheduler = Callable[..., TransferScheduler]


@pytest.fixture
def make_scheduler() -> Iterator[MakeScheduler]:
    """Makes started schedulers with a native data plane."""
    made: list[TransferScheduler] = []

    def make(pair: PoolPair, *, plane: str = "native", h2d_stream: Any = None, **config: Any) -> TransferScheduler:
        settings: Any = {"plane": plane, **config}
        made.append(
            TransferScheduler(
                PooledBackend([pair]),
                runtime=torch.cuda,
                config=SchedulerConfig(**settings),
                h2d_stream=h2d_stream,
            )
        )
        made[-1].start()
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close(WAIT)


@pytest.fixture
def machine() -> Iterator[CudaMachine]:
    made = CudaMachine()
    yield made
    made.close()


def hand_out(scheduler: TransferScheduler, *ops: LoadOp) -> LoadHandle:
    for op in ops:
        scheduler.load(op)
    handle = scheduler.start_loading_sync(timeout=WAIT)
    assert handle is not None
    return handle


def as_they_are(op: LoadOp) -> LoadOp:
    return op


def on_host(op: LoadOp) -> LoadOp:
    return LoadOp(op.node_id, op.host_indices, op.device_indices.cpu())


def strided(op: LoadOp) -> LoadOp:
    """The same, its device indices with others between them."""
    memory = torch.full((3 * op.num_tokens,), -1, device="cuda")
    memory[::3] = op.device_indices
    return LoadOp(op.node_id, op.host_indices, memory[::3])


def wholly_on_device(op: LoadOp) -> LoadOp:
    return LoadOp(op.node_id, op.host_indices.cuda(), op.device_indices)


@needs_native
@pytest.mark.parametrize("place", [as_they_are, on_host, strided, wholly_on_device], ids=lambda place: place.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages", BURSTS.values(), ids=BURSTS)
def test_a_scheduler_loads_every_byte_with_its_native_plane_wherever_the_indices_are(
    make_scheduler: MakeScheduler, layout: Layout, pages: tuple[list[int], list[int]], place: Callable[[LoadOp], LoadOp]
) -> None:
    pair, ops = make_pair(num_layers=5, host_layout=layout, device="cuda"), ops_of(pages)
    wanted = expected_bytes(pair, ops)
    placed = [place(op) for op in ops]
    torch.cuda.synchronize()
    scheduler = make_scheduler(pair)

    ack = hand_out(scheduler, *placed).result(WAIT)

    assert scheduler.stats().plane == "native"
    assert ack.status is AckStatus.OK
    assert ack.duration_ms is not None
    assert raw_bytes(pair.device) == wanted


@needs_native
def test_many_bursts_of_which_several_are_in_flight_leave_the_bytes_of_the_last(make_scheduler: MakeScheduler) -> None:
    pair, rng = make_pair(host_pages=64, device_pages=64, num_layers=9, device="cuda"), random.Random(0)
    scheduler, ops = make_scheduler(pair, num_slots=4), []
    for node in range(200):
        count = rng.randint(1, 64)
        op = page_op(node, rng.choices(range(64), k=count), rng.sample(range(64), count))
        ops.append(op if node % 2 else LoadOp(node, op.host_indices, op.device_indices.cuda()))
    # Of each token of the device pool only what the last burst brought is left.
    source = {int(to): int(at) for op in ops for at, to in zip(op.host_indices, op.device_indices.cpu(), strict=True)}
    last = token_op(1, list(source.values()), list(source))
    wanted = expected_bytes(pair, [last])
    torch.cuda.synchronize()

    handles = [hand_out(scheduler, op) for op in ops]

    assert [handle.result(WAIT).status for handle in handles] == [AckStatus.OK] * len(ops)
    assert raw_bytes(pair.device) == wanted


@needs_native
def test_indices_that_a_kernel_is_still_writing_are_read_when_it_has(
    make_scheduler: MakeScheduler, machine: CudaMachine
) -> None:
    pair, (op, _) = make_pair(num_layers=3, device="cuda"), ops_of(BURSTS["scattered"])
    wanted = expected_bytes(pair, [op])
    late = torch.full_like(op.device_indices, -7)
    scheduler = make_scheduler(pair)
    torch.cuda.synchronize()

    machine.slow()
    late.copy_(op.device_indices)
    handle = hand_out(scheduler, LoadOp(1, op.host_indices, late))

    assert handle.result(WAIT).status is AckStatus.OK
    assert raw_bytes(pair.device) == wanted


@needs_native
def test_indices_that_are_wrong_on_the_device_are_refused_in_words_before_a_byte_is_copied(
    make_scheduler: MakeScheduler,
) -> None:
    pair, (op, _) = make_pair(num_layers=3, device="cuda"), ops_of(BURSTS["scattered"])
    before = raw_bytes(pair.device)
    scheduler = make_scheduler(pair)

    with pytest.raises(LoadFailedError, match=r"pool 'kv': device index 1\d\d\d of node 1 is out of range"):
        hand_out(scheduler, LoadOp(1, op.host_indices, op.device_indices + 1000)).result(WAIT)

    assert raw_bytes(pair.device) == before
    assert hand_out(scheduler, op).result(WAIT).status is AckStatus.OK


@needs_native
def test_kernels_on_streams_of_other_threads_read_what_the_layers_before_them_brought(
    make_scheduler: MakeScheduler, machine: CudaMachine
) -> None:
    layers = 5
    pair, (op, _) = make_pair(num_layers=layers, device="cuda"), ops_of(BURSTS["scattered"])
    scheduler = make_scheduler(pair)
    hand_out(scheduler, op).result(WAIT)  # page-locked memory is there from here on, which may wait for the device
    plane = pair.device.planes[0]
    wanted = [plane[layer].cpu() for layer in range(layers)]
    seen = [torch.zeros_like(plane[layer]) for layer in range(layers)]
    streams = [torch.cuda.Stream() for _ in range(layers)]
    for tensor, stream in zip(seen, streams, strict=True):
        with torch.cuda.stream(stream):
            tensor.copy_(plane[0])  # the kernel is loaded
    for device_plane in pair.device.planes:
        device_plane[:, op.device_indices] = 0
    torch.cuda.synchronize()
    with torch.cuda.stream(scheduler.h2d_stream):
        gate = machine.gate()
    handle = hand_out(scheduler, op)

    def look(layer: int) -> None:
        with torch.cuda.stream(streams[layer]):
            handle.wait_layer(layer, timeout=WAIT)
            seen[layer].copy_(plane[layer])

    threads = [threading.Thread(target=look, args=(layer,)) for layer in reversed(range(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert handle.layer_enqueued(layers - 1)
    assert not handle.layer_landed(0)
    assert not any(stream.query() for stream in streams)
    gate.set()
    torch.cuda.synchronize()

    assert handle.result(WAIT).status is AckStatus.OK
    for layer in range(layers):
        assert torch.equal(seen[layer].cpu().view(torch.uint8), wanted[layer].view(torch.uint8)), f"layer {layer}"


PAGE = 4096


@pytest.fixture
def two_registrations() -> Iterator[torch.Tensor]:
    """Two pages of host memory, each page-locked by itself."""
    driver = initialised_driver()
    memory = torch.frombuffer(mmap.mmap(-1, 2 * PAGE), dtype=torch.uint8)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    pages = (memory.data_ptr(), memory.data_ptr() + PAGE)
    for page in pages:
        driver.register(page, PAGE)
    yield memory
    torch.cuda.synchronize()
    for page in pages:
        driver.unregister(page)


def pair_across(memory: torch.Tensor) -> PoolPair:
    """A pair of two rows, the second of which lies in both pages of the host's."""
    host = memory[: 2 * 3072].view(1, 2, 3072)
    return PoolPair(
        "kv", Pool.wrap([host], page_size=1), Pool.wrap([torch.zeros_like(host, device="cuda")], page_size=1)
    )


@needs_native
def test_a_row_across_two_registrations_is_loaded_in_parts(
    make_scheduler: MakeScheduler, two_registrations: torch.Tensor
) -> None:
    pair = pair_across(two_registrations)

    assert hand_out(make_scheduler(pair), token_op(1, [0, 1], [1, 0])).result(WAIT).status is AckStatus.OK

    assert torch.equal(pair.device.planes[0].cpu().flip(1), pair.host.planes[0])


@needs_native
def test_a_copy_that_the_driver_refuses_is_named_and_the_next_burst_is_loaded(
    make_scheduler: MakeScheduler, two_registrations: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not told of the border, the plane has the driver read across it, which that refuses.
    monkeypatch.setattr(CudaDriver, "registration_borders", lambda driver, start, end: [])
    pair = pair_across(two_registrations)
    scheduler = make_scheduler(pair)
    function = CudaDriver().batch_function()
    assert function is not None

    with pytest.raises(LoadFailedError) as failed:
        hand_out(scheduler, token_op(1, [0, 1], [1, 0])).result(WAIT)

    where = "layer 0"
    if function.has_failure_index:
        where = "pool 'kv', plane 0, layer 0, row 0 of the device pool from row 1 of the host pool"
    cause = failed.value.__cause__
    assert isinstance(cause, BatchError)
    assert str(cause) == f"{where}: cuMemcpyBatchAsync failed with CUDA_ERROR_INVALID_VALUE"
    assert hand_out(scheduler, token_op(2, [0], [1])).result(WAIT).status is AckStatus.OK
    assert torch.equal(pair.device.planes[0][0, 1].cpu(), pair.host.planes[0][0, 0])


@needs_native
def test_an_engines_own_default_stream_has_the_python_plane(make_scheduler: MakeScheduler) -> None:
    pair, ops = make_pair(device="cuda"), ops_of(BURSTS["scattered"])
    wanted = expected_bytes(pair, ops)
    torch.cuda.synchronize()
    scheduler = make_scheduler(pair, plane="auto", h2d_stream=torch.cuda.default_stream())

    assert hand_out(scheduler, *ops).result(WAIT).status is AckStatus.OK

    assert scheduler.stats().plane == "python"
    assert raw_bytes(pair.device) == wanted


def test_what_the_native_plane_calls_is_in_the_drivers_library() -> None:
    addresses = CudaDriver().plane_functions()

    assert all(addresses.values())
    assert addresses["cuEventRecord"] == ctypes.cast(ctypes.CDLL("libcuda.so.1").cuEventRecord, ctypes.c_void_p).value


@pytest.mark.parametrize("timed", [True, False])
def test_an_event_has_a_handle_before_its_first_record_of_the_callers(point: Point, timed: bool) -> None:
    event: Any = point.device.new_event(timed=timed)

    handle = point.device.handle_of(event, point.h2d_stream)

    assert handle == event.cuda_event != 0
    event.record(point.index_stream)
    assert point.device.handle_of(event, point.h2d_stream) == handle


def test_only_tensors_in_cpu_memory_and_on_its_device_have_an_address_for_the_plane(point: Point) -> None:
    values = torch.tensor([1, 2])

    assert point.device.find(values) is not None
    assert point.device.find(values.cuda()) is not None
    assert point.device.find(values.to("meta")) is None
    if torch.cuda.device_count() > 1:
        assert point.device.find(values.to("cuda:1")) is None

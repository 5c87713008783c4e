"""Batched copies on a GPU: the bytes in every layout, what a failing call says, what a burst's copies cost."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hicache_sched.bench.copy import CopyBench
from hicache_sched.copy import PooledBackend
from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.submit import BatchSubmitter
from hicache_sched.device.batched_copy import BatchError, CudaBatchedCopy, batched_copy_for
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import Layout, Pool, PoolPair
from tests.copy.builders import Point, expected_bytes, make_pair, move, page_op, raw_bytes, staged

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

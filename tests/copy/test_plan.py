"""Planning: what flat arrays say, and every index that they refuse."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched.copy.plan import CopyPlan, Planner, merge_ops
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.errors import InvalidLoadError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import PoolPair
from tests.copy.builders import Burst, bursts, expected_bytes, make_pair, page_op, raw_bytes, token_op


class ReadingDevice(DeviceBinding):
    """An emulated device that lists the tensors read from it."""

    def __init__(self) -> None:
        super().__init__(EmulatedDevice())
        self.reads: list[torch.Tensor] = []

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.reads.extend(tensors)
        return super().to_host(tensors)


def plan(pair: PoolPair, *ops: LoadOp) -> CopyPlan:
    return Planner(pair).plan(merge_ops(ops, ReadingDevice(), ["kv"])["kv"])


def refusal(pair: PoolPair, *ops: LoadOp) -> str:
    with pytest.raises(InvalidLoadError) as caught:
        plan(pair, *ops)
    return str(caught.value)


# -- merging --------------------------------------------------------------------------------------------------


def test_ops_are_merged_in_order() -> None:
    merged = merge_ops([token_op(7, [5, 6], [1, 2]), token_op(9, [3], [8])], ReadingDevice(), ["kv"])["kv"]

    assert merged.node_ids == (7, 9)
    assert merged.host.tolist() == [5, 6, 3]
    assert merged.device.tolist() == [1, 2, 8]
    assert [merged.node_of(position) for position in range(3)] == [7, 7, 9]


def test_device_indices_are_read_once_through_the_device_and_host_indices_without_it() -> None:
    device = ReadingDevice()
    ops = [token_op(1, [5], [1]), token_op(2, [6], [2])]

    merge_ops(ops, device, ["kv"])

    assert [id(tensor) for tensor in device.reads] == [id(op.device_indices) for op in ops]


def test_what_is_merged_does_not_follow_later_writes_of_the_engine() -> None:
    op = token_op(1, [5], [1])
    merged = merge_ops([op], ReadingDevice(), ["kv"])["kv"]

    op.host_indices.fill_(0)
    op.device_indices.fill_(0)

    assert (merged.host.tolist(), merged.device.tolist()) == ([5], [1])


def test_indices_that_are_strided_views_are_read_right() -> None:
    every_other = torch.arange(8)[::2]

    merged = merge_ops([LoadOp(1, every_other, every_other)], ReadingDevice(), ["kv"])["kv"]

    assert merged.host.tolist() == merged.device.tolist() == [0, 2, 4, 6]


def test_an_op_with_more_indices_on_one_side_is_refused() -> None:
    with pytest.raises(InvalidLoadError, match="node 3: 2 host indices but 1 device indices"):
        merge_ops([token_op(3, [1, 2], [1])], ReadingDevice(), ["kv"])


# -- what a plan says -----------------------------------------------------------------------------------------


@settings(deadline=None)  # a busy machine is no failure
@given(bursts())
def test_the_arrays_of_a_plan_are_all_it_takes_to_move_a_burst(burst: Burst) -> None:
    wanted = expected_bytes(burst.pair, burst.ops)
    made = plan(burst.pair, *burst.ops)

    moved = 0
    for p, num_bytes in enumerate(made.row_bytes.tolist()):
        for layer in range(burst.pair.num_layers):
            for src_row, dst_row in zip(made.src_rows.tolist(), made.dst_rows.tolist(), strict=True):
                dst = made.dst_base[p, layer] + dst_row * made.dst_stride[p]
                src = made.src_base[p, layer] + src_row * made.src_stride[p]
                ctypes.memmove(int(dst), int(src), num_bytes)
                moved += num_bytes

    assert raw_bytes(burst.pair.device) == wanted
    assert moved == made.num_bytes
    assert made.num_tokens == sum(op.num_tokens for op in burst.ops)


def test_every_array_of_a_plan_is_contiguous_int64() -> None:
    made = plan(make_pair(), page_op(1, [3, 1], [0, 2]))
    arrays = [made.src_rows, made.dst_rows, made.src_base, made.dst_base]
    arrays += [made.src_stride, made.dst_stride, made.row_bytes]

    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)


def test_a_burst_that_is_one_run_is_joined_also_across_ops() -> None:
    made = plan(make_pair(), page_op(1, [2, 3], [4, 5]), page_op(2, [4], [6]))

    assert made.src_selection == slice(2, 5)
    assert made.dst_selection == slice(4, 7)


@pytest.mark.parametrize("pages", [[3, 1], [0, 2], [0, 2, 1, 3], [0, 0, 2]], ids=str)
def test_a_burst_that_is_no_run_stays_rows(pages: list[int]) -> None:
    made = plan(make_pair(), page_op(1, pages, range(len(pages))))

    assert isinstance(made.src_selection, np.ndarray)
    assert made.src_selection.tolist() == pages
    assert made.dst_selection == slice(0, len(pages))


def test_a_source_page_may_be_named_twice() -> None:
    assert plan(make_pair(), page_op(1, [3, 3], [0, 1])).src_rows.tolist() == [3, 3]


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("index", [-1, 32, 2**62, -(2**63)])
def test_a_host_index_out_of_range_is_refused(page_size: int, index: int) -> None:
    pair = make_pair(host_pages=32 // page_size, page_size=page_size)
    bad = token_op(9, [index, *range(1, page_size)], range(4, 4 + page_size))

    words = refusal(pair, page_op(5, [0], [0], page_size), bad)

    assert f"pool 'kv': host index {index} of node 9 is out of range; the host pool has tokens 0 to 31" in words


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("index", [-1, 32, 2**62, -(2**63)])
def test_a_device_index_out_of_range_is_refused(page_size: int, index: int) -> None:
    pair = make_pair(device_pages=32 // page_size, page_size=page_size)
    bad = token_op(9, range(4, 4 + page_size), [index, *range(1, page_size)])

    words = refusal(pair, page_op(5, [0], [0], page_size), bad)

    assert f"pool 'kv': device index {index} of node 9 is out of range; the device pool has tokens 0 to 31" in words


def test_a_device_index_beyond_the_smaller_device_pool_is_refused() -> None:
    words = refusal(make_pair(host_pages=8, device_pages=2), page_op(1, [7], [2]))

    assert "device index 8 of node 1 is out of range; the device pool has tokens 0 to 7" in words


@pytest.mark.parametrize(("device", "offender"), [([4, 6, 4], 4), ([4, 6, 6, 4], 6), ([6, 4, 4, 6], 4)], ids=str)
def test_a_destination_named_twice_in_an_op_is_refused_at_its_first_repeat(device: list[int], offender: int) -> None:
    words = refusal(make_pair(page_size=1), token_op(1, range(len(device)), device))

    assert f"pool 'kv': device index {offender} of node 1 is already a destination of node 1" in words


def test_a_destination_named_twice_across_ops_is_refused() -> None:
    words = refusal(make_pair(), page_op(1, [0], [6]), page_op(2, [1, 2], [5, 3]), page_op(3, [4, 4], [7, 5]))

    assert "pool 'kv': device index 20 of node 3 is already a destination of node 2" in words


@pytest.mark.parametrize("length", [1, 3, 5])
def test_an_op_that_cuts_a_page_short_is_refused(length: int) -> None:
    words = refusal(make_pair(), page_op(1, [0], [0]), token_op(2, range(8, 8 + length), range(4, 4 + length)))

    cut = length // 4 * 4
    assert f"pool 'kv': node 2 loads {length} tokens, which is no multiple of the page size 4" in words
    assert f"from host index {8 + cut} and device index {4 + cut} on" in words


def test_two_ops_that_make_whole_pages_only_together_are_refused() -> None:
    words = refusal(make_pair(), token_op(1, [0, 1, 2], [0, 1, 2]), token_op(2, [3], [3]))

    assert "node 1 loads 3 tokens" in words


@pytest.mark.parametrize(
    ("indices", "offender"),
    [
        ([1, 2, 3, 4], 1),
        ([4, 5, 7, 6], 7),
        ([4, 4, 4, 4], 4),
        ([4, 5, 6, 3], 3),
        ([4, 6, 8, 10], 6),
        ([7, 6, 5, 4], 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("side", ["host", "device"])
def test_a_run_that_is_not_page_aligned_is_refused(side: str, indices: list[int], offender: int) -> None:
    aligned = [12, 13, 14, 15]
    host, device = (indices, aligned) if side == "host" else (aligned, indices)

    words = refusal(make_pair(), page_op(1, [6], [6]), token_op(2, host, device))

    assert f"pool 'kv': {side} index {offender} of node 2 breaks page alignment" in words


@settings(deadline=None)  # a busy machine is no failure
@given(burst=bursts(), data=st.data())
def test_one_bad_index_anywhere_is_found_and_named(burst: Burst, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(burst.ops))
    position = data.draw(st.integers(0, op.num_tokens - 1))
    side = data.draw(st.sampled_from(("host", "device")))
    pool, indices = (burst.pair.host, op.host_indices) if side == "host" else (burst.pair.device, op.device_indices)
    bad = data.draw(st.integers(max_value=-1, min_value=-100) | st.integers(pool.num_tokens, pool.num_tokens + 100))
    indices[position] = bad

    assert re.search(f"{side} index {bad} of node {op.node_id} is out of range", refusal(burst.pair, *burst.ops))

"""Planning: what flat arrays say, and every index that they refuse."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched.copy.layers import AddressBuffers, LayerBatches
from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.plan import CopyPlan, check_plan
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.errors import InvalidLoadError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import PoolPair
from tests.copy.builders import Burst, bursts, expected_bytes, make_pair, page_op, plan_of, raw_bytes, token_op


class ReadingDevice(DeviceBinding):
    """An emulated device that lists the tensors read from it."""

    def __init__(self) -> None:
        super().__init__(EmulatedDevice())
        self.reads: list[torch.Tensor] = []

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.reads.extend(tensors)
        return super().to_host(tensors)


def plan(pair: PoolPair, *ops: LoadOp) -> CopyPlan:
    return plan_of(pair, ops, ReadingDevice())


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

    first = 0
    for plane, end in enumerate(made.plane_ends.tolist()):
        for copy in range(first, end):
            for layer in range(burst.pair.num_layers):
                dst = made.dst_base[layer, plane] + made.dst_offsets[copy]
                src = made.src_base[layer, plane] + made.src_offsets[copy]
                ctypes.memmove(int(dst), int(src), int(made.sizes[copy]))
        first = end

    assert raw_bytes(burst.pair.device) == wanted
    assert made.num_bytes == sum(made.sizes.tolist()) * burst.pair.num_layers


def test_every_array_of_a_plan_is_contiguous_int64_and_passes_the_check_for_foreign_plans() -> None:
    made = plan(make_pair(), page_op(1, [3, 1], [0, 2]))

    arrays = [getattr(made, field.name) for field in dataclasses.fields(made)]

    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
    check_plan(made, num_layers=2, num_pools=1)


ROW = 4 * 1 * 4 * 2  # tokens, heads, elements, bytes
ADJACENT: dict[str, Any] = {"host_layout": "layer_first", "device_layout": "layer_first"}


def copies_of_k(made: CopyPlan) -> list[tuple[int, int, int]]:
    """Source row, destination row and number of rows of each copy of the first plane."""
    k = slice(0, int(made.plane_ends[0]))
    return [
        (src // ROW, dst // ROW, size // ROW)
        for src, dst, size in zip(
            made.src_offsets[k].tolist(), made.dst_offsets[k].tolist(), made.sizes[k].tolist(), strict=True
        )
    ]


def test_a_burst_that_is_one_run_on_both_sides_is_one_copy_a_plane_also_across_ops() -> None:
    made = plan(make_pair(**ADJACENT), page_op(1, [2, 3], [4, 5]), page_op(2, [4], [6]))

    assert copies_of_k(made) == [(2, 4, 3)]
    assert made.plane_ends.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("host", "device", "copies"),
    [
        ([3, 1], [0, 1], [(3, 0, 1), (1, 1, 1)]),
        ([3, 4], [0, 2], [(3, 0, 1), (4, 2, 1)]),
        ([4, 3], [1, 0], [(4, 1, 1), (3, 0, 1)]),
        ([0, 0, 2], [0, 1, 2], [(0, 0, 1), (0, 1, 1), (2, 2, 1)]),
        ([5, 6, 0, 1, 2, 4], [1, 2, 3, 4, 5, 0], [(5, 1, 2), (0, 3, 3), (4, 0, 1)]),
    ],
    ids=str,
)
def test_rows_are_joined_where_they_follow_each_other_on_both_sides(
    host: list[int], device: list[int], copies: list[tuple[int, int, int]]
) -> None:
    assert copies_of_k(plan(make_pair(**ADJACENT), page_op(1, host, device))) == copies


def test_rows_that_lie_apart_on_one_side_are_not_joined() -> None:
    made = plan(make_pair(host_layout="page_first_direct"), page_op(1, [2, 3], [4, 5]))

    assert len(made.sizes) == 2 * 2  # planes, pages


def test_a_source_page_may_be_named_twice() -> None:
    assert copies_of_k(plan(make_pair(**ADJACENT), page_op(1, [3, 3], [0, 1]))) == [(3, 0, 1), (3, 1, 1)]


# -- layer by layer -------------------------------------------------------------------------------------------


@settings(deadline=None)  # a busy machine is no failure
@given(burst=bursts(), at_once=st.integers(1, 50), keep=st.booleans())
def test_layer_batches_are_the_plans_addresses_however_many_are_worked_out_at_once(
    burst: Burst, at_once: int, keep: bool
) -> None:
    made = plan(burst.pair, *burst.ops)
    plane = np.repeat(np.arange(len(made.plane_ends)), np.diff(made.plane_ends, prepend=0))

    with mock.patch("hicache_sched.copy.layers._COPIES_AT_ONCE", at_once):
        batches = LayerBatches(made, burst.pair, AddressBuffers(), keep=keep)
        for layer in range(burst.pair.num_layers):
            batch = batches.layer(layer)
            assert batch is not None
            assert batch.dst.tolist() == (made.dst_base[layer][plane] + made.dst_offsets).tolist()
            assert batch.src.tolist() == (made.src_base[layer][plane] + made.src_offsets).tolist()
            assert batch.sizes.tolist() == made.sizes.tolist()
            assert batch.owner is burst.pair


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


def test_batches_are_kept_until_they_are_released_and_their_memory_is_then_used_again() -> None:
    pair, buffers = make_pair(num_layers=3), AddressBuffers()
    made = plan(pair, page_op(1, [3, 1], [0, 2]))

    def first_of_each_layer(batches: LayerBatches) -> list[int]:
        given = [batches.layer(layer) for layer in range(3)]
        return [int(batch.dst[0]) for batch in given if batch is not None]

    with mock.patch("hicache_sched.copy.layers._COPIES_AT_ONCE", len(made.sizes)):  # one layer at once
        kept = LayerBatches(made, pair, buffers, keep=True)
        assert first_of_each_layer(kept) == made.dst_base[:, 0].tolist()
        assert buffers.num_free == 0
        kept.release()
        assert buffers.num_free == 3 * 2

        at_once = LayerBatches(made, pair, buffers, keep=False)
        assert first_of_each_layer(at_once) == [made.dst_base[2, 0]] * 3, "each layer in the memory of the last"
        at_once.release()
        assert buffers.num_free == 3 * 2


# -- plans of others ------------------------------------------------------------------------------------------


def foreign(**changes: object) -> CopyPlan:
    """A plan as an engine might make it: two planes of one pool, two layers, three copies; with some arrays changed."""
    arrays: dict[str, Any] = {
        "src_offsets": [0, 64, 0],
        "dst_offsets": [64, 0, 32],
        "sizes": [32, 32, 32],
        "plane_ends": [2, 3],
        "src_base": [[1000, 2000], [3000, 0]],
        "dst_base": [[5000, 6000], [7000, 0]],
        "src_extent": [96, 96],
        "dst_extent": [96, 96],
        "src_stride": [32, 32],
        "dst_stride": [32, 32],
        "pools": [0, 0],
    }
    return CopyPlan(
        **{
            name: np.array(value, dtype=np.int64) if isinstance(value, list) else value
            for name, value in (arrays | changes).items()
        }
    )


def test_a_plan_that_is_what_it_should_be_is_accepted() -> None:
    check_plan(foreign(), num_layers=2, num_pools=1)
    check_plan(foreign(src_offsets=[0, 0, 0]), num_layers=2, num_pools=1)  # one source twice


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sizes": np.array([32, 32, 32], dtype=np.int32)},
            "sizes must be a C-contiguous int64 array, not an array of",
        ),
        ({"sizes": np.full(6, 32)[::2]}, "sizes must be a C-contiguous int64 array, not a strided array of int64"),
        ({"sizes": (32, 32, 32)}, r"sizes must be a C-contiguous int64 array, not \(32, 32, 32\)"),
        ({"dst_offsets": [0, 64]}, r"dst_offsets must have the shape \(3,\), not \(2,\)"),
        ({"src_base": [[1000, 2000]]}, r"src_base must have the shape \(2, 2\), not \(1, 2\)"),
        ({"plane_ends": [2, 4]}, r"plane_ends must ascend to the number of copies, 3, not \[2, 4\]"),
        ({"plane_ends": [4, 3]}, "plane_ends must ascend"),
        ({"plane_ends": [-1, 3]}, "plane_ends must ascend"),
        ({"pools": [0, 1]}, "pools must ascend within the 1 pools of the backend"),
        ({"pools": [-1, 0]}, "pools must ascend within the 1 pools"),
        ({"src_stride": [32, 0]}, "src_stride must be positive"),
        ({"sizes": [32, 0, 32]}, "sizes must be positive: copy 1 moves no byte"),
        ({"dst_base": [[5000, 6000], [7000, 8000]]}, "must be 0 for the same planes and layers"),
        ({"src_base": [[1000, 2000], [-3000, 0]]}, "none negative"),
        ({"src_offsets": [0, 65, 0]}, "src_offsets must stay within their planes: copy 1 moves 32 bytes at offset 65"),
        ({"src_offsets": [0, 64, -1]}, "src_offsets must stay within their planes: copy 2"),
        ({"dst_offsets": [64, 0, 2**63 - 1]}, "dst_offsets must stay within their planes: copy 2"),
        ({"dst_extent": [-(2**63), 96]}, "dst_extent must be bytes that are there"),
        ({"src_extent": [96, 2**63 - 1]}, "src_extent must be bytes that are there"),
        ({"sizes": np.array(3)}, "sizes must be an array with a dimension"),
        ({"dst_extent": [96, 63]}, "dst_offsets must stay within their planes: copy 2"),
        ({"dst_offsets": [31, 0, 0]}, "destinations must not overlap, as copies 0 and 1 of plane 0 do"),
        ({"dst_offsets": [0, 0, 0]}, "destinations must not overlap, as copies 0 and 1 of plane 0 do"),
    ],
)
def test_a_plan_that_is_not_what_it_should_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidLoadError, match=words):
        check_plan(foreign(**changes), num_layers=2, num_pools=1)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(InvalidLoadError, match="must return a CopyPlan or None, not 7"):
        check_plan(7, num_layers=2, num_pools=1)  # type: ignore[arg-type]


def test_a_plan_without_copies_has_no_batches() -> None:
    nothing: dict[str, Any] = {name: [] for name in ("src_offsets", "dst_offsets", "sizes")}
    made = foreign(**nothing, plane_ends=[0, 0])

    check_plan(made, num_layers=2, num_pools=1)
    assert LayerBatches(made, None, AddressBuffers(), keep=True).layer(0) is None
    assert made.num_bytes == 0


def test_a_plan_without_planes_is_refused() -> None:
    none: dict[str, Any] = {field.name: [] for field in dataclasses.fields(CopyPlan)}
    bases = {name: np.empty((2, 0), dtype=np.int64) for name in ("src_base", "dst_base")}
    with pytest.raises(InvalidLoadError, match="plane_ends must ascend"):
        check_plan(foreign(**none | bases), num_layers=2, num_pools=1)


def test_a_plan_counts_only_the_planes_that_a_layer_has() -> None:
    assert foreign().plane_bytes.tolist() == [64, 32]
    assert foreign().num_bytes == 64 * 2 + 32


@pytest.mark.parametrize(
    ("copy", "words"),
    [
        (0, "pool 'kv', plane 0, layer 7, row 2 of the device pool from row 0 of the host pool"),
        (2, "pool 'kv', plane 1, layer 7, rows 1 to 2 of the device pool from rows 0 to 1 of the host pool"),
    ],
)
def test_a_copy_is_named_by_pool_plane_layer_and_rows(copy: int, words: str) -> None:
    assert foreign(sizes=[32, 32, 64]).name_copy(copy, 7, ["kv"]) == words


def test_planes_are_counted_within_their_pool() -> None:
    made = foreign(pools=[0, 1])

    assert made.name_copy(2, 0, ["kv", "indexer"]).startswith("pool 'indexer', plane 0, ")


def test_a_layer_that_lacks_a_plane_has_a_batch_of_the_others_and_one_that_lacks_all_has_none() -> None:
    made = foreign(src_base=[[1000, 2000], [0, 4000], [0, 0]], dst_base=[[5000, 6000], [0, 8000], [0, 0]])
    batches = LayerBatches(made, None, AddressBuffers(), keep=True)

    whole, part = batches.layer(0), batches.layer(1)

    assert whole is not None
    assert whole.dst.tolist() == [5064, 5000, 6032]
    assert part is not None
    assert (part.dst.tolist(), part.src.tolist(), part.sizes.tolist()) == ([8032], [4000], [32])
    assert (whole.nbytes, part.nbytes) == (96, 32)
    assert batches.positions(1).tolist() == [2]
    assert batches.layer(2) is None

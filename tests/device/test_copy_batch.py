"""A batch of copies on the CPU: the bytes it names, and no others."""

from __future__ import annotations

import tracemalloc
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched.device.copy_batch import CopyBatch
from tests.device.batches import NO_COPIES, row_copies

MEMORY = 400


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Copies as (destination, source, size) in two memories of `MEMORY` bytes, of few sizes or many."""
    sizes = draw(st.lists(st.sampled_from([1, 8, 12]) | st.integers(1, 40), min_size=1, max_size=8))
    ends = np.cumsum([size + draw(st.sampled_from([0, 0, 0, 3])) for size in sizes]).tolist()
    order = draw(st.permutations(range(len(sizes))))
    return [
        (ends[number] - sizes[number], draw(st.integers(0, MEMORY - sizes[number])), sizes[number]) for number in order
    ]


@settings(deadline=None, max_examples=300)  # a busy machine is no failure
@given(copies=batches(), scratch=st.sampled_from([1, 20, 4 << 20]))
def test_every_byte_named_arrives_and_no_other_changes(copies: list[tuple[int, int, int]], scratch: int) -> None:
    rng = np.random.default_rng(0)
    source, target = (rng.integers(0, 256, MEMORY, dtype=np.uint8) for _ in range(2))
    wanted, before = target.copy(), source.copy()
    for to, from_, size in copies:
        wanted[to : to + size] = source[from_ : from_ + size]
    dst, src, sizes = (np.array(column, dtype=np.int64) for column in zip(*copies, strict=True))

    with mock.patch("hicache_sched.device.copy_batch._SCRATCH_BYTES", scratch):
        CopyBatch(dst + target.ctypes.data, src + source.ctypes.data, sizes).execute()

    assert np.array_equal(target, wanted)
    assert np.array_equal(source, before)


def test_an_empty_batch_does_nothing() -> None:
    NO_COPIES.execute()

    assert NO_COPIES.nbytes == 0


def peak_memory(batch: CopyBatch) -> int:
    """Bytes that executing it allocates."""
    tracemalloc.start()
    try:
        batch.execute()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("to", "from_"),
    [([0, 1, 2, 3], [4, 5, 6, 7]), ([5, 0, 3, 1], [4, 5, 6, 7]), ([0, 1, 2, 3], [7, 0, 4, 4])],
    ids=["run to run", "from a run", "into a run"],
)
def test_a_run_on_one_side_is_copied_without_a_temporary(to: list[int], from_: list[int]) -> None:
    target, source = np.zeros((8, 65536), np.uint8), np.ones((8, 65536), np.uint8)
    batch = row_copies((target, to, source, from_))

    assert peak_memory(batch) < batch.nbytes / 4
    assert target[to].all()


@pytest.mark.parametrize("sides", ["source", "target", "both"])
def test_what_lies_between_far_rows_is_not_touched(sides: str) -> None:
    """There need not be memory there; numpy functions that want it contiguous would copy all of it."""
    far = np.ones(16 << 20, np.uint8)
    at = np.array([5_000_003, 16_000_001, 7], dtype=np.int64) + far.ctypes.data
    near = np.zeros((3, 1000), np.uint8)
    near_at = near.ctypes.data + np.array([0, 1000, 2000])
    other = np.zeros(16 << 20, np.uint8)
    dst = {"source": near_at, "target": at, "both": at - far.ctypes.data + other.ctypes.data}[sides]
    src = {"source": at, "target": near_at, "both": at}[sides]

    assert peak_memory(CopyBatch(dst, src, np.full(3, 1000))) < 100_000

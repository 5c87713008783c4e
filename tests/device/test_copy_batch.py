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
@given(copies=batches(), scratch=st.sampled_from([1, 20, 8 << 20]))
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


@pytest.mark.parametrize(
    ("to", "from_"),
    [([0, 1, 2, 3], [4, 5, 6, 7]), ([5, 0, 3, 1], [4, 5, 6, 7]), ([0, 1, 2, 3], [7, 0, 4, 4])],
    ids=["run to run", "from a run", "into a run"],
)
def test_a_run_on_one_side_is_copied_without_a_temporary(to: list[int], from_: list[int]) -> None:
    target, source = np.zeros((8, 65536), np.uint8), np.ones((8, 65536), np.uint8)
    batch = row_copies((target, to, source, from_))
    tracemalloc.start()
    try:
        batch.execute()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert target[to].all()
    assert peak < batch.nbytes / 4

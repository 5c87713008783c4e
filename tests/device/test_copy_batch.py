"""A batch of copies on the CPU: the bytes it names, and no others."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_sched import native
from hicache_sched.device.copy_batch import CopyBatch
from tests.device.batches import NO_COPIES, row_copies

MEMORY = 400


@pytest.fixture(params=["native", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two ways of copying is tested."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "module", None)
    elif native.module is None:
        pytest.skip(f"no native part: {native.missing_because}")
    return str(request.param)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Copies as (destination, source, size) in two memories of `MEMORY` bytes, of few sizes or many."""
    sizes = draw(st.lists(st.sampled_from([1, 8, 12]) | st.integers(1, 40), min_size=1, max_size=8))
    ends = np.cumsum([size + draw(st.sampled_from([0, 0, 0, 3])) for size in sizes]).tolist()
    order = draw(st.permutations(range(len(sizes))))
    return [
        (ends[number] - sizes[number], draw(st.integers(0, MEMORY - sizes[number])), sizes[number]) for number in order
    ]


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # a busy machine is no failure; the fixture is the same for all examples
@given(copies=batches(), scratch=st.sampled_from([1, 20, 4 << 20]))
def test_every_byte_named_arrives_and_no_other_changes(copies: list[tuple[int, int, int]], scratch: int) -> None:
    rng = np.random.default_rng(0)
    source, target = (rng.integers(0, 256, MEMORY, dtype=np.uint8) for _ in range(2))
    wanted, before = target.copy(), source.copy()
    for to, from_, size in copies:
        wanted[to : to + size] = source[from_ : from_ + size]
    dst, src, sizes = (np.array(column, dtype=np.int64) for column in zip(*copies, strict=True))

    with mock.patch("hicache_sched.device.copy_batch._SCRATCH_BYTES", scratch):
        CopyBatch(dst + target.ctypes.data, src + source.ctypes.data, sizes, int(sizes.sum()), None).execute()

    assert np.array_equal(target, wanted)
    assert np.array_equal(source, before)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(copies=batches(), limits=st.sampled_from([("_LARGE_ROW", 8), ("_LARGEST_ARRAY", 1000)]))
def test_copies_that_numpy_has_no_array_for_are_made_one_by_one(
    copies: list[tuple[int, int, int]], limits: tuple[str, int]
) -> None:
    with mock.patch(f"hicache_sched.device.copy_batch.{limits[0]}", limits[1]):
        test_every_byte_named_arrives_and_no_other_changes.hypothesis.inner_test(copies, 4 << 20)  # type: ignore[attr-defined]


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

    assert peak_memory(CopyBatch(dst, src, np.full(3, 1000), 3000, (far, near, other))) < 100_000


@pytest.mark.parametrize("misaligned_by", [0, 1, 8, 15, 17])
@pytest.mark.parametrize("row", [1 << 20, (1 << 20) - 77, 9 << 20])
def test_batches_that_do_not_fit_into_the_caches_arrive_too(row: int, misaligned_by: int) -> None:
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 2 * row, dtype=np.uint8)
    memory = np.zeros(12 * row + misaligned_by + 1, dtype=np.uint8)
    target = memory[misaligned_by : misaligned_by + 12 * row].reshape(12, row)
    to, from_ = [7, 1, 2, 11, 0, 4, 6, 9, 8, 3], [0, 1] * 5

    row_copies((target, to, source.reshape(2, row), from_)).execute()

    assert all(np.array_equal(target[t], source.reshape(2, row)[f]) for t, f in zip(to, from_, strict=True))
    assert not target[[5, 10]].any()
    assert not memory[:misaligned_by].any()
    assert memory[-1] == 0


def test_the_gil_is_free_while_bytes_are_copied(way: str) -> None:
    """Another thread gets on with Python during one long copy."""
    if way == "numpy":
        pytest.skip("as numpy does it")
    size = 256 << 20
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    batch = row_copies((target.reshape(1, -1), [0], source.reshape(1, -1), [0]))
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        while not counted[0]:
            pass
        before = counted[0]
        batch.execute()
        during = counted[0] - before
    finally:
        stop.set()
        counter.join()
    assert during > 1000


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ((np.zeros(1, np.int32),) * 3, "dst must be a one-dimensional int64 array"),
        ((np.zeros((1, 1), np.int64),) * 3, "dst must be a one-dimensional int64 array"),
        ((np.zeros(1, np.int64), np.zeros(1, np.float64), np.zeros(1, np.int64)), "src must be"),
        ((np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(1, np.int64)), "the same length"),
        ((np.zeros(4, np.int64)[::2],) * 3, "contiguous"),
        ((None,) * 3, "bytes-like"),
        ((np.zeros(1, np.int64),) * 2, "takes three arrays"),
    ],
)
def test_arrays_that_are_not_what_they_should_be_are_refused(way: str, arrays: Any, words: str) -> None:
    if way == "numpy":
        pytest.skip("numpy sees to that itself")
    with pytest.raises((TypeError, ValueError, BufferError), match=words):
        native.module.copy_batch(*arrays)

"""One batch of copies between addresses: the form in which copies reach a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache_sched import native

_SCRATCH_BYTES = 4 << 20
"""Rows are gathered into, and scattered from, this much at a time: a temporary that is not allocated anew for each
copy, at a few returns from native code, each of which may have to wait for the GIL."""

_LARGE_ROW = 16 << 20
"""So large a copy is worth a call of its own; numpy has no type for one of 2 GiB."""

_LARGEST_ARRAY = 1 << 62
"""numpy describes no larger array, also where its rows overlap."""


class CopyBatch(NamedTuple):
    """Copies that a device makes as one operation, in any order: `sizes[i]` bytes from `src[i]` to `dst[i]`.

    Nothing is checked here: every byte is there and no destination overlaps another, which planning sees to.

    Attributes:
        dst: int64 [num_copies], addresses.
        src: int64 [num_copies], addresses.
        sizes: int64 [num_copies], bytes, none of them 0.
        nbytes: sum of the sizes, which whoever makes batches knows without adding them up each time.
        owner: whatever keeps the memory on both sides alive.
    """

    dst: NDArray[np.int64]
    src: NDArray[np.int64]
    sizes: NDArray[np.int64]
    nbytes: int
    owner: Any

    def execute(self) -> None:
        """Move the bytes between two places in CPU memory, on the calling thread, without the GIL."""
        if native.module is not None:
            native.module.copy_batch(self.dst, self.src, self.sizes)
        elif len(self.sizes):
            _copy_with_numpy(self)


def _copy_with_numpy(batch: CopyBatch) -> None:
    """Make copies of the same size together: in one pass over the bytes where one side is a run, in two otherwise, as
    numpy has no call that gathers and scatters at once."""
    sizes = batch.sizes
    if (sizes == sizes[0]).all():
        _copy_rows(batch.dst, batch.src, int(sizes[0]))
        return
    for size in np.unique(sizes).tolist():
        same = sizes == size
        _copy_rows(batch.dst[same], batch.src[same], size)


class _Rows:
    """Memory as an array of rows, each an opaque value, for numpy's array interface."""

    def __init__(self, address: int, num_rows: int, stride: int, row_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (num_rows,),
            "strides": (stride,),
            "typestr": f"|V{row_bytes}",
            "version": 3,
        }


def _copy_one_by_one(dst: NDArray[np.int64], src: NDArray[np.int64], num_bytes: int) -> None:
    for to, from_ in zip(dst.tolist(), src.tolist(), strict=True):
        np.asarray(_Rows(to, num_bytes, 1, 1))[:] = np.asarray(_Rows(from_, num_bytes, 1, 1))


def _copy_rows(dst: NDArray[np.int64], src: NDArray[np.int64], row_bytes: int) -> None:
    num_rows = len(dst)
    span = max(int(addresses.max()) - int(addresses.min()) for addresses in (dst, src))
    if row_bytes >= _LARGE_ROW or span * row_bytes >= _LARGEST_ARRAY:
        _copy_one_by_one(dst, src, row_bytes)
        return
    to, to_rows = _as_rows(dst, row_bytes)
    from_, from_rows = _as_rows(src, row_bytes)
    if from_rows is None:
        to[slice(None) if to_rows is None else to_rows] = from_
        return
    if to_rows is None and to.flags.c_contiguous and from_.flags.c_contiguous:
        _take(from_, from_rows, to)
        return
    at_once = max(1, min(num_rows, _SCRATCH_BYTES // row_bytes))
    scratch = np.empty(at_once, dtype=to.dtype) if from_.flags.c_contiguous else None
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        if scratch is None:
            gathered = from_[from_rows[part]]
        else:
            gathered = scratch[: len(from_rows[part])]
            _take(from_, from_rows[part], gathered)
        to[part if to_rows is None else to_rows[part]] = gathered


def _take(rows: NDArray[Any], numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Gather in one pass. Both arrays have to be contiguous: numpy would copy them whole first, and there need not be
    memory between the rows that are asked for."""
    rows.take(numbers, out=out, mode="clip")  # with "raise" numpy gathers into a buffer of its own


def _as_rows(addresses: NDArray[np.int64], row_bytes: int) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Rows that lie at `addresses`: an array of rows, and which of them; None for all of them, in order.

    Rows of that array overlap where addresses are no multiple of the row length apart; only those asked for are used.
    """
    steps = np.diff(addresses)
    stride = int(steps[0]) if len(steps) else row_bytes
    if (steps == stride).all():
        return np.asarray(_Rows(int(addresses[0]), len(addresses), stride, row_bytes)), None
    first = int(addresses.min())
    offsets = addresses - first
    stride = int(np.gcd.reduce(offsets)) or row_bytes
    numbers = offsets // stride
    return np.asarray(_Rows(first, int(numbers.max()) + 1, stride, row_bytes)), numbers

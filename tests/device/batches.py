"""Batches of copies between the rows of numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hicache_sched.device.copy_batch import CopyBatch

NONE = np.empty(0, dtype=np.int64)
NO_COPIES = CopyBatch(NONE, NONE, NONE, 0, None)


def row_copies(*parts: tuple[NDArray[Any], Sequence[int], NDArray[Any], Sequence[int]]) -> CopyBatch:
    """One batch of copies: for each part target, its rows, source and its rows. It owns the arrays."""
    dst, src, sizes = [], [], []
    for target, target_rows, source, source_rows in parts:
        dst += [target.ctypes.data + row * target.strides[0] for row in target_rows]
        src += [source.ctypes.data + row * source.strides[0] for row in source_rows]
        sizes += [target[0].nbytes] * len(target_rows)
    to, from_, num_bytes = (np.array(values, dtype=np.int64) for values in (dst, src, sizes))
    return CopyBatch(to, from_, num_bytes, sum(sizes), owner=parts)

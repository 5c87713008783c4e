"""One copy of many rows between two strided memories, as an emulated copy engine makes it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

RowSelection: TypeAlias = NDArray[np.int64] | slice
"""Row numbers, int64 [num_rows], or a slice with start and stop where they are one contiguous run."""


class RowCopy(NamedTuple):
    """Rows `src_rows` of `src` go to rows `dst_rows` of `dst`, in that order.

    Nothing is checked here: row numbers are in range and no destination is named twice, which planning sees to.

    Attributes:
        dst: [rows, units per row], a view of the destination; a unit is one or more bytes, the same on both sides.
        dst_rows: where the rows go.
        src: [rows, units per row], a view of the source.
        src_rows: where the rows come from; as many as `dst_rows`.
    """

    dst: NDArray[Any]
    dst_rows: RowSelection
    src: NDArray[Any]
    src_rows: RowSelection

    @property
    def num_rows(self) -> int:
        rows = self.dst_rows
        return int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)

    @property
    def nbytes(self) -> int:
        """Bytes that `execute` moves."""
        return self.num_rows * int(self.dst.shape[1]) * self.dst.itemsize

    def execute(self) -> None:
        """Move the bytes, on the calling thread; numpy lets go of the GIL while it does.

        A slice on the source side is read in place; an array of rows is first gathered into a temporary, since
        numpy has no call that gathers and scatters at once.
        """
        self.dst[self.dst_rows] = self.src[self.src_rows]

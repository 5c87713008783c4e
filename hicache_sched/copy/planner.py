"""From a burst's merged indices to its plan.

Everything here works on whole arrays: a loop over pools and planes, none over tokens, pages or layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hicache_sched.copy.merge import Indices, MergedOps
from hicache_sched.copy.plan import CopyPlan
from hicache_sched.errors import InvalidLoadError
from hicache_sched.pools import PlaneGeometry, Pool, PoolPair


class PlanLayout(NamedTuple):
    """All that plans of some pool pairs are made from but the indices, as arrays; all int64 and C-contiguous.

    Attributes:
        pairs: five numbers a pair: tokens of the host and of the device pool, page sizes of both, and tokens of a row
            that both have.
        planes: seven numbers a plane: its pair, then on the host and again on the device the bytes from one row of the
            pool to the next, the rows of the pair in a row of the pool, and the bytes of a row of the pair.
        src_base: [num_layers, num_planes], addresses on the host; 0 where the layer has no such plane.
        dst_base: [num_layers, num_planes], the same on the device.
    """

    pairs: Indices
    planes: Indices
    src_base: Indices
    dst_base: Indices


class BurstPlanner:
    """Plans bursts of some pool pairs. What does not depend on the burst is laid out once, here.

    :param pairs: the anchor's pair, then those of the side pools.
    :param local_layers: for each pair and transfer layer its local layer, None for one that the pair does not have.
    """

    def __init__(self, pairs: Sequence[PoolPair], local_layers: Sequence[Sequence[int | None]]) -> None:
        self._pairs = tuple(pairs)
        self._planes = [_paired_planes(pair) for pair in pairs]
        planes = [(number, host, device) for number in range(len(pairs)) for host, device in self._host_device(number)]
        self._tables = {
            "src_base": np.stack([_bases(host, local_layers[number]) for number, host, _ in planes], axis=1),
            "dst_base": np.stack([_bases(device, local_layers[number]) for number, _, device in planes], axis=1),
            "src_extent": _int64s(host.extent for _, host, _ in planes),
            "dst_extent": _int64s(device.extent for _, _, device in planes),
            "src_stride": _int64s(host.row_stride for _, host, _ in planes),
            "dst_stride": _int64s(device.row_stride for _, _, device in planes),
            "pools": _int64s(number for number, _, _ in planes),
        }

    @property
    def layout(self) -> PlanLayout:
        """What the native planner makes the same plans from."""
        pairs = [
            (
                pair.host.num_tokens,
                pair.device.num_tokens,
                pair.host.page_size,
                pair.device.page_size,
                pair.tokens_per_row,
            )
            for pair in self._pairs
        ]
        planes = [(number, *plane.src, *plane.dst) for number, planes in enumerate(self._planes) for plane in planes]
        return PlanLayout(
            pairs=np.array(pairs, dtype=np.int64).ravel(),
            planes=np.array(planes, dtype=np.int64).ravel(),
            src_base=self._tables["src_base"],
            dst_base=self._tables["dst_base"],
        )

    def plan(self, merged: Mapping[str, MergedOps]) -> CopyPlan:
        """Check every index of a burst and say what to copy; touches no pool memory.

        :param merged: the burst's ops, by the names of the pairs that it moves something of.
        :raises InvalidLoadError: an index is out of range, a page is not whole or not aligned, or a destination
            is named twice.
        """
        moved = [number for number, pair in enumerate(self._pairs) if pair.name in merged]
        copies: list[_Copies] = []
        for number in moved:
            pair = self._pairs[number]
            copies += _copies_of(pair, self._planes[number], merged[pair.name])
        tables = self._tables
        if len(moved) < len(self._pairs):
            tables = self._tables_of(np.flatnonzero(np.isin(tables["pools"], moved)))
        return CopyPlan(
            src_offsets=np.concatenate([plane.src_offsets for plane in copies]),
            dst_offsets=np.concatenate([plane.dst_offsets for plane in copies]),
            sizes=np.concatenate([plane.sizes for plane in copies]),
            plane_ends=np.cumsum([len(plane.sizes) for plane in copies], dtype=np.int64),
            **tables,
        )

    def rebuild(self, arrays: Iterable[bytes]) -> CopyPlan:
        """A plan of the native planner's.

        :param arrays: int64 each: the plan's `src_offsets`, `dst_offsets`, `sizes` and `plane_ends`, and which of the
            planes of all pairs it has.
        """
        src_offsets, dst_offsets, sizes, plane_ends, planes = (np.frombuffer(array, dtype=np.int64) for array in arrays)
        return CopyPlan(
            src_offsets=src_offsets,
            dst_offsets=dst_offsets,
            sizes=sizes,
            plane_ends=plane_ends,
            **self._tables_of(planes),
        )

    def _tables_of(self, planes: Indices) -> dict[str, Indices]:
        return {name: np.ascontiguousarray(table[..., planes]) for name, table in self._tables.items()}

    def _host_device(self, number: int) -> Iterable[tuple[PlaneGeometry, PlaneGeometry]]:
        pair = self._pairs[number]
        return zip(pair.host.geometry, pair.device.geometry, strict=True)


# -- where rows lie -------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """How the rows that both pools of a pair have lie in one plane of one of them.

    Attributes:
        stride: bytes from one row of the pool to the next.
        parts: rows of the pair in a row of the pool, where they lie behind each other.
        row_bytes: bytes of a row of the pair.
    """

    stride: int
    parts: int
    row_bytes: int

    def offsets(self, rows: Indices) -> Indices:
        if self.stride == self.parts * self.row_bytes:
            return rows * self.row_bytes
        if self.parts == 1:
            return rows * self.stride
        return rows // self.parts * self.stride + rows % self.parts * self.row_bytes


class _Plane(NamedTuple):
    """One plane of a pair. Planes that are alike, as K and V mostly are, have equal ones and share their copies."""

    src: _Side
    dst: _Side


class _Copies(NamedTuple):
    """The copies of one plane."""

    src_offsets: Indices
    dst_offsets: Indices
    sizes: Indices


def _paired_planes(pair: PoolPair) -> list[_Plane]:
    return [
        _Plane(_side(pair, pair.host, host), _side(pair, pair.device, device))
        for host, device in zip(pair.host.geometry, pair.device.geometry, strict=True)
    ]


def _side(pair: PoolPair, pool: Pool, plane: PlaneGeometry) -> _Side:
    parts = pool.tokens_per_row // pair.tokens_per_row
    return _Side(plane.row_stride, parts, plane.row_bytes // parts)


def _copies_of(pair: PoolPair, planes: Sequence[_Plane], ops: MergedOps) -> list[_Copies]:
    """Check a pair's ops and work out the copies of each of its planes."""
    _check(pair, ops)
    src_rows = _rows(ops.host, pair.tokens_per_row)
    dst_rows = _rows(ops.device, pair.tokens_per_row)
    if not _is_run(dst_rows):
        _check_distinct(pair, ops, dst_rows)
    copies = {plane: _joined(plane, src_rows, dst_rows) for plane in dict.fromkeys(planes)}
    return [copies[plane] for plane in planes]


def _joined(plane: _Plane, src_rows: Indices, dst_rows: Indices) -> _Copies:
    """One copy for rows that follow each other without a gap on both sides."""
    src, dst = plane.src.offsets(src_rows), plane.dst.offsets(dst_rows)
    row_bytes = plane.dst.row_bytes
    goes_on = (np.diff(src) == row_bytes) & (np.diff(dst) == row_bytes)
    if not goes_on.any():
        return _Copies(src, dst, np.full(len(src), row_bytes, dtype=np.int64))
    starts = np.flatnonzero(np.append(True, ~goes_on))
    return _Copies(src[starts], dst[starts], np.diff(starts, append=len(src)) * row_bytes)


def _bases(plane: PlaneGeometry, local_layers: Sequence[int | None]) -> Indices:
    """Addresses of a plane's layers by transfer layer, 0 for those that it does not have."""
    return _int64s(0 if layer is None else plane.base[layer] for layer in local_layers)


def _int64s(values: Iterable[int]) -> Indices:
    return np.fromiter(values, dtype=np.int64)


def _rows(tokens: Indices, tokens_per_row: int) -> Indices:
    """Rows of tokens that come in whole rows."""
    return tokens if tokens_per_row == 1 else tokens[::tokens_per_row] // tokens_per_row


def _is_run(rows: Indices) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1) and bool((np.diff(rows) == 1).all())


# -- checks ---------------------------------------------------------------------------------------------------


def _check(pair: PoolPair, ops: MergedOps) -> None:
    _check_range(pair.name, "host", pair.host, ops, ops.host)
    _check_range(pair.name, "device", pair.device, ops, ops.device)
    if pair.device.page_size > 1:
        _check_whole_pages(pair, ops)
        _check_pages(pair.name, "host", pair.host.page_size, ops, ops.host)
        _check_pages(pair.name, "device", pair.device.page_size, ops, ops.device)


def _check_range(name: str, side: str, pool: Pool, ops: MergedOps, tokens: Indices) -> None:
    # As unsigned numbers, negative ones are too large as well: one pass instead of two.
    if tokens.view(np.uint64).max() < pool.num_tokens:
        return
    position = int(np.argmax((tokens < 0) | (tokens >= pool.num_tokens)))
    raise InvalidLoadError(
        f"pool {name!r}: {side} index {tokens[position]} of node {ops.node_of(position)} is out of range; "
        f"the {side} pool has tokens 0 to {pool.num_tokens - 1}, load only what its allocator handed out"
    )


def _check_whole_pages(pair: PoolPair, ops: MergedOps) -> None:
    page_size = pair.device.page_size
    lengths = np.diff(ops.ends, prepend=0)
    partial = lengths % page_size
    if not partial.any():
        return
    op = int(np.argmax(partial > 0))
    first = int(ops.ends[op] - partial[op])
    raise InvalidLoadError(
        f"pool {pair.name!r}: node {ops.node_ids[op]} loads {lengths[op]} tokens, which is no multiple of the page "
        f"size {page_size}; its last page is cut short on both sides, from host index {ops.host[first]} and device "
        f"index {ops.device[first]} on: pass whole pages"
    )


def _check_pages(name: str, side: str, page_size: int, ops: MergedOps, tokens: Indices) -> None:
    firsts = tokens[::page_size]
    steps = np.diff(tokens)
    steps[page_size - 1 :: page_size] = 1  # from page to page any step will do
    if not (firsts % page_size).any() and (steps == 1).all():
        return
    expected = (firsts // page_size * page_size)[:, None] + np.arange(page_size)
    position = int(np.argmax(tokens != expected.ravel()))
    raise InvalidLoadError(
        f"pool {name!r}: {side} index {tokens[position]} of node {ops.node_of(position)} breaks page alignment; "
        f"each {page_size} tokens must be consecutive {side} indices that start at a multiple of the page size, "
        "pass whole pages"
    )


def _check_distinct(pair: PoolPair, ops: MergedOps, rows: Indices) -> None:
    ordered = np.sort(rows)
    if (ordered[1:] != ordered[:-1]).all():
        return
    order = np.argsort(rows, kind="stable")
    repeats = order[1:][rows[order[1:]] == rows[order[:-1]]]
    second = int(repeats.min())
    first = int(np.argmax(rows == rows[second]))
    tokens_per_row = pair.tokens_per_row
    raise InvalidLoadError(
        f"pool {pair.name!r}: device index {rows[second] * tokens_per_row} of node "
        f"{ops.node_of(second * tokens_per_row)} is already a destination of node "
        f"{ops.node_of(first * tokens_per_row)} in this burst; give each token a device index of its own"
    )

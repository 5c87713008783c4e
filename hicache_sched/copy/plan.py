"""From a burst's load ops to flat arrays that say which bytes go where.

Everything here works on whole arrays: one loop over the ops that are merged, none over tokens, pages or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.row_copy import RowSelection
from hicache_sched.errors import InvalidLoadError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import PlaneGeometry, Pool, PoolPair

Indices = NDArray[np.int64]


class MergedOps(NamedTuple):
    """The load ops of a burst as one, for one pool; the arrays are copies, nobody else writes them.

    Attributes:
        node_ids: the ops' nodes, in order.
        ends: int64 [num_ops], where each op's tokens end.
        host: int64 [num_tokens], token indices in the host pool.
        device: int64 [num_tokens], token indices in the device pool.
    """

    node_ids: tuple[int, ...]
    ends: Indices
    host: Indices
    device: Indices

    def node_of(self, position: int) -> int:
        """Node of the op that token number `position` of the burst belongs to."""
        return self.node_ids[int(np.searchsorted(self.ends, position, side="right"))]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """One pool's share of a burst: plain arrays that can be executed without Python.

    For each plane `p` and layer `l`, row `i` of the burst is `row_bytes[p]` bytes that go
    from `src_base[p, l] + src_rows[i] * src_stride[p]` to `dst_base[p, l] + dst_rows[i] * dst_stride[p]`.

    Attributes:
        src_rows: int64 [num_rows], rows of the host pool; the same row may come twice.
        dst_rows: int64 [num_rows], rows of the device pool, each once.
        src_base: int64 [num_planes, num_layers], addresses.
        dst_base: int64 [num_planes, num_layers], addresses.
        src_stride: int64 [num_planes], bytes.
        dst_stride: int64 [num_planes], bytes.
        row_bytes: int64 [num_planes].
        src_is_run: whether `src_rows` is one contiguous run, and can be taken as one.
        dst_is_run: the same of `dst_rows`.
        num_tokens: tokens that the burst moves in this pool.
        num_bytes: bytes that the burst moves in this pool, all planes and layers together.
    """

    src_rows: Indices
    dst_rows: Indices
    src_base: Indices
    dst_base: Indices
    src_stride: Indices
    dst_stride: Indices
    row_bytes: Indices
    src_is_run: bool
    dst_is_run: bool
    num_tokens: int
    num_bytes: int

    @property
    def src_selection(self) -> RowSelection:
        """`src_rows`, as a slice where they are one run."""
        return _as_slice(self.src_rows) if self.src_is_run else self.src_rows

    @property
    def dst_selection(self) -> RowSelection:
        """`dst_rows`, as a slice where they are one run."""
        return _as_slice(self.dst_rows) if self.dst_is_run else self.dst_rows


def merge_ops(ops: Sequence[LoadOp], device: DeviceBinding, pool_names: Sequence[str]) -> dict[str, MergedOps]:
    """Read the indices of a burst's ops and join them in order, for each pool that the burst moves something of.

    Device indices are read in order of the current stream, all of them at once, so this may block; host indices in CPU
    memory are simply read. A tensor that several pools share is read once.

    :param pool_names: the anchor's name first, then the side pools'.
    :raises InvalidLoadError: an op's two index tensors differ in length.
    """
    shares: dict[str, list[_Share]] = {name: [] for name in pool_names}
    for op in ops:
        if op.num_tokens:
            shares[pool_names[0]].append(_Share(op.node_id, op.host_indices, op.device_indices))
        for transfer in op.pool_transfers:
            shares[transfer.name].append(_Share(op.node_id, transfer.host_indices, transfer.device_indices))
    moved = {name: pool_shares for name, pool_shares in shares.items() if pool_shares}
    for name, pool_shares in moved.items():
        for share in pool_shares:
            if share.host.shape != share.device.shape:
                raise InvalidLoadError(
                    f"pool {name!r}: node {share.node_id}: {share.host.numel()} host indices but "
                    f"{share.device.numel()} device indices; each token needs one of both"
                )
    every_share = [share for pool_shares in moved.values() for share in pool_shares]
    host = _read([share.host for share in every_share], device, in_order=False)
    on_device = _read([share.device for share in every_share], device, in_order=True)
    return {
        name: MergedOps(
            node_ids=tuple(share.node_id for share in pool_shares),
            ends=np.cumsum([len(share.host) for share in pool_shares], dtype=np.int64),
            host=np.concatenate([host[id(share.host)] for share in pool_shares]),
            device=np.concatenate([on_device[id(share.device)] for share in pool_shares]),
        )
        for name, pool_shares in moved.items()
    }


class _Share(NamedTuple):
    """What one op moves in one pool."""

    node_id: int
    host: torch.Tensor
    device: torch.Tensor


class Planner:
    """Plans bursts of one pool pair. What does not depend on the burst is laid out once, here.

    :param pair: the pools; transfer layers are their layers.
    """

    def __init__(self, pair: PoolPair) -> None:
        self._pair = pair
        self._src_base, self._src_stride, self._row_bytes = _tables(pair.host_rows)
        self._dst_base, self._dst_stride, _ = _tables(pair.device_rows)
        self._bytes_per_row = int(self._row_bytes.sum()) * pair.num_layers

    def plan(self, ops: MergedOps) -> CopyPlan:
        """Check every index of a burst and say what to copy; touches no pool memory.

        :raises InvalidLoadError: an index is out of range, a page is not whole or not aligned, or a destination
            is named twice.
        """
        pair = self._pair
        _check_range(pair.name, "host", pair.host, ops, ops.host)
        _check_range(pair.name, "device", pair.device, ops, ops.device)
        if pair.device.page_size > 1:
            _check_whole_pages(pair, ops)
            _check_pages(pair.name, "host", pair.host.page_size, ops, ops.host)
            _check_pages(pair.name, "device", pair.device.page_size, ops, ops.device)

        src_rows = _rows(ops.host, pair.tokens_per_row)
        dst_rows = _rows(ops.device, pair.tokens_per_row)
        dst_is_run = _is_run(dst_rows)
        if not dst_is_run:
            _check_distinct(pair, ops, dst_rows)
        return CopyPlan(
            src_rows=src_rows,
            dst_rows=dst_rows,
            src_base=self._src_base,
            dst_base=self._dst_base,
            src_stride=self._src_stride,
            dst_stride=self._dst_stride,
            row_bytes=self._row_bytes,
            src_is_run=_is_run(src_rows),
            dst_is_run=dst_is_run,
            num_tokens=len(ops.device),
            num_bytes=len(dst_rows) * self._bytes_per_row,
        )


def _read(tensors: Sequence[torch.Tensor], device: DeviceBinding, *, in_order: bool) -> dict[int, Indices]:
    """Values of tensors, by the tensor's `id`; not to be kept, as they may be the tensors' own memory.

    :param in_order: whether tensors in CPU memory, too, may be written by work on the current stream; so it is
        on an emulated device.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    values = list(distinct.values())
    if len({tensor.device for tensor in values}) == 1 and not values[0].is_cpu:
        # One read of the device instead of one per tensor.
        values = list(device.to_host([torch.cat(values)])[0].split([len(tensor) for tensor in values]))
    elif in_order or not all(tensor.is_cpu for tensor in values):
        values = device.to_host(values)
    return {key: value.numpy() for key, value in zip(distinct, values, strict=True)}


def _tables(planes: Sequence[PlaneGeometry]) -> tuple[Indices, Indices, Indices]:
    """Addresses [plane, layer], row strides [plane] and row lengths [plane] of a pool."""
    return (
        np.stack([plane.base for plane in planes]),
        np.array([plane.row_stride for plane in planes], dtype=np.int64),
        np.array([plane.row_bytes for plane in planes], dtype=np.int64),
    )


def _rows(tokens: Indices, tokens_per_row: int) -> Indices:
    """Rows of tokens that come in whole rows."""
    return tokens if tokens_per_row == 1 else tokens[::tokens_per_row] // tokens_per_row


def _is_run(rows: Indices) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1) and bool((np.diff(rows) == 1).all())


def _as_slice(rows: Indices) -> slice:
    return slice(int(rows[0]), int(rows[-1]) + 1)


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

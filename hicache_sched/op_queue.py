"""The load ops queued since the last hand-out, and what a burst made of them is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hicache_sched.errors import InvalidLoadError
from hicache_sched.load_op import LoadOp, PoolTransfer


class IndexList(Protocol):
    """Where the indices of load ops are, kept as they come for a data plane that does not look at ops."""

    def add(self, op: LoadOp) -> None: ...


class OpQueue:
    """Load ops in the order they were loaded, with their sums kept as they come.

    A hand-out takes the whole queue, so that it costs the same for one op and for a thousand.

    Attributes:
        ops: the load ops.
        node_ids: their nodes.
        tokens_by_pool: tokens to move per pool; every pool of the backend is named.
        indices: where their indices are, None where nobody asks.
    """

    __slots__ = ("indices", "node_ids", "ops", "tokens_by_pool")

    def __init__(self, pool_names: Sequence[str], indices: IndexList | None = None) -> None:
        self.indices = indices
        self.ops: list[LoadOp] = []
        self.node_ids: list[int] = []
        self.tokens_by_pool: dict[str, int] = dict.fromkeys(pool_names, 0)

    def append(self, op: LoadOp, anchor: str) -> None:
        self.ops.append(op)
        self.node_ids.append(op.node_id)
        self.tokens_by_pool[anchor] += op.num_tokens
        for transfer in op.pool_transfers:
            self.tokens_by_pool[transfer.name] += transfer.num_tokens
        if self.indices is not None:
            self.indices.add(op)


def check_op(op: LoadOp, pool_names: Sequence[str]) -> None:
    """Check what can be seen of a load op without reading an index.

    :param pool_names: the anchor's name first, then the side pools'.
    :raises InvalidLoadError: naming the op and what to change.
    """
    if not isinstance(op, LoadOp):
        raise InvalidLoadError(f"load() takes a LoadOp, not {type(op).__name__}: {op!r}")
    where = f"load op of node {op.node_id!r}"
    if type(op.node_id) is not int:
        raise InvalidLoadError(f"{where}: node_id must be an int, not {type(op.node_id).__name__}")
    _check_indices(op, where)
    if not isinstance(op.pool_transfers, tuple):
        raise InvalidLoadError(f"{where}: pool_transfers must be a tuple, not {type(op.pool_transfers).__name__}")
    if op.num_tokens == 0 and not op.pool_transfers and op.payload is None:
        raise InvalidLoadError(f"{where}: moves no token; do not load an empty op")
    for transfer in op.pool_transfers:
        if not isinstance(transfer, PoolTransfer):
            raise InvalidLoadError(f"{where}: pool_transfers holds a {type(transfer).__name__}, not a PoolTransfer")
        if transfer.name not in pool_names[1:]:
            side_pools = ", ".join(map(repr, pool_names[1:])) or "none"
            raise InvalidLoadError(
                f"{where}: no side pool is named {transfer.name!r}; the backend's side pools: {side_pools}"
            )
        _check_indices(transfer, f"{where}, pool {transfer.name!r}")
        if transfer.num_tokens == 0:
            raise InvalidLoadError(f"{where}, pool {transfer.name!r}: moves no token; leave the transfer out")


def _check_indices(indexed: LoadOp | PoolTransfer, where: str) -> None:
    for side in ("host_indices", "device_indices"):
        indices = getattr(indexed, side)
        if not isinstance(indices, torch.Tensor):
            raise InvalidLoadError(f"{where}: {side} must be a torch.Tensor, not {type(indices).__name__}")
        if indices.dtype != torch.int64:
            raise InvalidLoadError(f"{where}: {side} must be torch.int64, not {indices.dtype}")
        if indices.ndim != 1:
            raise InvalidLoadError(f"{where}: {side} must have 1 dimension, not {indices.ndim}")
        if indices.is_meta or indices.layout is not torch.strided:
            what = "on the meta device" if indices.is_meta else f"of layout {indices.layout}"
            raise InvalidLoadError(f"{where}: {side} must be a dense tensor with values, not one {what}")
    host, device = indexed.host_indices.shape[0], indexed.device_indices.shape[0]
    if host != device:
        raise InvalidLoadError(
            f"{where}: host_indices and device_indices must be of equal length, not {host} and {device}"
        )

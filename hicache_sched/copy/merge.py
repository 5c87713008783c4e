"""The load ops of a burst as one: their indices read and joined, pool by pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.errors import InvalidLoadError
from hicache_sched.load_op import LoadOp

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

"""Load ops: one node's pages to bring back from the host pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PoolTransfer:
    """A side pool's share of a load op.

    Attributes:
        name: name of the side pool, one of the backend's `pool_names` after the first.
        host_indices: int64 [num_tokens], rows of the side pool on the host.
        device_indices: int64 [num_tokens], rows of the side pool on the device.
    """

    name: str
    host_indices: torch.Tensor
    device_indices: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens to move, in this side pool."""
        return self.host_indices.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class LoadOp:
    """One node's pages to bring back.

    Attributes:
        node_id: the engine's name for the node; it comes back in acks, errors and logs.
        host_indices: int64 [num_tokens], where the tokens are in the anchor's host pool.
        device_indices: int64 [num_tokens], where they go in the anchor's device pool. Their values may still
            be on their way: they are read behind the start event of the hand-out, never before.
        pool_transfers: what the same node moves in side pools.
        payload: an engine's own description of the op, for a backend that reads that. What one moves cannot be seen
            here, so its tensors may be empty.
    """

    node_id: int
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    pool_transfers: tuple[PoolTransfer, ...] = ()
    payload: Any = None

    @property
    def num_tokens(self) -> int:
        """Tokens to move in the anchor; side pools have their own number."""
        return self.host_indices.shape[0]

    @property
    def all_device_indices(self) -> list[torch.Tensor]:
        """The device indices of the anchor and of every side pool."""
        return [self.device_indices, *(transfer.device_indices for transfer in self.pool_transfers)]

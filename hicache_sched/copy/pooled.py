"""The built-in backend: bursts between pools whose geometry is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hicache_sched.copy.backend import TransferPoint
from hicache_sched.copy.plan import CopyPlan, Planner, merge_ops
from hicache_sched.copy.submit import BurstCopies, Submitter, submitter_for
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import PoolPair


class PairShare(NamedTuple):
    """What a planned burst moves of one pair.

    Attributes:
        plan: what is copied.
        copies: its copies on their way.
        local_layers: local layer of each transfer layer, None for one that the pair does not have.
    """

    plan: CopyPlan
    copies: BurstCopies
    local_layers: Sequence[int | None]


class PreparedBurst:
    """A planned burst.

    Attributes:
        shares: what it moves of each pair, the anchor first.
    """

    __slots__ = ("shares",)

    def __init__(self, shares: Sequence[PairShare]) -> None:
        self.shares = shares

    @property
    def num_bytes(self) -> int:
        return sum(share.plan.num_bytes for share in self.shares)


class PooledBackend:
    """Moves bursts between the two pools of each of some pairs; a `BurstBackend`.

    The first pair is the anchor, which a load op's own indices are for; the others are side pools, which move what
    load ops name in their `pool_transfers`. Within a layer the anchor goes first and the others follow in order.

    :param pairs: the anchor's pair, then those of the side pools.
    :param num_layers: transfer layers; None for as many as the largest pair without a layer mapper has.
    :raises HiCacheSchedError: there is no pair, two have the same name, or a pair's layers and the transfer layers do
        not fit together: each layer of a pair has to be moved by one transfer layer.
    """

    def __init__(self, pairs: Sequence[PoolPair], *, num_layers: int | None = None) -> None:
        if not pairs:
            raise HiCacheSchedError("PooledBackend needs a pool pair to move")
        names = tuple(pair.name for pair in pairs)
        if len(set(names)) < len(names):
            raise HiCacheSchedError(f"pool pairs need names of their own, as load ops go by them, not {names}")
        if num_layers is None:
            unmapped = [pair.num_layers for pair in pairs if pair.layer_mapper is None]
            if not unmapped:
                raise HiCacheSchedError("every pool pair has a layer mapper: pass num_layers, the transfer layers")
            num_layers = max(unmapped)
        self._pairs = tuple(pairs)
        self._names = names
        self._num_layers = num_layers
        self._local_layers = [_local_layers(pair, num_layers) for pair in pairs]
        self._planners = [Planner(pair) for pair in pairs]
        self._device: DeviceBinding | None = None
        self._submitters: list[Submitter] = []

    @property
    def num_layers(self) -> int:
        return self._num_layers

    @property
    def pool_names(self) -> tuple[str, ...]:
        return self._names

    def bind(self, scheduler: TransferPoint) -> None:
        """Learn the device, and lay out views of every plane and layer, once for all bursts.

        :raises HiCacheSchedError: a device pool is on another device than the scheduler.
        """
        self._submitters = [submitter_for(pair, scheduler.device) for pair in self._pairs]
        self._device = scheduler.device

    def prepare(self, ops: Sequence[LoadOp]) -> PreparedBurst:
        """Merge the ops, read and check their indices; blocks until device indices are read. Copies nothing.

        :raises InvalidLoadError: in some pool an index is out of range, a destination is named twice, or a page is not
            whole or not aligned.
        :raises HiCacheSchedError: `bind` was not called.
        """
        if self._device is None:
            raise HiCacheSchedError("PooledBackend is not bound: a TransferScheduler binds it at start()")
        merged = merge_ops(ops, self._device, self._names)
        plans = {
            number: self._planners[number].plan(merged[name])
            for number, name in enumerate(self._names)
            if name in merged
        }
        return PreparedBurst(
            [
                PairShare(plan, self._submitters[number].begin(plan), self._local_layers[number])
                for number, plan in plans.items()
            ]
        )

    def enqueue_layer(self, prepared: PreparedBurst, layer: int) -> None:
        """Submit one layer of every pair on the current stream; on a torch device it may wait for a staging buffer."""
        for share in prepared.shares:
            local = share.local_layers[layer]
            if local is not None:
                share.copies.submit_layer(local)

    def finish(self, prepared: PreparedBurst) -> None:
        """Let go of the burst's buffers."""
        for share in prepared.shares:
            share.copies.release()


def _local_layers(pair: PoolPair, num_layers: int) -> list[int | None]:
    """Local layer of each transfer layer.

    :raises HiCacheSchedError: a layer of the pair is moved by no transfer layer or by two, or is not there.
    """
    if pair.layer_mapper is None:
        layers: list[int | None] = [layer if layer < pair.num_layers else None for layer in range(num_layers)]
    else:
        layers = [pair.layer_mapper(layer) for layer in range(num_layers)]
    mapped = [layer for layer in layers if layer is not None]
    if sorted(mapped) != list(range(pair.num_layers)):
        raise HiCacheSchedError(
            f"pool pair {pair.name!r} has the layers 0 to {pair.num_layers - 1} and each has to be moved once, but the "
            f"{num_layers} transfer layers move the layers {mapped}: change its layer_mapper or num_layers"
        )
    return layers

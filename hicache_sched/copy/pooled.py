"""The built-in backend: bursts between pools whose geometry is known."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_sched.copy.backend import TransferPoint
from hicache_sched.copy.plan import CopyPlan, Planner, merge_ops
from hicache_sched.copy.submit import BurstCopies, Submitter, submitter_for
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import PoolPair


class PreparedBurst:
    """A planned burst.

    Attributes:
        plan: what is copied.
        copies: its copies on their way.
    """

    __slots__ = ("copies", "plan")

    def __init__(self, plan: CopyPlan, copies: BurstCopies) -> None:
        self.plan = plan
        self.copies = copies

    @property
    def num_bytes(self) -> int:
        return self.plan.num_bytes


class PooledBackend:
    """Moves bursts between the two pools of a pair; a `BurstBackend`.

    :param pairs: the anchor's pair, and no other: side pools are not supported yet.
    :raises HiCacheSchedError: there is not exactly one pair, or it has a layer mapper.
    """

    def __init__(self, pairs: Sequence[PoolPair]) -> None:
        if not pairs:
            raise HiCacheSchedError("PooledBackend needs a pool pair to move")
        if len(pairs) > 1:
            names = ", ".join(repr(pair.name) for pair in pairs[1:])
            raise HiCacheSchedError(f"side pools are not supported yet: pass one pool pair, without {names}")
        (self._anchor,) = pairs
        if self._anchor.layer_mapper is not None:
            raise HiCacheSchedError(
                f"pool pair {self._anchor.name!r} has a layer mapper, which is not supported yet: transfer layers "
                "are the pools' layers"
            )
        self._planner = Planner(self._anchor)
        self._device: DeviceBinding | None = None
        self._submitter: Submitter | None = None

    @property
    def num_layers(self) -> int:
        return self._anchor.num_layers

    @property
    def pool_names(self) -> tuple[str, ...]:
        return (self._anchor.name,)

    def bind(self, scheduler: TransferPoint) -> None:
        """Learn the device, and lay out views of every plane and layer, once for all bursts.

        :raises HiCacheSchedError: the device pool is on another device than the scheduler.
        """
        self._submitter = submitter_for(self._anchor, scheduler.device)
        self._device = scheduler.device

    def prepare(self, ops: Sequence[LoadOp]) -> PreparedBurst:
        """Merge the ops, read and check their indices; blocks until device indices are read. Copies nothing.

        :raises InvalidLoadError: an index is out of range, a destination is named twice, or a page is not whole
            or not aligned.
        :raises HiCacheSchedError: `bind` was not called.
        """
        if self._device is None or self._submitter is None:
            raise HiCacheSchedError("PooledBackend is not bound: a TransferScheduler binds it at start()")
        plan = self._planner.plan(merge_ops(ops, self._device))
        return PreparedBurst(plan, self._submitter.begin(plan))

    def enqueue_layer(self, prepared: PreparedBurst, layer: int) -> None:
        """Submit K and V of one layer on the current stream; on a torch device it may wait for a staging buffer."""
        prepared.copies.submit_layer(layer)

    def finish(self, prepared: PreparedBurst) -> None:
        """Let go of the burst's buffers."""
        prepared.copies.release()

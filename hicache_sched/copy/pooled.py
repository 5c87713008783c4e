"""The built-in backend: bursts between pools whose geometry is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache_sched.copy.backend import TransferPoint
from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.plan import CopyPlan
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.staged import StagedSubmitter
from hicache_sched.copy.submit import BatchSubmitter, BurstCopies, Submitter
from hicache_sched.device.batched_copy import BatchedCopy, NoBatchedCopy, batched_copy_for
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import PoolPair


class PreparedBurst:
    """A planned burst.

    Attributes:
        plan: what is copied.
        copies: its copies on their way.
        num_bytes: bytes that it moves, all pools and layers together.
    """

    __slots__ = ("copies", "num_bytes", "plan")

    def __init__(self, plan: CopyPlan, copies: BurstCopies) -> None:
        self.plan = plan
        self.copies = copies
        self.num_bytes = plan.num_bytes


class PooledBackend:
    """Moves bursts between the two pools of each of some pairs; a `BurstBackend`.

    The first pair is the anchor, which a load op's own indices are for; the others are side pools, which move what
    load ops name in their `pool_transfers`. Within a layer the anchor goes first and the others follow in order.

    :param pairs: the anchor's pair, then those of the side pools.
    :param num_layers: transfer layers; None for as many as the largest pair without a layer mapper has.
    :param stable_host: whether the host pages of a burst are complete when it is handed out, with no copy to them still
        on its way. CUDA may then read them at any time, else it reads them in the order of the h2d stream.
    :raises HiCacheSchedError: there is no pair, two have the same name, or a pair's layers and the transfer layers do
        not fit together: each layer of a pair has to be moved by one transfer layer.
    """

    def __init__(self, pairs: Sequence[PoolPair], *, num_layers: int | None = None, stable_host: bool = False) -> None:
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
        self._planner = BurstPlanner(pairs, self._local_layers)
        self._stable_host = stable_host
        self._device: DeviceBinding | None = None
        self._batched_copy: BatchedCopy | NoBatchedCopy | None = None
        self._submitter: Submitter | None = None

    @property
    def num_layers(self) -> int:
        return self._num_layers

    @property
    def pool_names(self) -> tuple[str, ...]:
        return self._names

    @property
    def copy_method(self) -> str | None:
        """How copies are made, once bound; for logs."""
        return None if self._submitter is None else self._submitter.name

    @property
    def batched_copy(self) -> BatchedCopy | NoBatchedCopy | None:
        """How the device copies in batches, or why it does not; None before it is bound."""
        return self._batched_copy

    @property
    def planner(self) -> BurstPlanner:
        """Plans its bursts."""
        return self._planner

    @property
    def ops_per_layer(self) -> int:
        """Operations of a layer on the stream: one batch, or as many copies as there are planes where they are staged,
        which waits for its buffers anyway."""
        if isinstance(self._submitter, BatchSubmitter):
            return 1
        return sum(len(pair.device.geometry) for pair in self._pairs)

    def bind(self, scheduler: TransferPoint) -> None:
        """Learn the device, and how it makes copies: in batches where it can.

        :raises HiCacheSchedError: a device pool is on another device than the scheduler.
        """
        device = scheduler.device
        for pair in self._pairs:
            _check_place(pair, device)
        batched_copy = batched_copy_for(
            device, scheduler.h2d_stream, self._host_memory(), stable_source=self._stable_host
        )
        if isinstance(batched_copy, NoBatchedCopy):
            self._submitter = StagedSubmitter(self._pairs, self._local_layers, device, batched_copy.reason)
        else:
            self._submitter = BatchSubmitter(batched_copy, self._names, owner=self._pairs)
        self._batched_copy = batched_copy
        self._device = device

    def prepare(self, ops: Sequence[LoadOp]) -> PreparedBurst:
        """Merge the ops, read and check their indices; blocks until device indices are read. Copies nothing.

        :raises InvalidLoadError: in some pool an index is out of range, a destination is named twice, or a page is not
            whole or not aligned.
        :raises HiCacheSchedError: `bind` was not called.
        """
        if self._device is None or self._submitter is None:
            raise HiCacheSchedError("PooledBackend is not bound: a TransferScheduler binds it at start()")
        plan = self._planner.plan(merge_ops(ops, self._device, self._names))
        return PreparedBurst(plan, self._submitter.begin(plan))

    def enqueue_layer(self, prepared: PreparedBurst, layer: int) -> None:
        """Submit one layer of every pair on the current stream; where copies are staged it may wait for a buffer.

        :raises BatchError: the device refused the layer.
        """
        prepared.copies.submit_layer(layer)

    def plan_of(self, prepared: PreparedBurst | None) -> CopyPlan | None:
        """The plan that `prepare` made, if it did."""
        return None if prepared is None else prepared.plan

    def finish(self, prepared: PreparedBurst) -> None:
        """Let go of the burst's buffers."""
        prepared.copies.release()

    def _host_memory(self) -> Iterator[tuple[int, int]]:
        for pair in self._pairs:
            for plane in pair.host.geometry:
                for base in plane.base.tolist():
                    yield base, base + plane.extent


def _check_place(pair: PoolPair, device: DeviceBinding) -> None:
    where = pair.device.device
    if isinstance(device.runtime, EmulatedDevice):
        if where.type != "cpu":
            raise HiCacheSchedError(
                f"pool pair {pair.name!r}: the device pool is on {where} but the scheduler runs on an emulated "
                "device, whose memory is CPU memory; pass the runtime of that device to the scheduler"
            )
    elif where.type == "cpu" or where.index not in (None, device.index):
        raise HiCacheSchedError(
            f"pool pair {pair.name!r}: the device pool is on {where} but the scheduler runs on {device.name}; "
            "allocate the pool there"
        )


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

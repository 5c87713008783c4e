"""Submitting a plan's copies, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hicache_sched.copy.layers import AddressBuffers, LayerBatches
from hicache_sched.copy.plan import CopyPlan
from hicache_sched.device.batched_copy import BatchedCopy, BatchError


class BurstCopies(Protocol):
    """The copies of one burst, on their way to the h2d stream."""

    def submit_layer(self, layer: int) -> None:
        """Put one transfer layer's copies on the calling thread's current stream."""

    def release(self) -> None:
        """Let go of the burst's buffers; what was submitted has landed. Any thread."""


class Submitter(Protocol):
    """Submits bursts; used by one thread at a time.

    Attributes:
        name: how copies are made, for logs.
    """

    @property
    def name(self) -> str: ...

    def begin(self, plan: CopyPlan) -> BurstCopies:
        """Take on a burst; makes no device call."""


class BatchSubmitter:
    """Submits each layer as one batch, straight from the plan's arrays.

    :param batched_copy: how the device makes batches.
    :param pool_names: by which errors name pools.
    :param owner: whatever keeps the memory of the pools alive.
    """

    def __init__(self, batched_copy: BatchedCopy, pool_names: Sequence[str], owner: object) -> None:
        self.name = batched_copy.name
        self._batched_copy = batched_copy
        self._pool_names = tuple(pool_names)
        self._owner = owner
        self._buffers = AddressBuffers()

    def begin(self, plan: CopyPlan) -> BatchedCopies:
        return BatchedCopies(
            plan,
            LayerBatches(plan, self._owner, self._buffers, keep=self._batched_copy.keeps_arrays),
            self._batched_copy,
            self._pool_names,
        )


class BatchedCopies:
    """A burst whose layers are batches."""

    def __init__(
        self, plan: CopyPlan, batches: LayerBatches, batched_copy: BatchedCopy, pool_names: Sequence[str]
    ) -> None:
        self._plan = plan
        self._batches = batches
        self._batched_copy = batched_copy
        self._pool_names = pool_names

    def submit_layer(self, layer: int) -> None:
        """
        :raises BatchError: the device refused the layer; says which copy it blames.
        """
        batch = self._batches.layer(layer)
        if batch is None:
            return
        try:
            self._batched_copy.enqueue(batch)
        except BatchError as exc:
            copy = None if exc.index is None else int(self._batches.positions(layer)[exc.index])
            raise refused(self._plan, layer, copy, self._pool_names, exc) from exc

    def release(self) -> None:
        self._batches.release()


def refused(
    plan: CopyPlan, layer: int, copy: int | None, pool_names: Sequence[str], error: BaseException
) -> BatchError:
    """What is raised where the device refused a layer; says which copy it blames.

    :param copy: its number in the plan, None where the device does not say.
    :param error: what the device says.
    """
    where = f"layer {layer}" if copy is None else plan.name_copy(copy, layer, pool_names)
    return BatchError(f"{where}: {error}", copy)

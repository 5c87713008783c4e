"""A burst's copies, made by SGLang itself: its index moves, its transfer engine, its host pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_sched.copy import CopyPlan, TransferPoint
from hicache_sched.integrations.sglang.late import HandedOut, Sizes
from hicache_sched.integrations.sglang.plans import EnginePlans
from hicache_sched.load_op import LoadOp


@dataclass(frozen=True)
class QueuedOp:
    """A `CacheOperation` of SGLang's, and the burst that it goes into."""

    operation: Any
    burst: HandedOut


@dataclass(frozen=True)
class Prepared:
    """Transfers with their indices moved, and the event behind the moves."""

    transfers: list[Any]
    moved: Any
    num_bytes: int


def load_op(operation: Any, burst: HandedOut) -> LoadOp:
    """A `CacheOperation` as a load op; its indices are shown where they are as ours."""
    host, device = operation.host_indices, operation.device_indices
    are_plain = all(indices.dtype == torch.int64 and indices.ndim == 1 for indices in (host, device))
    if not are_plain or len(host) != len(device):
        host = device = torch.empty(0, dtype=torch.int64)
    return LoadOp(int(operation.node_ids[0]), host, device, payload=QueuedOp(operation, burst))


class EngineBackend:
    """Has a `HiCacheController` make the copies, on the data plane's thread; a `SubmitsBursts`.

    Transfers of every pool kind, layout and sidecar are what SGLang makes of the merged operation.
    """

    ops_per_layer = 1
    copy_method = "SGLang's transfer engine"
    pool_names: tuple[str, ...] = ("kv",)

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._runtime: Any = None

    @property
    def num_layers(self) -> int:
        number: int = self._controller.transfer_layer_id_max
        return number

    def bind(self, scheduler: TransferPoint) -> None:
        self._runtime = scheduler.runtime

    def prepare(self, ops: Sequence[LoadOp]) -> Prepared:
        """Merge the operations and move their indices, on the index stream."""
        controller, merged = self._controller, self._merge(ops)
        transfers = controller._l2_load_transfers(*controller._move_op_indices(merged))
        moved = self._runtime.Event()
        moved.record()
        return Prepared(transfers, moved, ops[0].payload.burst.sizes.num_bytes)

    def enqueue_layer(self, prepared: Prepared, layer: int) -> None:
        raise NotImplementedError("SGLang's transfer engine submits whole bursts")

    def submit_burst(self, prepared: Prepared, on_layer_done: Callable[[int], None]) -> None:
        # The engine makes its stream wait for this event, and so for the moves, which were on the index stream.
        self._controller.l2_transfer_engine.submit_host_to_device(
            prepared.transfers,
            start_event=prepared.moved,
            on_layer_done=on_layer_done,
            transfer_layer_id_max=self._controller.transfer_layer_id_max,
        )

    def finish(self, prepared: Prepared | CopyPlan) -> None:
        """The scheduler drops it, and the tensors with it."""

    def _merge(self, ops: Sequence[LoadOp]) -> Any:
        """A burst's operations as one; the burst is told what that moves."""
        controller = self._controller
        operations = [op.payload.operation for op in ops]
        merged = type(operations[0]).merge_ops(operations)
        ops[0].payload.burst.sizes = Sizes(
            len(merged.device_indices), controller._num_tokens_by_pool(merged), controller._transfer_num_bytes(merged)
        )
        return merged


class PlanningBackend(EngineBackend):
    """Plans the bursts that it can, and has the controller make the copies of the others; a `PlansBursts`, too."""

    def __init__(self, controller: Any, plans: EnginePlans) -> None:
        super().__init__(controller)
        self._plans = plans
        self.pool_names = plans.pool_names

    def plan(self, ops: Sequence[LoadOp]) -> CopyPlan | None:
        merged = self._merge(ops)
        # Not moved: that brings indices to where SGLang's copies want them, and a plan wants them on the host.
        transfers = self._controller._l2_load_transfers(
            merged.host_indices, merged.device_indices, merged.pool_transfers
        )
        return self._plans.plan([op.node_id for op in ops], transfers)

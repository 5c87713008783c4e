"""An engine's backend that plans: its plans are executed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hicache_sched.copy.backend import BurstBackend, PlansBursts, SubmitsBursts, TransferPoint
from hicache_sched.copy.plan import CopyPlan, check_plan
from hicache_sched.copy.submit import BatchSubmitter, BurstCopies
from hicache_sched.device.batched_copy import BatchedCopy, NoBatchedCopy, batched_copy_for
from hicache_sched.load_op import LoadOp


class _Planned(NamedTuple):
    """A burst that is copied here."""

    plan: CopyPlan
    copies: BurstCopies
    num_bytes: int


class PlannedBackend:
    """Makes the copies of an engine's plans in batches, and lets the engine make those that it does not plan.

    :param engine: the engine's backend.

    Attributes:
        batched_copy: how the device makes batches, or why it makes none; None before it is bound.
    """

    def __init__(self, engine: PlansBursts) -> None:
        self._engine = engine
        self._submitter: BatchSubmitter | None = None
        self.num_layers = engine.num_layers
        self.pool_names = tuple(engine.pool_names)
        self.copy_method = "the backend's own"
        self.batched_copy: BatchedCopy | NoBatchedCopy | None = None

    @property
    def ops_per_layer(self) -> int:
        """Of either kind of burst."""
        return getattr(self._engine, "ops_per_layer", 1)

    def bind(self, scheduler: TransferPoint) -> None:
        self._engine.bind(scheduler)
        # Nothing is known of the memory that plans will name, so it is read in the order of the stream.
        batched_copy = batched_copy_for(scheduler.device, scheduler.h2d_stream, (), stable_source=False)
        self.batched_copy = batched_copy
        if isinstance(batched_copy, NoBatchedCopy):
            self.copy_method = f"the backend's own, because {batched_copy.reason}"
        else:
            self._submitter = BatchSubmitter(batched_copy, self.pool_names, owner=self._engine)
            self.copy_method = batched_copy.name

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        """
        :raises InvalidLoadError: the engine says so, or its plan is not what `CopyPlan` says.
        """
        plan = None if self._submitter is None else self._engine.plan(ops)
        if plan is None or self._submitter is None:
            return self._engine.prepare(ops)
        check_plan(plan, self.num_layers, len(self.pool_names))
        return _Planned(plan, self._submitter.begin(plan), plan.num_bytes)

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        if isinstance(prepared, _Planned):
            prepared.copies.submit_layer(layer)
        else:
            self._engine.enqueue_layer(prepared, layer)

    @property
    def makes_batches(self) -> bool:
        """Whether plans are asked for, once bound."""
        return self._submitter is not None

    def plan_of(self, prepared: Any) -> CopyPlan | None:
        """The plan that `prepare` made; None where the engine makes the copies."""
        return prepared.plan if isinstance(prepared, _Planned) else None

    def finish(self, prepared: Any) -> None:
        self._engine.finish(prepared.plan if isinstance(prepared, _Planned) else prepared)


class PlannedWholeBackend(PlannedBackend):
    """The same for an engine that submits a burst which it does not plan in one call."""

    def __init__(self, engine: PlansBursts) -> None:
        super().__init__(engine)
        assert isinstance(engine, SubmitsBursts)
        self._submits: SubmitsBursts = engine

    def submit_burst(self, prepared: Any, on_layer_done: Callable[[int], None]) -> None:
        if not isinstance(prepared, _Planned):
            self._submits.submit_burst(prepared, on_layer_done)
            return
        for layer in range(self.num_layers):
            prepared.copies.submit_layer(layer)
            on_layer_done(layer)


def planned(backend: BurstBackend) -> BurstBackend:
    """The backend that makes the copies of a backend's plans; the backend itself where it gives none."""
    if not isinstance(backend, PlansBursts):
        return backend
    return PlannedWholeBackend(backend) if isinstance(backend, SubmitsBursts) else PlannedBackend(backend)

"""Backends of engines that plan their bursts: the scheduler makes the copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hicache_sched import InvalidLoadError, LoadFailedError, LoadOp, native
from hicache_sched.copy import CopyPlan, PooledBackend
from hicache_sched.copy.planned import PlannedBackend
from hicache_sched.copy.submit import BatchSubmitter
from hicache_sched.device import EmulatedDevice
from hicache_sched.device.batched_copy import BatchError
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.pools import PoolPair
from tests.builders import MakeScheduler
from tests.copy.builders import Point, expected_bytes, make_pair, page_op, plan_of, raw_bytes

OPS = [page_op(1, [5, 2], [1, 6]), page_op(2, [3], [0])]


class EngineBackend:
    """An engine's backend, with plans for bursts and a way of its own to move those that it does not plan.

    Attributes:
        calls: what was called, in order, with what it was called on.
        plans: whether it plans.
        changes: arrays to put into its plans.
    """

    def __init__(self, pair: PoolPair) -> None:
        self._pooled = PooledBackend([pair])
        self.num_layers, self.pool_names = self._pooled.num_layers, self._pooled.pool_names
        self.calls: list[tuple[str, Any]] = []
        self.plans = True
        self.changes: dict[str, Any] = {}

    def bind(self, scheduler: Any) -> None:
        self._pooled.bind(scheduler)

    def plan(self, ops: Sequence[LoadOp]) -> CopyPlan | None:
        plan = dataclasses.replace(self._pooled.prepare(ops).plan, **self.changes) if self.plans else None
        self.calls.append(("plan", plan))
        return plan

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        prepared = self._pooled.prepare(ops)
        self.calls.append(("prepare", prepared))
        return prepared

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        self.calls.append(("enqueue_layer", prepared))
        self._pooled.enqueue_layer(prepared, layer)

    def finish(self, prepared: Any) -> None:
        self.calls.append(("finish", prepared))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class WholeBurstBackend(EngineBackend):
    """The same, and what it does not plan it moves in one call."""

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        raise AssertionError("it submits whole bursts")

    def submit_burst(self, prepared: Any, on_layer_done: Callable[[int], None]) -> None:
        self.calls.append(("submit_burst", prepared))
        for layer in range(self.num_layers):
            self._pooled.enqueue_layer(prepared, layer)
            on_layer_done(layer)


def hand_out(make_scheduler: MakeScheduler, backend: EngineBackend, mode: str) -> Any:
    scheduler = make_scheduler(backend, mode=mode)
    for op in OPS:
        scheduler.load(op)
    handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None
    return handle


@pytest.mark.skipif(native.module is None, reason="needs the native part")
def test_the_native_plane_makes_the_copies_of_a_plan_without_python(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    backend, wanted = EngineBackend(pair), expected_bytes(pair, OPS)

    def not_here(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("in Python")

    monkeypatch.setattr(device, "enqueue_copies", not_here)

    assert hand_out(make_scheduler, backend, "async").result(30).num_bytes > 0

    assert raw_bytes(pair.device) == wanted


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_the_copies_of_a_plan_are_made_and_the_engine_gets_it_back_at_the_end(
    make_scheduler: MakeScheduler, mode: str
) -> None:
    pair = make_pair()
    backend, wanted = EngineBackend(pair), expected_bytes(pair, OPS)

    ack = hand_out(make_scheduler, backend, mode).result(30)

    assert raw_bytes(pair.device) == wanted
    assert backend.names() == ["plan", "finish"]
    plan = backend.calls[0][1]
    assert backend.calls[1][1] is plan
    assert ack.num_bytes == plan.num_bytes > 0


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_burst_that_is_not_planned_is_moved_by_the_engine(make_scheduler: MakeScheduler, mode: str) -> None:
    pair = make_pair(num_layers=2)
    backend, wanted = EngineBackend(pair), expected_bytes(pair, OPS)
    backend.plans = False

    ack = hand_out(make_scheduler, backend, mode).result(30)

    assert raw_bytes(pair.device) == wanted
    assert backend.names() == ["plan", "prepare", "enqueue_layer", "enqueue_layer", "finish"]
    assert len({id(prepared) for _, prepared in backend.calls[1:]}) == 1
    assert ack.num_bytes > 0


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("plans", [True, False])
def test_a_burst_that_is_not_planned_is_submitted_in_one_call_where_that_is_how_the_engine_submits(
    make_scheduler: MakeScheduler, mode: str, plans: bool
) -> None:
    pair = make_pair()
    backend, wanted = WholeBurstBackend(pair), expected_bytes(pair, OPS)
    backend.plans = plans
    hand_out(make_scheduler, backend, mode).result(30)
    assert raw_bytes(pair.device) == wanted
    assert backend.names() == (["plan", "finish"] if plans else ["plan", "prepare", "submit_burst", "finish"])


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_plan_that_is_wrong_fails_the_burst_before_a_byte_is_copied(make_scheduler: MakeScheduler, mode: str) -> None:
    pair = make_pair()
    backend, before = EngineBackend(pair), raw_bytes(pair.device)
    backend.changes = {"dst_extent": np.array([10, 10])}

    with pytest.raises(LoadFailedError) as failed:
        hand_out(make_scheduler, backend, mode).result(30)

    assert isinstance(failed.value.cause, InvalidLoadError)
    assert "dst_offsets must stay within their planes" in str(failed.value.cause)
    assert raw_bytes(pair.device) == before


def test_how_copies_are_made_is_said_at_the_start(make_scheduler: MakeScheduler, logs: list[Any]) -> None:
    make_scheduler(EngineBackend(make_pair()))
    make_scheduler(PooledBackend([make_pair()]))

    said = [(entry["backend"], entry["copy_method"]) for entry in logs if entry["event"] == "scheduler_started"]
    how = "emulated"
    if native.module is None:
        how = f"emulated with numpy, because the native part is missing: {native.missing_because}"
    assert said == [("EngineBackend", how), ("PooledBackend", how)]


class OneByOneRuntime:
    """A device that makes no batches, and is not asked for anything else."""

    def current_device(self) -> int:
        return 0

    def Stream(self, device: object = None) -> object:  # noqa: N802 - torch's name
        return object()


def test_where_the_device_makes_no_batches_the_engine_moves_every_burst(point: Point) -> None:
    engine = EngineBackend(make_pair())
    backend = PlannedBackend(engine)
    engine.bind = lambda scheduler: engine._pooled.bind(point)  # type: ignore[method-assign]

    backend.bind(Point(DeviceBinding(OneByOneRuntime())))
    prepared = backend.prepare(OPS)
    backend.enqueue_layer(prepared, 0)

    assert engine.names() == ["prepare", "enqueue_layer"]
    assert backend.copy_method == "the backend's own, because OneByOneRuntime:0 is no CUDA device"


class RefusingCopy:
    """A device that refuses the batches it is told to, blaming a copy or none."""

    name = "refusing"
    keeps_arrays = False

    def __init__(self, index: int | None) -> None:
        self._index = index

    def enqueue(self, batch: Any) -> None:
        raise BatchError("no", self._index)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "layer 1: no"),
        (1, "pool 'kv', plane 0, layer 1, row 6 of the device pool from row 2 of the host pool: no"),
    ],
)
def test_a_batch_that_is_refused_is_an_error_with_what_is_known_of_where(
    point: Point, index: int | None, words: str
) -> None:
    pair = make_pair()
    plan = plan_of(pair, OPS, point.device)
    with pytest.raises(BatchError) as failed:
        BatchSubmitter(RefusingCopy(index), ["kv"], pair).begin(plan).submit_layer(1)
    assert str(failed.value) == words

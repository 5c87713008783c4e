"""Backends that submit all layers of a burst in one call of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hicache_sched import AckStatus, LoadFailedError, LoadOp
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.crowd import WAIT, eventually

each_mode = pytest.mark.parametrize("mode", ["async", "inline"])


class WholeBurstBackend(LaunchingBackend):
    """Submits its layers in a loop of its own.

    Attributes:
        order: the layers it says to have submitted.
    """

    order: list[int] | None = None

    def submit_burst(self, prepared: Any, on_layer_done: Callable[[int], None]) -> None:
        for layer in range(self.num_layers) if self.order is None else self.order:
            self.enqueue_layer(prepared, layer)
            on_layer_done(layer)


@pytest.fixture
def backend(device: EmulatedDevice) -> WholeBurstBackend:
    return WholeBurstBackend(device)


@each_mode
def test_the_device_calls_are_those_of_a_backend_that_submits_layer_by_layer(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    calls = device.record_calls()
    made = []
    for backend in (WholeBurstBackend(device), LaunchingBackend(device)):
        scheduler = make_scheduler(backend, mode=mode)
        calls.clear()
        hand_out(scheduler, 1).result(WAIT)
        scheduler.close(WAIT)
        made.append(
            [(call, thread) for call, _, _, thread in calls if thread in ("MainThread", "hicache-sched-worker")]
        )
    assert made[0] == made[1]


def test_each_layer_is_known_to_be_enqueued_before_the_next_is_submitted(
    backend: WholeBurstBackend, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(backend)
    entered = backend.hold_layer(2)
    handle = hand_out(scheduler, 1)
    assert entered.wait(WAIT)
    eventually(lambda: handle.layer_landed(1))
    assert [handle.layer_enqueued(layer) for layer in range(4)] == [True, True, False, False]
    backend.release()
    assert handle.result(WAIT).status is AckStatus.OK


@each_mode
def test_a_layer_that_fails_is_named_and_those_before_it_land(
    backend: WholeBurstBackend, make_scheduler: MakeScheduler, mode: str
) -> None:
    scheduler = make_scheduler(backend, mode=mode)
    backend.failures[2] = error = RuntimeError("no copy")
    handle = hand_out(scheduler, 1)
    with pytest.raises(LoadFailedError) as failure:
        handle.result(WAIT)
    assert (failure.value.layer, failure.value.cause) == (2, error)
    assert [handle.layer_landed(layer) for layer in range(4)] == [True, True, False, False]
    assert hand_out(scheduler, 2).result(WAIT).status is AckStatus.OK


@each_mode
@pytest.mark.parametrize(
    ("order", "layer", "why"),
    [
        ([0, 1], 2, r"submit_burst\(\) returned after 2 of 4 layers"),
        ([0, 2], 1, "layer 2 was submitted, and layer 1 is the next"),
        ([0, 1, 2, 3, 0], None, "layer 0 was submitted, and layer 4 is the next"),
    ],
)
def test_layers_that_are_left_out_or_out_of_order_fail_the_burst(
    backend: WholeBurstBackend,
    make_scheduler: MakeScheduler,
    mode: str,
    order: list[int],
    layer: int | None,
    why: str,
) -> None:
    scheduler = make_scheduler(backend, mode=mode)
    backend.order = order
    handle = hand_out(scheduler, 1)
    with pytest.raises(LoadFailedError, match=why) as failure:
        handle.result(WAIT)
    assert failure.value.layer == layer


def test_the_stream_is_kept_within_its_bound(
    device: EmulatedDevice, backend: WholeBurstBackend, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(backend, h2d_queue_ops=1)  # one layer in flight
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    for layer in range(3):
        eventually(partial(handle.layer_enqueued, layer))
        assert not handle.layer_enqueued(layer + 1)
        device.step("h2d", 1)
    device.resume("h2d")
    assert handle.result(WAIT).status is AckStatus.OK


def test_an_op_with_a_payload_may_move_nothing_that_can_be_seen(
    backend: WholeBurstBackend, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def prepare(ops: Sequence[LoadOp]) -> list[int]:
        seen.extend(op.payload for op in ops)
        return [1]

    monkeypatch.setattr(backend, "prepare", prepare)
    scheduler = make_scheduler(backend)
    nothing = torch.empty(0, dtype=torch.int64)
    scheduler.load(LoadOp(1, nothing, nothing, payload="an engine's op"))
    scheduler.load(load_op(2))
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    assert handle.result(WAIT).node_ids == (1, 2)
    assert seen == ["an engine's op", None]

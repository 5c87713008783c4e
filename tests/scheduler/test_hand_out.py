"""The hand-out is synchronous, and nothing else of a burst is."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from hicache_sched import AckStatus, HiCacheSchedError, SchedulerClosedError, TransferTimeoutError
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op


def run_without_suspending(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never gives up control."""
    with pytest.raises(StopIteration) as finished:
        coroutine.send(None)
    return finished.value.value


@pytest.fixture
def gated(device: EmulatedDevice) -> LaunchingBackend:
    """A backend that blocks in `prepare` until it is released."""
    backend = LaunchingBackend(device)
    backend.gate.clear()
    return backend


def test_it_records_the_start_event_on_the_callers_thread_while_nothing_is_enqueued(
    device: EmulatedDevice, make_scheduler: MakeScheduler, gated: LaunchingBackend
) -> None:
    scheduler = make_scheduler(gated)
    calls = device.record_calls()
    handle = hand_out(scheduler, 1)
    name, _, stream, thread = calls[0]
    assert (name, stream, thread) == ("record", device.current_stream(), threading.current_thread().name)
    assert (handle.slot, handle.generation, handle.burst_id) == (0, 1, 1)
    assert gated.preparing.wait(30)
    assert not any(handle.layer_enqueued(layer) for layer in range(handle.num_layers))
    assert not handle.done()
    assert scheduler.pop_acks() == []
    assert [call for call in calls if call[2] is scheduler.h2d_stream] == []


def test_with_a_free_slot_it_never_suspends(make_scheduler: MakeScheduler, gated: LaunchingBackend) -> None:
    scheduler = make_scheduler(gated)
    for slot in range(3):
        scheduler.load(load_op())
        assert run_without_suspending(scheduler.start_loading()).slot == slot


def test_a_slot_whose_burst_has_landed_is_free_before_the_observer_has_noticed(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    class SlowToFinish(LaunchingBackend):
        def finish(self, prepared: Any) -> None:
            self.layer_gates[-1].wait()

    backend = SlowToFinish(device)
    backend.layer_gates[-1] = threading.Event()
    scheduler = make_scheduler(backend, num_slots=1)
    first = hand_out(scheduler, 1)
    scheduler.h2d_stream.synchronize()
    first.wait_layer(3)
    device.synchronize()
    scheduler.load(load_op(2))
    second = scheduler.start_loading_sync(timeout=30)
    assert second is not None
    assert (second.slot, second.generation) == (0, 2)
    assert not first.done(), "its finish() still blocks the observer"


def test_an_empty_queue_gives_none(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    calls = device.record_calls()
    assert run_without_suspending(scheduler.start_loading()) is None
    assert scheduler.start_loading_sync() is None
    assert calls == []


def test_an_ack_appears_only_after_the_last_layer_has_landed(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    device.step("h2d", 3)
    with pytest.raises(TransferTimeoutError):
        handle.result(timeout=0.05)
    assert scheduler.pop_acks() == []
    device.step("h2d", 1)
    ack = handle.result(timeout=30)
    assert scheduler.pop_acks() == [ack]
    assert (ack.status, ack.node_ids, ack.num_tokens) == (AckStatus.OK, (1,), 4)


def test_the_worker_binds_the_device_exactly_once(make_scheduler: MakeScheduler) -> None:
    class CountingDevice(EmulatedDevice):
        def __init__(self) -> None:
            super().__init__()
            self.bound: list[tuple[str, Any]] = []

        def set_device(self, device: Any) -> None:
            self.bound.append((threading.current_thread().name, device))
            super().set_device(device)

    with CountingDevice() as device:
        scheduler = make_scheduler(LaunchingBackend(device), runtime=device)
        for node_id in range(5):
            hand_out(scheduler, node_id).result(timeout=30)
        scheduler.close(timeout=30)
        assert device.bound.count(("hicache-sched-worker", 0)) == 1
        assert device.bound.count(("hicache-sched-observer", 0)) == 1


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_data_plane_runs_under_the_modes_of_the_thread_that_handed_out(
    device: EmulatedDevice, make_scheduler: MakeScheduler, inference: bool, grad: bool
) -> None:
    class ModeRecordingBackend(LaunchingBackend):
        def _modes(self, where: str) -> None:
            self.events.append((where, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        def prepare(self, ops: Any) -> Any:
            self._modes("prepare")
            return "prepared"

        def enqueue_layer(self, prepared: Any, layer: int) -> None:
            self._modes("enqueue")

        def finish(self, prepared: Any) -> None:
            self._modes("finish")

    backend = ModeRecordingBackend(device, num_layers=1)
    scheduler = make_scheduler(backend)
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        handle = hand_out(scheduler, 1)
    handle.result(timeout=30)
    assert backend.events == [(where, inference, grad) for where in ("prepare", "enqueue", "finish")]


async def test_a_hand_out_during_another_raises(
    device: EmulatedDevice, make_scheduler: MakeScheduler, gated: LaunchingBackend
) -> None:
    scheduler = make_scheduler(gated, num_slots=1)
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = scheduler.start_loading()
    waiting.send(None)
    with pytest.raises(HiCacheSchedError, match="second hand-out"):
        await scheduler.start_loading()
    with pytest.raises(HiCacheSchedError, match="second hand-out"):
        scheduler.start_loading_sync()
    waiting.close()
    gated.release()
    assert hand_out(scheduler, 3).node_ids == (2, 3), "the first hand-out's op is still queued"


def test_before_start_it_raises(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(start=False)
    scheduler.load(load_op())
    with pytest.raises(SchedulerClosedError, match="start"):
        scheduler.start_loading_sync()


def test_on_a_capturing_thread_it_raises_and_loses_nothing(make_scheduler: MakeScheduler) -> None:
    class CapturingDevice(EmulatedDevice):
        capturing = True

        def is_current_stream_capturing(self) -> bool:
            return self.capturing

    with CapturingDevice() as device:
        scheduler = make_scheduler(LaunchingBackend(device), runtime=device)
        scheduler.load(load_op(1))
        with pytest.raises(HiCacheSchedError, match="captured"):
            scheduler.start_loading_sync()
        device.capturing = False
        device.hold("h2d")
        handle = hand_out(scheduler, 2)
        assert handle.node_ids == (1, 2)
        device.capturing = True
        with pytest.raises(HiCacheSchedError, match="captured"):
            handle.wait_layer(0)
        device.resume("h2d")
        scheduler.close(timeout=30)


def test_the_handle_of_a_slot_is_found_by_slot_and_generation(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_slots=1)
    assert scheduler.handle_for(0) is None
    first = hand_out(scheduler, 1)
    assert scheduler.handle_for(0) == first
    assert scheduler.handle_for(0, 1) == first
    first.result(timeout=30)
    second = hand_out(scheduler, 2)
    assert scheduler.handle_for(0, 1) is None
    assert scheduler.handle_for(0, 2) == second != first
    with pytest.raises(IndexError, match="slot 1 is out of range"):
        scheduler.handle_for(1)

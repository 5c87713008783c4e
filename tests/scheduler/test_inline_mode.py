"""Off means off: inline mode makes an engine's own device calls, on its own thread, and nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import MutableSequence
from typing import Any

import pytest

from hicache_sched import AckStatus, HiCacheSchedError, LoadFailedError, TransferTimeoutError
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.interrupt import InterruptOnLine


class CallRecordingBackend(LaunchingBackend):
    """Notes its own calls among the recorded device calls."""

    def __init__(self, device: EmulatedDevice, calls: MutableSequence[Any], num_layers: int = 2) -> None:
        super().__init__(device, num_layers, ("kv", "indexer"))
        self._calls = calls

    def prepare(self, ops: Any) -> Any:
        self._calls.append("move indices")
        return super().prepare(ops)

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        self._calls.extend(f"copy {name} layer {layer}" for name in self.pool_names)
        super().enqueue_layer(prepared, layer)


def calls_on(stream: Any, calls: MutableSequence[Any]) -> list[str]:
    """The recorded calls as words; calls that concern `stream` are the h2d stream's."""
    words = []
    for call in calls:
        if isinstance(call, str):
            words.append(call)
            continue
        name, _, on_stream, thread_name = call
        assert thread_name == threading.current_thread().name
        words.append(f"{name} on {'h2d' if on_stream is stream else 'caller'}")
    return words


@pytest.mark.parametrize("with_fence", [False, True])
def test_device_calls_are_those_of_an_engine_that_submits_inline(
    device: EmulatedDevice, make_scheduler: MakeScheduler, with_fence: bool
) -> None:
    calls = device.record_calls()
    fence = device.Stream() if with_fence else None
    scheduler = make_scheduler(CallRecordingBackend(device, calls), mode="inline", fence_stream=fence)
    hand_out(scheduler, 7)
    assert calls_on(scheduler.h2d_stream, calls) == [
        "move indices",
        "record on caller",
        *(["wait_stream on h2d"] if with_fence else []),
        "enter on h2d",
        "wait on h2d",
        "record on h2d",
        "copy kv layer 0",
        "copy indexer layer 0",
        "record on h2d",
        "copy kv layer 1",
        "copy indexer layer 1",
        "record on h2d",
        "record on h2d",
        "leave on h2d",
    ]
    start_record = next(call for call in calls if call[0] == "record")
    start_wait = next(call for call in calls if call[0] == "wait")
    assert start_wait[1] is start_record[1], "the h2d stream waits for the start event"
    if with_fence:
        assert next(call for call in calls if call[0] == "wait_stream")[1] is fence
    recorded = [call[1] for call in calls if call[0] == "record"]
    assert len(set(recorded)) == len(recorded), "start, ack start, each layer and ack finish are different events"


def test_no_thread_of_ours_exists(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    before = set(threading.enumerate())
    scheduler = make_scheduler(mode="inline")
    hand_out(scheduler, 1).result(timeout=30)
    assert set(threading.enumerate()) == before


async def test_an_empty_queue_gives_none_and_makes_no_device_call(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(mode="inline")
    calls = device.record_calls()
    assert await scheduler.start_loading() is None
    assert scheduler.start_loading_sync() is None
    assert calls == []


def test_there_are_no_stall_timers(device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any]) -> None:
    scheduler = make_scheduler(mode="inline", stall_log_interval=0.001)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    with pytest.raises(TransferTimeoutError):
        handle.result(timeout=0.05)
    assert {entry["event"] for entry in logs} <= {"scheduler_started"}


def test_it_is_submitted_when_start_loading_returns_and_acknowledged_when_it_landed(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, mode="inline")
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    assert [kind for kind, *_ in backend.events] == ["prepare", *["enqueue"] * 4]
    assert handle.layer_enqueued(3)
    device.step("h2d", 3)
    assert [handle.layer_landed(layer) for layer in range(4)] == [True, True, True, False]
    assert scheduler.pop_acks() == []
    device.step("h2d", 1)
    (ack,) = scheduler.pop_acks()
    assert ack.status is AckStatus.OK
    assert handle.result(timeout=0) is ack
    assert backend.events[-1] == ("finish", 1)


async def test_awaiting_polls_the_events(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    acks: list[Any] = []
    scheduler = make_scheduler(mode="inline", on_ack=acks.append)
    scheduler.load(load_op(1))
    handle = await scheduler.start_loading()
    assert handle is not None
    assert [layer async for layer in handle.layers()] == [0, 1, 2, 3]
    ack = await handle
    assert acks == [ack]
    assert scheduler.pop_acks() == [ack]


@pytest.mark.parametrize("stage", ["prepare", 0, 2, "finish"])
def test_a_failure_gives_a_failed_handle_and_the_next_burst_is_served(
    device: EmulatedDevice, make_scheduler: MakeScheduler, stage: str | int, logs: list[Any]
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, mode="inline")
    backend.failures[stage] = RuntimeError("no such page")
    handle = hand_out(scheduler, 5, 6)
    handle.wait_layer(3)
    with pytest.raises(LoadFailedError, match="no such page") as failure:
        handle.result(timeout=30)
    assert failure.value.node_ids == (5, 6)
    assert failure.value.layer == (stage if isinstance(stage, int) else None)
    assert handle.stale
    (ack,) = scheduler.pop_acks()
    assert (ack.status, ack.num_tokens, ack.num_bytes, ack.duration_ms) == (AckStatus.FAILED, 0, 0, None)
    assert hand_out(scheduler, 8).result(timeout=30).status is AckStatus.OK
    assert [entry["event"] for entry in logs].count("burst_failed") == 1


def test_a_full_ring_blocks_until_the_oldest_burst_has_landed(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(mode="inline")
    device.hold("h2d")
    first, *_ = [hand_out(scheduler, node) for node in (1, 2, 3)]
    scheduler.load(load_op(4))
    with pytest.raises(TransferTimeoutError):
        scheduler.start_loading_sync(timeout=0.01)
    assert scheduler.stats().queued_ops == 1
    device.step("h2d", 4)
    handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None
    assert (handle.slot, handle.generation) == (0, 2)
    assert first.done()


def test_a_reset_drains_and_restarts_the_rotation(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(mode="inline")
    handle = hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    scheduler.reset(timeout=30)
    assert handle.done()
    assert scheduler.pop_acks() == []
    assert scheduler.start_loading_sync() is None
    again = hand_out(scheduler, 3)
    assert (again.slot, again.generation) == (0, 2)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_an_on_ack_that_raises_changes_nothing(
    device: EmulatedDevice, make_scheduler: MakeScheduler, error: BaseException, logs: list[Any]
) -> None:
    def on_ack(ack: Any) -> None:
        raise error

    scheduler = make_scheduler(mode="inline", on_ack=on_ack)
    assert hand_out(scheduler, 1).result(timeout=30).status is AckStatus.OK
    assert hand_out(scheduler, 2).result(timeout=30).status is AckStatus.OK
    assert [entry["event"] for entry in logs].count("on_ack_failed") == 2


def test_waiting_for_a_later_burst_inside_a_callback_raises_instead_of_waiting_for_itself(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    errors: list[BaseException] = []
    later: list[Any] = []

    def on_ack(ack: Any) -> None:
        try:
            later[0].result(timeout=30)
        except HiCacheSchedError as exc:
            errors.append(exc)

    scheduler = make_scheduler(mode="inline", on_ack=on_ack)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    later.append(hand_out(scheduler, 2))
    device.step("h2d", 4)
    first.result(timeout=30)
    assert ["inside a callback" in str(error) for error in errors] == [True]


def test_ctrl_c_at_the_edge_of_an_observation_keeps_nobody_from_observing(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(mode="inline", num_slots=1)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    for line in range(6):  # all before the `finally`, in which CPython makes no call and takes no signal
        before, interrupt = sys.gettrace(), InterruptOnLine("observe", line)
        sys.settrace(interrupt)
        try:
            with pytest.raises((KeyboardInterrupt, TransferTimeoutError)):
                handle.result(timeout=0.01)
        finally:
            sys.settrace(before)
        assert interrupt.done
    device.resume("h2d")
    assert handle.result(timeout=30).status is AckStatus.OK


def test_a_keyboard_interrupt_during_submission_is_the_callers_and_the_burst_has_failed(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, mode="inline")
    backend.failures[1] = KeyboardInterrupt()
    scheduler.load(load_op(1))
    with pytest.raises(KeyboardInterrupt):
        scheduler.start_loading_sync()
    handle = scheduler.handle_for(0)
    assert handle is not None
    with pytest.raises(LoadFailedError):
        handle.result(timeout=30)
    assert hand_out(scheduler, 2).result(timeout=30).status is AckStatus.OK

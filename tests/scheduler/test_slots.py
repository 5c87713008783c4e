"""Slots: handed out in rotation, each only when its previous burst is done with it."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from hicache_sched import AckStatus, HiCacheSchedError, LoadHandle, TransferScheduler, TransferTimeoutError
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.crowd import WAIT, eventually
from tests.scheduler.interrupt import InterruptAfterCall
from tests.scheduler.looking import looks_again

StartLoading = Callable[..., Awaitable[LoadHandle | None]]


@pytest.fixture(params=["async", "sync"])
def start_loading(request: pytest.FixtureRequest) -> Callable[[TransferScheduler], StartLoading]:
    """The hand-out as a coroutine, whichever twin makes it."""

    def of(scheduler: TransferScheduler) -> StartLoading:
        if request.param == "async":
            return scheduler.start_loading
        return lambda **kwargs: asyncio.to_thread(scheduler.start_loading_sync, **kwargs)

    return of


@pytest.mark.parametrize("stuck", ["queued", "enqueuing", "on the device"])
async def test_the_fourth_hand_out_waits_for_slot_0_and_gets_its_next_generation(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    start_loading: Callable[[TransferScheduler], StartLoading],
    stuck: str,
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    if stuck == "queued":
        backend.gate.clear()
    elif stuck == "enqueuing":
        backend.hold_layer(2)
    else:
        device.hold("h2d")
    first, *_ = [hand_out(scheduler, node_id) for node_id in (1, 2, 3)]
    if stuck == "on the device":
        await first.enqueued(3)
    scheduler.load(load_op(4))
    fourth = asyncio.ensure_future(start_loading(scheduler)())
    await looks_again(scheduler)
    assert not fourth.done()
    scheduler.load(load_op(5))
    backend.release()
    device.resume("h2d")
    handle = await asyncio.wait_for(fourth, 30)
    assert handle is not None
    assert (handle.slot, handle.generation) == (0, 2)
    assert handle.node_ids == (4, 5), "an op that was loaded during the wait joins"
    assert first.layer_landed(3)
    assert (await handle).status is AckStatus.OK


async def test_a_finish_event_of_the_previous_rotation_does_not_free_a_queued_burst(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, num_slots=2)
    for node_id in (1, 2):
        hand_out(scheduler, node_id).result(timeout=30)
    backend.gate.clear()
    hand_out(scheduler, 3)
    hand_out(scheduler, 4)
    scheduler.load(load_op(5))
    with pytest.raises(TransferTimeoutError):
        scheduler.start_loading_sync(timeout=0.02)


async def test_a_timeout_raises_and_loses_nothing(
    device: EmulatedDevice, make_scheduler: MakeScheduler, start_loading: Callable[[TransferScheduler], StartLoading]
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handles = [hand_out(scheduler, node_id) for node_id in (1, 2, 3)]
    scheduler.load(load_op(4))
    for timeout in (0, 0.01):
        with pytest.raises(TransferTimeoutError):
            await start_loading(scheduler)(timeout=timeout)
    assert scheduler.stats().queued_ops == 1
    device.resume("h2d")
    handle = await start_loading(scheduler)(timeout=30)
    assert handle is not None
    assert handle.node_ids == (4,)
    for node_id, each in enumerate([*handles, handle], start=1):
        assert (await each).node_ids == (node_id,)


async def test_a_second_hand_out_during_the_wait_raises_and_the_first_goes_on(
    device: EmulatedDevice, make_scheduler: MakeScheduler, start_loading: Callable[[TransferScheduler], StartLoading]
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = asyncio.ensure_future(start_loading(scheduler)())
    await looks_again(scheduler)
    with pytest.raises(HiCacheSchedError, match="second hand-out"):
        scheduler.start_loading_sync()
    device.resume("h2d")
    handle = await asyncio.wait_for(waiting, 30)
    assert handle is not None
    assert handle.node_ids == (2,)


async def test_a_cancelled_bursts_slot_is_handed_out_again(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    backend.gate.clear()
    scheduler = make_scheduler(backend, num_slots=2)
    hand_out(scheduler, 1)
    assert backend.preparing.wait(30)
    assert hand_out(scheduler, 2).cancel()
    backend.release()
    again = [hand_out(scheduler, node_id) for node_id in (3, 4)]
    assert [(handle.slot, handle.generation) for handle in again] == [(0, 2), (1, 2)]
    assert [(await handle).status for handle in again] == [AckStatus.OK] * 2


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_slots_rotate_however_many_there_are(make_scheduler: MakeScheduler, num_slots: int) -> None:
    scheduler = make_scheduler(num_slots=num_slots)
    handed_out = [hand_out(scheduler, node_id) for node_id in range(2 * num_slots + 1)]
    assert [(h.slot, h.generation) for h in handed_out] == [
        (i % num_slots, i // num_slots + 1) for i in range(2 * num_slots + 1)
    ]


# -- waits through an old handle --------------------------------------------------------------------------------


def test_a_wait_through_an_old_handle_returns_at_once_while_its_slots_next_burst_is_stuck(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=1)
    old = hand_out(scheduler, 1)
    old.result(timeout=30)
    device.hold("h2d")
    new = hand_out(scheduler, 2)
    compute = device.Stream()
    with device.stream(compute):
        for layer in range(4):
            old.wait_layer(layer, timeout=30)
    assert compute.query(), "the caller's stream waits for nothing"
    assert not new.layer_landed(0)


def test_a_wait_is_its_own_bursts_though_the_slot_is_handed_out_again_in_the_middle_of_it(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LaunchingBackend(device, num_layers=1)
    scheduler = make_scheduler(backend, num_slots=1)
    device.hold("h2d")
    old = hand_out(scheduler, 1)
    attention = device.Stream()

    def current_stream_after_a_while() -> Any:
        """Between the steps of the wait its burst lands, and the slot's next burst is enqueued and stuck."""
        monkeypatch.undo()
        device.step("h2d")
        entered = backend.hold_layer(0)
        hand_out(scheduler, 2)
        assert entered.wait(30)
        backend.release()
        second = scheduler.handle_for(0, 2)
        assert second is not None
        with device.stream(device.Stream()):
            second.wait_layer(0, timeout=30)
        return attention

    monkeypatch.setattr(scheduler.device, "current_stream", current_stream_after_a_while)
    old.wait_layer(0, timeout=30)
    assert attention.query(), "the wait was ordered behind its own burst, not behind the slot's next"
    assert not scheduler.h2d_stream.query(), "which is still stuck"


def test_events_of_a_burst_are_not_used_again_while_a_wait_holds_them(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    burst = first._burst
    assert burst.hold_events()
    device.resume("h2d")
    first.result(timeout=30)
    held = burst.events
    second = hand_out(scheduler, 2)
    second.result(timeout=30)
    assert held is not None
    assert burst.events is held
    third = hand_out(scheduler, 3)
    third.wait_layer(0, timeout=30)
    assert third._burst.events is not held
    assert burst.drop_events() is held


@pytest.mark.parametrize("function", ["slot_wait", "_reported_slot_wait", "finish", "start_loading_sync"])
def test_ctrl_c_in_a_hand_out_that_waits_leaves_nobody_who_says_that_it_waits(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any], function: str
) -> None:
    interrupted = 0
    for call in itertools.count():
        scheduler = make_scheduler(num_slots=1, stall_log_interval=0.01)
        device.hold("h2d")
        hand_out(scheduler, 1)
        scheduler.load(load_op(2))
        interrupt = InterruptAfterCall(function, call)
        sys.setprofile(interrupt)
        try:
            with suppress(TransferTimeoutError, KeyboardInterrupt):
                scheduler.start_loading_sync(timeout=0.001)
        finally:
            sys.setprofile(None)
        assert scheduler._threads is not None
        jobs, told = scheduler._threads.jobs, threading.Event()
        scheduler._threads.loop.call(told.set)  # behind what the hand-out told it
        assert told.wait(WAIT)
        eventually(lambda jobs=jobs: jobs._of_slot is None or jobs._of_slot.done())  # type: ignore[misc]
        device.resume("h2d")
        scheduler.close(WAIT)
        if not interrupt.done:
            break
        interrupted += 1
    assert interrupted > 0
    assert [entry for entry in logs if entry["event"] == "thread_failed"] == []


def test_a_loop_that_is_told_to_stop_again_and_again_ends_its_tasks(
    make_scheduler: MakeScheduler, logs: list[Any]
) -> None:
    scheduler = make_scheduler()
    threads = scheduler._threads
    assert threads is not None
    ended = threading.Event()

    async def last_step_takes_some() -> None:
        try:
            await asyncio.sleep(WAIT)
        finally:
            for _ in range(50):
                threads.stop()
                await asyncio.sleep(0)
            ended.set()

    tasks: list[asyncio.Task[None]] = []
    threads.loop.call(lambda: tasks.append(asyncio.get_running_loop().create_task(last_step_takes_some())))
    eventually(lambda: bool(tasks))
    scheduler.close(WAIT)
    assert ended.is_set()
    assert [entry for entry in logs if entry["event"] == "thread_failed"] == []

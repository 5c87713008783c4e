"""Shutdown is safe: a close drains, joins and leaves a scheduler that works inline; a start can be repeated."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hicache_sched import (
    AckStatus,
    HiCacheSchedError,
    LoadFailedError,
    LoadHandle,
    SchedulerClosedError,
    TransferScheduler,
    TransferTimeoutError,
)
from hicache_sched.device import EmulatedDevice
from hicache_sched.protocol import Lifecycle
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.looking import StartLoading, looks_again, until

Close = Callable[..., Awaitable[None]]


@pytest.fixture(params=["async", "sync"])
def close(request: pytest.FixtureRequest) -> Close:
    """A close as a coroutine, whichever twin makes it."""
    if request.param == "async":
        return TransferScheduler.aclose
    return lambda scheduler, timeout=30: asyncio.to_thread(scheduler.close, timeout)


async def begun(scheduler: TransferScheduler, closing: Awaitable[None]) -> asyncio.Future[None]:
    """A close that has entered its wait, or wrongly returned."""
    future = asyncio.ensure_future(closing)
    await until(lambda: scheduler._protocol.lifecycle is Lifecycle.CLOSING or future.done())
    return future


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-sched")]


def named(logs: list[Any], event: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event]


# -- draining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("stage", ["queued", "enqueuing", "on the device"])
async def test_it_drains_what_was_handed_out_runs_its_callbacks_and_ends_the_threads(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close, stage: str, event_loop: str
) -> None:
    acked: list[int] = []
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, on_ack=lambda ack: acked.append(ack.burst_id), event_loop=event_loop)
    if stage == "queued":
        backend.gate.clear()
    elif stage == "enqueuing":
        backend.hold_layer(2)
    device.hold("h2d")
    handles = [hand_out(scheduler, node_id) for node_id in (1, 2)]
    called: list[LoadHandle] = []
    for handle in handles:
        handle.add_done_callback(called.append)
    closing = await begun(scheduler, close(scheduler))
    await looks_again(scheduler)
    assert not closing.done()
    backend.release()
    device.resume("h2d")
    await asyncio.wait_for(closing, 30)
    assert acked == [1, 2]
    assert called == handles
    assert backend.copied() == [(node_id, layer) for node_id in (1, 2) for layer in range(4)]
    assert our_threads() == []
    assert scheduler.pop_acks() == [handle.result(timeout=0) for handle in handles]


async def test_ops_that_no_hand_out_took_stay_queued_and_can_be_loaded_afterwards(
    make_scheduler: MakeScheduler, close: Close
) -> None:
    scheduler = make_scheduler()
    scheduler.load(load_op(1))
    await close(scheduler)
    assert scheduler.stats().queued_ops == 1
    handle = await scheduler.start_loading()
    assert handle is not None
    assert (await handle).node_ids == (1,)


async def test_aclose_leaves_no_thread_behind_at_all(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    make_scheduler(mode="inline").load(load_op())
    before = set(threading.enumerate())
    scheduler = make_scheduler()
    await scheduler.aclose(timeout=30)
    assert set(threading.enumerate()) == before


async def test_it_waits_for_an_on_ack_that_is_running(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close
) -> None:
    entered, leave = threading.Event(), threading.Event()
    finished: list[int] = []

    def on_ack(ack: Any) -> None:
        entered.set()
        leave.wait(30)
        finished.append(ack.burst_id)

    scheduler = make_scheduler(on_ack=on_ack)
    handle = hand_out(scheduler, 1)
    await asyncio.to_thread(entered.wait, 30)
    assert handle.done()
    closing = await begun(scheduler, close(scheduler))
    await looks_again(scheduler)
    assert not closing.done()
    leave.set()
    await asyncio.wait_for(closing, 30)
    assert finished == [1]


async def test_it_is_idempotent(make_scheduler: MakeScheduler, close: Close, logs: list[Any]) -> None:
    scheduler = make_scheduler()
    for _ in range(3):
        await close(scheduler)
    assert len(named(logs, "scheduler_stopped")) == 1


async def test_several_closes_at_once_all_return_when_everything_is_drained(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any]
) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)

    async def close_and_see(closing: Awaitable[None]) -> tuple[bool, list[str]]:
        await closing
        return handle.done(), our_threads()

    closes = [scheduler.aclose(), scheduler.aclose(), *(asyncio.to_thread(scheduler.close, 30) for _ in range(2))]
    closing = asyncio.gather(*map(close_and_see, closes))
    await looks_again(scheduler)
    assert not closing.done()
    device.resume("h2d")
    assert await asyncio.wait_for(closing, 30) == [(True, [])] * 4
    assert len(named(logs, "scheduler_stopped")) == 1


def test_a_close_that_comes_after_another_has_ended_closes_nothing_again(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.close(timeout=30)
    assert not scheduler._protocol.begin_close()
    scheduler.load(load_op())


async def test_waiters_parked_on_layers_are_released_as_the_layers_land(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close
) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    waits = [
        asyncio.ensure_future(asyncio.to_thread(handle.wait_layer, 3, 30)),
        asyncio.ensure_future(handle.layer(3)),
        asyncio.ensure_future(asyncio.to_thread(handle.result, 30)),
    ]
    await until(lambda: len(handle._burst.waiter_names()) == len(waits))
    closing = await begun(scheduler, close(scheduler))
    device.resume("h2d")
    await asyncio.wait_for(asyncio.gather(closing, *waits), 30)
    assert handle.layer_landed(3)


@pytest.mark.parametrize("mode", ["async", "inline"])
async def test_a_hand_out_that_waits_raises_at_once_and_its_ops_stay(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close, start_loading: StartLoading, mode: str
) -> None:
    scheduler = make_scheduler(num_slots=1, mode=mode)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = asyncio.ensure_future(start_loading(scheduler))
    await until(lambda: scheduler._protocol._current_turn is not None)
    await looks_again(scheduler)
    closing = await begun(scheduler, close(scheduler))
    with pytest.raises(SchedulerClosedError):
        await asyncio.wait_for(waiting, 30)
    assert not closing.done()
    device.resume("h2d")
    await asyncio.wait_for(closing, 30)
    assert scheduler.stats().queued_ops == 1
    handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None
    assert handle.result(timeout=30).node_ids == (2,)


async def test_a_hand_out_that_notices_a_close_only_when_that_has_ended_raises_too(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = asyncio.ensure_future(scheduler.start_loading())
    await looks_again(scheduler)
    assert not waiting.done()
    device.resume("h2d")
    scheduler.close(timeout=30)  # blocks this loop, so the waiting task has seen nothing yet
    assert not waiting.done()
    inline = hand_out(scheduler, 3)
    with pytest.raises(SchedulerClosedError):
        await asyncio.wait_for(waiting, 30)
    assert inline.node_ids == (2, 3)
    assert (await inline).status is AckStatus.OK


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("inside", ["on_ack", "done callback", "prepare", "enqueue_layer", "finish"])
def test_from_inside_the_scheduler_it_raises(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str, inside: str
) -> None:
    raised: list[str] = []

    def close_from(where: str) -> None:
        if where == inside and not raised:
            with pytest.raises(HiCacheSchedError, match=r"close\(\) from inside") as error:
                scheduler.close(timeout=30)
            raised.append(str(error.value))

    class Closing(LaunchingBackend):
        def prepare(self, ops: Any) -> Any:
            close_from("prepare")
            return super().prepare(ops)

        def enqueue_layer(self, prepared: Any, layer: int) -> None:
            close_from("enqueue_layer")
            super().enqueue_layer(prepared, layer)

        def finish(self, prepared: Any) -> None:
            close_from("finish")

    scheduler = make_scheduler(Closing(device), mode=mode, on_ack=lambda ack: close_from("on_ack"))
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    handle.add_done_callback(lambda handle: close_from("done callback"))
    device.resume("h2d")
    assert handle.result(timeout=30).status is AckStatus.OK
    scheduler.close(timeout=30)
    assert len(raised) == 1


# -- where something is stuck -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck", ["copy", "prepare", "on_ack"])
async def test_a_close_that_times_out_refuses_to_load_until_a_later_one_succeeds(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close, stuck: str
) -> None:
    let_on_ack_return = threading.Event()
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, on_ack=lambda ack: ack.burst_id == 2 and let_on_ack_return.wait(30))
    landed = hand_out(scheduler, 1)
    landed.result(timeout=30)
    if stuck == "copy":
        device.hold("h2d")
    elif stuck == "prepare":
        backend.gate.clear()
    stuck_one = hand_out(scheduler, 2)
    scheduler.load(load_op(3))
    for timeout in (0, 0.01):
        with pytest.raises(TransferTimeoutError):
            await close(scheduler, timeout=timeout)
    with pytest.raises(SchedulerClosedError):
        scheduler.load(load_op(4))
    with pytest.raises(SchedulerClosedError):
        scheduler.start_loading_sync()
    with pytest.raises(SchedulerClosedError):
        await scheduler.start_loading()
    assert (await landed).node_ids == (1,)
    assert landed.result(timeout=0).node_ids == (1,)
    if stuck != "on_ack":
        with pytest.raises(TransferTimeoutError):
            stuck_one.wait_layer(0, timeout=0.01)
    backend.release()
    device.resume("h2d")
    let_on_ack_return.set()
    await close(scheduler, timeout=30)
    assert our_threads() == []
    assert [ack.node_ids for ack in scheduler.pop_acks()] == [(1,), (2,)]
    assert hand_out(scheduler, 4).result(timeout=30).node_ids == (3, 4)


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_burst_whose_events_cannot_be_made_fails_and_does_not_hold_it_up(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)

    def out_of_events(**kwargs: Any) -> Any:
        raise RuntimeError("out of events")

    monkeypatch.setattr(device, "Event", out_of_events)
    scheduler._event_sets._free.clear()
    handle = hand_out(scheduler, 1)
    with pytest.raises(LoadFailedError, match="out of events"):
        handle.result(timeout=30)
    scheduler.close(timeout=30)
    assert [ack.status for ack in scheduler.pop_acks()] == [AckStatus.FAILED]


async def test_a_close_that_is_cancelled_while_it_drains_can_be_repeated(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close
) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    closing = await begun(scheduler, scheduler.aclose())
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(SchedulerClosedError):
        scheduler.load(load_op(2))
    assert not handle.done()
    device.resume("h2d")
    await close(scheduler, timeout=30)
    assert handle.done()
    assert our_threads() == []


async def test_a_close_waits_for_its_threads_to_end_and_can_give_up_on_that(
    make_scheduler: MakeScheduler, close: Close, logs: list[Any]
) -> None:
    scheduler = make_scheduler()
    assert scheduler._threads is not None
    let_loop_end = threading.Event()
    scheduler._threads.loop.call(let_loop_end.wait, 30)
    with pytest.raises(TransferTimeoutError):
        await close(scheduler, timeout=0.01)
    closing = asyncio.ensure_future(scheduler.aclose())
    await looks_again(scheduler)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert named(logs, "scheduler_stopped") == []
    let_loop_end.set()
    await close(scheduler, timeout=30)
    assert our_threads() == []
    assert len(named(logs, "scheduler_stopped")) == 1


# -- afterwards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_fence", [False, True])
def test_afterwards_it_makes_the_device_calls_of_inline_mode_on_the_same_h2d_stream(
    device: EmulatedDevice, make_scheduler: MakeScheduler, with_fence: bool
) -> None:
    fence = device.Stream() if with_fence else None
    closed = make_scheduler(fence_stream=fence)
    h2d_stream = closed.h2d_stream
    hand_out(closed, 1)
    closed.close(timeout=30)
    inline = make_scheduler(mode="inline", fence_stream=fence)
    recorded = {}
    for scheduler in (closed, inline):
        calls = device.record_calls()
        hand_out(scheduler, 2).result(timeout=30)
        recorded[scheduler] = [
            (name, "h2d" if stream is scheduler.h2d_stream else "caller", thread) for name, _, stream, thread in calls
        ]
    assert closed.h2d_stream is h2d_stream
    assert recorded[closed] == recorded[inline]
    assert ("enter", "h2d", threading.current_thread().name) in recorded[closed]


def test_afterwards_acks_and_callbacks_come_on_the_callers_thread_and_it_says_once_that_it_is_inline(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any]
) -> None:
    observed: list[tuple[int, str]] = []
    scheduler = make_scheduler(on_ack=lambda ack: observed.append((ack.burst_id, threading.current_thread().name)))
    scheduler.close(timeout=30)
    assert named(logs, "scheduler_downgraded") == []
    handles = [hand_out(scheduler, node_id) for node_id in (1, 2)]
    acks = [handle.result(timeout=30) for handle in handles]
    assert scheduler.pop_acks() == acks
    assert observed == [(burst_id, threading.current_thread().name) for burst_id in (1, 2)]
    assert [handle.slot for handle in handles] == [0, 1]
    stats = scheduler.stats()
    assert (stats.mode, stats.plane, stats.landed_bursts) == ("inline", "inline", 2)
    (entry,) = named(logs, "scheduler_downgraded")
    assert (entry["mode"], entry["log_level"]) == ("inline", "warning")


def test_an_inline_scheduler_is_not_downgraded_by_a_close(make_scheduler: MakeScheduler, logs: list[Any]) -> None:
    scheduler = make_scheduler(mode="inline")
    scheduler.close(timeout=30)
    hand_out(scheduler, 1).result(timeout=30)
    assert named(logs, "scheduler_downgraded") == []


def test_an_interrupt_while_an_inline_burst_is_finished_is_the_callers(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    scheduler.close(timeout=30)
    backend.failures["finish"] = KeyboardInterrupt()
    handle = hand_out(scheduler, 1)
    with pytest.raises(KeyboardInterrupt):
        handle.result(timeout=30)
    with pytest.raises(LoadFailedError):
        handle.result(timeout=30)
    assert [ack.status for ack in scheduler.pop_acks()] == [AckStatus.FAILED]


# -- starting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_closed_scheduler_is_not_started_again(make_scheduler: MakeScheduler, mode: str) -> None:
    scheduler = make_scheduler(mode=mode)
    scheduler.close(timeout=30)
    with pytest.raises(HiCacheSchedError, match="not started again"):
        scheduler.start()
    assert our_threads() == []


async def test_a_close_before_the_start_does_nothing(make_scheduler: MakeScheduler, close: Close) -> None:
    scheduler = make_scheduler(start=False)
    scheduler.load(load_op(1))
    await close(scheduler)
    scheduler.start()
    handle = await scheduler.start_loading()
    assert handle is not None
    assert (await handle).node_ids == (1,)


def test_a_second_start_changes_nothing(device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any]) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    threads = our_threads()
    assert len(threads) == (4 if scheduler.stats().plane == "native" else 3)
    scheduler.start()
    assert our_threads() == threads
    assert backend.bound == [scheduler]
    assert len(named(logs, "scheduler_started")) == 1


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_backend_that_does_not_bind_leaves_a_scheduler_that_can_be_started_again(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    backend = LaunchingBackend(device)
    backend.failures["bind"] = ValueError("pools of another device")
    scheduler = make_scheduler(backend, start=False, mode=mode)
    with pytest.raises(ValueError, match="pools of another device"):
        scheduler.start()
    assert our_threads() == []
    with pytest.raises(SchedulerClosedError, match="before start"):
        scheduler.start_loading_sync()
    scheduler.start()
    assert hand_out(scheduler, 1).result(timeout=30).status is AckStatus.OK


def test_with_starts_and_closes(make_scheduler: MakeScheduler) -> None:
    with make_scheduler(start=False) as scheduler:
        handle = hand_out(scheduler, 1)
    assert handle.done()
    assert our_threads() == []


async def test_async_with_starts_and_closes_without_blocking_the_loop(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    device.hold("h2d")
    async with make_scheduler(start=False) as scheduler:
        handle = hand_out(scheduler, 1)
        asyncio.get_running_loop().call_soon(device.resume, "h2d")
    assert handle.done()
    assert our_threads() == []


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_start_and_stop_are_said_with_what_it_runs_on(
    device: EmulatedDevice, make_scheduler: MakeScheduler, plane: str, mode: str, logs: list[Any]
) -> None:
    make_scheduler(mode=mode, num_slots=5, event_loop="asyncio").close(timeout=30)
    assert logs == [
        {
            "event": "scheduler_started",
            "log_level": "info",
            "mode": mode,
            "plane": plane if mode == "async" else "inline",
            "plane_reason": 'plane="python"' if (mode, plane) == ("async", "python") else None,
            "event_loop": "asyncio" if mode == "async" else None,
            "num_slots": 5,
            "device": "emulated",
            "backend": "LaunchingBackend",
            "copy_method": "the backend's own",
        },
        {"event": "scheduler_stopped", "log_level": "info", "device": "emulated"},
    ]


@pytest.mark.parametrize(
    ("asked_for", "is_installed", "runs"),
    [("uvloop", True, "uvloop"), ("uvloop", False, "asyncio"), ("asyncio", True, "asyncio")],
)
def test_the_loop_is_the_one_asked_for_or_asyncios_where_uvloop_is_missing(
    make_scheduler: MakeScheduler,
    logs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    asked_for: str,
    is_installed: bool,
    runs: str,
) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loops: list[str] = []
    scheduler = make_scheduler(
        event_loop=asked_for, on_ack=lambda ack: loops.append(type(asyncio.get_running_loop()).__module__)
    )
    hand_out(scheduler, 1)
    scheduler.close(timeout=30)
    (started,) = named(logs, "scheduler_started")
    assert started["event_loop"] == runs
    assert [module.split(".")[0] for module in loops] == [runs]


# -- several ------------------------------------------------------------------------------------------------------


async def test_schedulers_of_one_process_are_independent(
    device: EmulatedDevice, make_scheduler: MakeScheduler, close: Close
) -> None:
    stuck_backend = LaunchingBackend(device)
    stuck_backend.gate.clear()
    stuck, other = make_scheduler(stuck_backend), make_scheduler(thread_name="other")
    assert stuck.h2d_stream is not other.h2d_stream
    stuck_one = hand_out(stuck, 1)
    assert stuck_backend.preparing.wait(30)
    with pytest.raises(TransferTimeoutError):
        await close(stuck, timeout=0)
    ack = hand_out(other, 2).result(timeout=30)
    assert (ack.burst_id, ack.slot, ack.generation, ack.node_ids) == (1, 0, 1, (2,))
    assert other.pop_acks() == [ack]
    other.reset(timeout=30)
    await close(other, timeout=30)
    assert not stuck_one.done()
    stuck_backend.release()
    await close(stuck, timeout=30)
    assert stuck.pop_acks() == [stuck_one.result(timeout=0)]

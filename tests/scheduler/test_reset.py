"""Reset is final: queued ops are dropped, what was handed out is drained, the rotation starts again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hicache_sched import (
    AckStatus,
    HiCacheSchedError,
    LoadCancelledError,
    LoadFailedError,
    LoadHandle,
    SchedulerClosedError,
    TransferScheduler,
    TransferTimeoutError,
)
from hicache_sched.device import EmulatedDevice
from hicache_sched.waiting import Pending, Waiter
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.looking import StartLoading, looks_again, until

Reset = Callable[..., Awaitable[None]]


@pytest.fixture(params=["async", "sync"])
def reset(request: pytest.FixtureRequest) -> Reset:
    """A reset as a coroutine, whichever twin makes it."""
    if request.param == "async":
        return TransferScheduler.areset
    return lambda scheduler, timeout=30: asyncio.to_thread(scheduler.reset, timeout)


async def begun(scheduler: TransferScheduler, resetting: Awaitable[None]) -> asyncio.Future[None]:
    """A reset that has entered its wait, or wrongly returned."""
    future = asyncio.ensure_future(resetting)
    await until(lambda: scheduler._protocol._resetting or future.done())
    return future


async def waiting_hand_out(
    device: EmulatedDevice, scheduler: TransferScheduler, start_loading: StartLoading
) -> tuple[LoadHandle, asyncio.Future[LoadHandle | None]]:
    """A burst that is held on the device in the only slot, and a hand-out of node 2 that waits for it."""
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = asyncio.ensure_future(start_loading(scheduler))
    await until(lambda: scheduler._protocol._current_turn is not None)
    await looks_again(scheduler)
    assert not waiting.done()
    return first, waiting


async def stuck_bursts(
    device: EmulatedDevice, backend: LaunchingBackend, scheduler: TransferScheduler, stage: str
) -> list[LoadHandle]:
    """Bursts of which the last is stuck at `stage`."""
    if stage in ("queued", "preparing", "cancelled"):
        backend.gate.clear()
    elif stage == "enqueuing":
        entered = backend.hold_layer(2)
    elif stage == "failed":
        backend.failures[2] = ValueError("no such page")
    device.hold("h2d")
    handles = [hand_out(scheduler, 1)]
    if stage in ("queued", "cancelled"):
        handles.append(hand_out(scheduler, 2))
    if stage in ("queued", "preparing", "cancelled"):
        assert backend.preparing.wait(30)
    elif stage == "enqueuing":
        assert entered.wait(30)
    elif stage == "failed":
        with pytest.raises(LoadFailedError):
            await handles[0].enqueued(2)
    if stage == "cancelled":
        assert handles[1].cancel()
    return handles


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("stage", ["queued", "preparing", "enqueuing", "on the device", "failed", "cancelled"])
async def test_it_returns_when_what_was_handed_out_has_ended_and_its_callbacks_have_run(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset, stage: str, event_loop: str
) -> None:
    acked: list[int] = []
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, on_ack=lambda ack: acked.append(ack.burst_id), event_loop=event_loop)
    handles = await stuck_bursts(device, backend, scheduler, stage)
    called: list[LoadHandle] = []
    for handle in handles:
        handle.add_done_callback(called.append)
    resetting = await begun(scheduler, reset(scheduler))
    await looks_again(scheduler)
    assert not resetting.done()
    backend.release()
    device.resume("h2d")
    await asyncio.wait_for(resetting, 30)
    assert acked == [handle.burst_id for handle in handles]
    assert called == handles
    assert all(handle._burst.ended for handle in handles)
    assert scheduler.pop_acks() == []


async def test_it_waits_for_an_on_ack_that_is_running(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset
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
    resetting = await begun(scheduler, reset(scheduler))
    await looks_again(scheduler)
    assert not resetting.done()
    leave.set()
    await asyncio.wait_for(resetting, 30)
    assert finished == [1]


async def test_acks_that_were_not_popped_are_dropped(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset
) -> None:
    scheduler = make_scheduler()
    hand_out(scheduler, 1).result(timeout=30)
    assert scheduler.stats().acks_unpopped == 1
    await reset(scheduler)
    assert scheduler.pop_acks() == []
    ack = hand_out(scheduler, 2).result(timeout=30)
    assert scheduler.pop_acks() == [ack]


@pytest.mark.parametrize("started", [True, False])
async def test_queued_ops_are_dropped(make_scheduler: MakeScheduler, reset: Reset, started: bool) -> None:
    scheduler = make_scheduler(start=started)
    scheduler.load(load_op(1))
    await reset(scheduler)
    scheduler.start()
    assert scheduler.stats().queued_ops == 0
    assert await scheduler.start_loading() is None
    assert hand_out(scheduler, 2).result(timeout=30).node_ids == (2,)


@pytest.mark.parametrize("mode", ["async", "inline"])
async def test_the_rotation_restarts_at_slot_0_and_generations_go_on(
    make_scheduler: MakeScheduler, reset: Reset, mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)
    for node_id in (1, 2):
        hand_out(scheduler, node_id)
    await reset(scheduler)
    after = [hand_out(scheduler, node_id) for node_id in (3, 4, 5)]
    assert [(handle.slot, handle.generation) for handle in after] == [(0, 2), (1, 2), (2, 1)]
    assert [handle.burst_id for handle in after] == [3, 4, 5]


async def test_handles_of_earlier_bursts_still_resolve_while_the_slot_is_stuck_with_a_later_one(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    landed = hand_out(scheduler, 1)
    landed.result(timeout=30)
    backend.failures["prepare"] = ValueError("no such page")
    failed = hand_out(scheduler, 2)
    await reset(scheduler)
    backend.gate.clear()
    later = hand_out(scheduler, 3)
    assert later.slot == landed.slot
    assert (await landed).status is AckStatus.OK
    landed.wait_layer(3, timeout=0)
    await landed.layer(3)
    assert not landed.stale
    with pytest.raises(LoadFailedError, match="no such page"):
        failed.result(timeout=0)
    assert failed.stale
    assert not later.done()


async def test_slots_name_no_burst_until_they_are_handed_out_again(make_scheduler: MakeScheduler, reset: Reset) -> None:
    scheduler = make_scheduler()
    before = hand_out(scheduler, 1)
    assert scheduler.handle_for(0) == before
    await reset(scheduler)
    assert scheduler.handle_for(0) is None
    assert scheduler.handle_for(0, before.generation) is None
    after = hand_out(scheduler, 2)
    assert scheduler.handle_for(0, after.generation) == after
    assert scheduler.handle_for(0, before.generation) is None


@pytest.mark.parametrize("mode", ["async", "inline"])
async def test_a_hand_out_that_waits_returns_none_and_its_ops_are_dropped(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset, start_loading: StartLoading, mode: str
) -> None:
    scheduler = make_scheduler(num_slots=1, mode=mode)
    first, waiting = await waiting_hand_out(device, scheduler, start_loading)
    resetting = await begun(scheduler, reset(scheduler))
    device.resume("h2d")
    await asyncio.wait_for(resetting, 30)
    assert await asyncio.wait_for(waiting, 30) is None
    assert first.done()
    assert scheduler.stats().queued_ops == 0
    assert hand_out(scheduler, 3).result(timeout=30).node_ids == (3,)


async def test_the_next_hand_out_need_not_wait_until_the_one_that_was_reset_has_noticed(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=1)
    first, waiting = await waiting_hand_out(device, scheduler, TransferScheduler.start_loading)
    device.resume("h2d")
    scheduler.reset(timeout=30)  # blocks this loop, so the waiting task has seen nothing yet
    assert not waiting.done()
    device.hold("h2d")
    next_one = hand_out(scheduler, 3)
    scheduler.load(load_op(4))
    assert await asyncio.wait_for(waiting, 30) is None
    assert (next_one.node_ids, next_one.slot, next_one.generation) == ((3,), 0, 2)
    assert scheduler.stats().queued_ops == 1
    assert first.done()


@pytest.mark.parametrize("gives_up", ["times out", "is cancelled"])
async def test_a_reset_that_gives_up_loses_nothing_and_can_be_repeated(
    device: EmulatedDevice, make_scheduler: MakeScheduler, start_loading: StartLoading, reset: Reset, gives_up: str
) -> None:
    scheduler = make_scheduler(num_slots=1)
    first, waiting = await waiting_hand_out(device, scheduler, start_loading)
    if gives_up == "times out":
        for timeout in (0, 0.01):
            with pytest.raises(TransferTimeoutError):
                await reset(scheduler, timeout=timeout)
    else:
        resetting = await begun(scheduler, scheduler.areset())
        resetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resetting
    assert scheduler.stats().queued_ops == 1
    assert scheduler.handle_for(0) == first
    scheduler.load(load_op(3))
    await looks_again(scheduler)
    assert not waiting.done()
    device.step("h2d", 4)
    second = await asyncio.wait_for(waiting, 30)
    assert second is not None
    assert (second.node_ids, second.generation) == ((2, 3), 2)
    device.step("h2d", 4)
    acks = [await first, await second]
    assert scheduler.pop_acks() == acks
    device.resume("h2d")
    await reset(scheduler, timeout=30)
    assert scheduler.pop_acks() == []


@pytest.mark.parametrize("mode", ["async", "inline"])
async def test_loading_and_resetting_during_a_reset_raise_and_change_nothing(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset, mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)
    device.hold("h2d")
    hand_out(scheduler, 1)
    resetting = await begun(scheduler, reset(scheduler))
    with pytest.raises(HiCacheSchedError, match=r"load\(\) during reset"):
        scheduler.load(load_op(2))
    with pytest.raises(HiCacheSchedError, match="hand-out during reset"):
        scheduler.start_loading_sync()
    with pytest.raises(HiCacheSchedError, match="hand-out during reset"):
        await scheduler.start_loading()
    with pytest.raises(HiCacheSchedError, match="second reset"):
        scheduler.reset()
    with pytest.raises(HiCacheSchedError, match="second reset"):
        await scheduler.areset()
    assert not resetting.done()
    assert scheduler.stats().queued_ops == 0
    device.resume("h2d")
    await asyncio.wait_for(resetting, 30)
    assert hand_out(scheduler, 3).result(timeout=30).node_ids == (3,)


async def test_a_reset_that_has_ended_leaves_the_next_one_alone(
    make_scheduler: MakeScheduler, reset: Reset, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler()
    look = scheduler._protocol.look_reset

    def look_and_let_another_thread_reset(waiter: Waiter | None) -> bool | Pending:
        found = look(waiter)
        scheduler._protocol.begin_reset()
        return found

    monkeypatch.setattr(scheduler._protocol, "look_reset", look_and_let_another_thread_reset)
    await reset(scheduler)
    with pytest.raises(HiCacheSchedError, match="during reset"):
        scheduler.load(load_op(1))
    scheduler._protocol.abandon_reset()


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("inside", ["on_ack", "done callback", "prepare", "enqueue_layer", "finish"])
def test_from_inside_the_scheduler_it_raises(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str, inside: str
) -> None:
    raised: list[str] = []

    def reset_from(where: str) -> None:
        if where == inside and not raised:
            with pytest.raises(HiCacheSchedError, match=r"reset\(\) from inside") as error:
                scheduler.reset(timeout=30)
            raised.append(str(error.value))

    class Resetting(LaunchingBackend):
        def prepare(self, ops: Any) -> Any:
            reset_from("prepare")
            return super().prepare(ops)

        def enqueue_layer(self, prepared: Any, layer: int) -> None:
            reset_from("enqueue_layer")
            super().enqueue_layer(prepared, layer)

        def finish(self, prepared: Any) -> None:
            reset_from("finish")

    scheduler = make_scheduler(Resetting(device), mode=mode, on_ack=lambda ack: reset_from("on_ack"))
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    handle.add_done_callback(lambda handle: reset_from("done callback"))
    device.resume("h2d")
    assert handle.result(timeout=30).status is AckStatus.OK
    scheduler.reset(timeout=30)
    assert len(raised) == 1


async def test_while_closing_it_raises(device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    hand_out(scheduler, 1)
    with pytest.raises(TransferTimeoutError):
        scheduler.close(timeout=0)
    with pytest.raises(SchedulerClosedError):
        await reset(scheduler)


async def test_after_a_close_it_resets_what_was_loaded_inline(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset
) -> None:
    scheduler = make_scheduler()
    hand_out(scheduler, 1)
    scheduler.close(timeout=30)
    inline = hand_out(scheduler, 2)
    await reset(scheduler)
    assert inline.done()
    assert scheduler.pop_acks() == []
    assert hand_out(scheduler, 3).slot == 0


async def test_a_cancelled_burst_stays_cancelled(
    device: EmulatedDevice, make_scheduler: MakeScheduler, reset: Reset
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    _, cancelled = await stuck_bursts(device, backend, scheduler, "cancelled")
    resetting = await begun(scheduler, reset(scheduler))
    backend.release()
    device.resume("h2d")
    await asyncio.wait_for(resetting, 30)
    with pytest.raises(LoadCancelledError):
        cancelled.result(timeout=0)
    assert ("prepare", [2]) not in backend.events

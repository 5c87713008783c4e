"""Awaiting is not owning: a cancelled waiter takes no transfer, slot, op or ack with it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from hicache_sched import AckStatus, LoadCancelledError, LoadHandle
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op


async def started(coroutine: Any, steps: int = 3) -> asyncio.Task[Any]:
    """A task that has reached its await."""
    task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
    for _ in range(steps):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def collect_layers(handle: LoadHandle) -> list[int]:
    return [layer async for layer in handle.layers()]


async def await_handle(handle: LoadHandle) -> Any:
    return await handle


@pytest.mark.parametrize(
    "wait",
    [await_handle, collect_layers, lambda handle: handle.layer(2), lambda handle: handle.enqueued(2)],
    ids=["handle", "layers", "layer", "enqueued"],
)
async def test_cancelling_a_wait_leaves_the_transfer_and_other_waiters_alone(
    device: EmulatedDevice, make_scheduler: MakeScheduler, wait: Callable[[LoadHandle], Any]
) -> None:
    backend = LaunchingBackend(device)
    backend.gate.clear()
    scheduler = make_scheduler(backend)
    handle = hand_out(scheduler, 1)
    cancelled, other = await started(wait(handle)), await started(wait(handle))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    backend.release()
    await asyncio.wait_for(other, 30)
    ack = await handle
    assert ack.status is AckStatus.OK
    assert scheduler.pop_acks() == [ack]
    assert handle._burst.waiter_names() == [], "nobody is left registered"


async def test_cancelling_a_hand_out_that_waits_leaves_its_ops_and_the_slot(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = await started(scheduler.start_loading())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert scheduler.stats().queued_ops == 1
    device.resume("h2d")
    handle = await scheduler.start_loading(timeout=30)
    assert handle is not None
    assert (handle.slot, handle.generation, handle.node_ids) == (0, 2, (2,))
    await handle
    assert [ack.burst_id for ack in scheduler.pop_acks()] == [1, 2]


@pytest.mark.parametrize("steps_after_wake", range(6))
async def test_cancelling_a_hand_out_at_any_step_after_its_slot_came_free_loses_nothing(
    device: EmulatedDevice, make_scheduler: MakeScheduler, steps_after_wake: int
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = await started(scheduler.start_loading())
    device.resume("h2d")
    first.result(timeout=30)  # the slot is free, and this loop has not run since
    for _ in range(steps_after_wake):
        await asyncio.sleep(0)
    waiting.cancel()
    try:
        handle = await waiting
    except asyncio.CancelledError:
        assert scheduler.stats().queued_ops == 1
        assert scheduler.stats().free_slots == 1
        handle = await scheduler.start_loading(timeout=30)
    assert handle is not None
    assert (handle.generation, handle.node_ids) == (2, (2,))
    await handle
    assert [ack.burst_id for ack in scheduler.pop_acks()] == [1, 2]


async def test_a_hand_out_whose_timeout_meets_the_free_slot_loses_nothing(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=1)
    for round_number in range(30):
        device.hold("h2d")
        hand_out(scheduler, 2 * round_number)
        scheduler.load(load_op(2 * round_number + 1))
        waiting = await started(scheduler.start_loading(timeout=0.0005))
        device.resume("h2d")
        try:
            handle = await waiting
        except TimeoutError:
            assert scheduler.stats().queued_ops == 1
            handle = await scheduler.start_loading(timeout=30)
        assert handle is not None
        assert handle.node_ids == (2 * round_number + 1,)
        await handle
    assert [ack.burst_id for ack in scheduler.pop_acks()] == list(range(1, 61))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_hand_out_whose_loop_was_closed_under_it_leaves_its_ops_to_the_next(
    device: EmulatedDevice, make_scheduler: MakeScheduler, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    loop = new_loop()
    loop.call_soon(loop.create_task, scheduler.start_loading())
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
        loop.set_exception_handler(lambda loop, context: None)  # asyncio reports the task that is lost with it
        loop.close()
        device.resume("h2d")
        first.result(timeout=30)
        gc.collect()
        assert hand_out(scheduler, 3).node_ids == (2, 3)


def interrupt_in(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """Raise Ctrl-C once, when a method has done its work but not returned: there CPython looks for signals."""
    method = getattr(where, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        method(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupted)


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("step", ["begin_hand_out", "look_for_slot", "launched"])
def test_ctrl_c_between_two_steps_of_a_hand_out_keeps_no_other_from_its_turn(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, mode: str, step: str
) -> None:
    scheduler = make_scheduler(mode=mode)
    scheduler.load(load_op(1))
    interrupt_in(monkeypatch, scheduler._protocol, step)
    with pytest.raises(KeyboardInterrupt):
        scheduler.start_loading_sync(timeout=30)
    hand_out(scheduler, 2).result(timeout=30)
    assert sorted(node_id for ack in scheduler.pop_acks() for node_id in ack.node_ids) == [1, 2]
    scheduler.reset(timeout=30)


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_ctrl_c_before_a_hand_out_could_end_keeps_no_other_from_its_turn(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)

    scheduler.load(load_op(1))
    calls = iter(range(2))

    def interrupted() -> None:
        if next(calls, 1):  # the second, which ends the hand-out
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "_fail_unlaunched", interrupted)
    with pytest.raises(KeyboardInterrupt) as held:  # and with it the frames of the hand-out
        scheduler.start_loading_sync(timeout=30)
    hand_out(scheduler, 2).result(timeout=30)
    del held


# -- handle.cancel() -----------------------------------------------------------------------------------------------


async def test_a_burst_that_was_not_begun_is_cancelled_and_acknowledged_in_its_turn(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any]
) -> None:
    backend = LaunchingBackend(device)
    backend.gate.clear()
    acks: list[Any] = []
    scheduler = make_scheduler(backend, on_ack=acks.append)
    before, cancelled, after = [hand_out(scheduler, node_id) for node_id in (1, 2, 3)]
    assert backend.preparing.wait(30)
    waiters = [await started(wait) for wait in (cancelled.layer(0), cancelled.enqueued(3), await_handle(cancelled))]
    assert cancelled.cancel()
    assert cancelled.cancel(), "it still is"
    for waiter in waiters:
        with pytest.raises(LoadCancelledError):
            await asyncio.wait_for(waiter, 30)
    cancelled.wait_layer(3, timeout=0)
    assert cancelled.done()
    assert cancelled.stale
    assert cancelled.exception() is None
    assert scheduler.pop_acks() == [], "the ack comes in its turn"
    backend.release()
    await after
    await before
    statuses = [(ack.node_ids, ack.status, ack.num_tokens) for ack in scheduler.pop_acks()]
    assert statuses == [((1,), AckStatus.OK, 4), ((2,), AckStatus.CANCELLED, 0), ((3,), AckStatus.OK, 4)]
    assert [kind for kind, *rest in backend.events if rest[0] in (2, [2])] == [], "nothing of it was touched"
    await scheduler.aclose(timeout=30)
    assert [ack.burst_id for ack in acks] == [1, 2, 3]
    assert [entry["node_ids"] for entry in logs if entry["event"] == "burst_cancelled"] == [[2]]


@pytest.mark.parametrize("stage", ["preparing", "enqueuing", "on the device", "landed"])
async def test_a_burst_that_was_begun_is_not_cancelled(
    device: EmulatedDevice, make_scheduler: MakeScheduler, stage: str
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    if stage == "preparing":
        backend.gate.clear()
    entered = backend.hold_layer(1) if stage == "enqueuing" else backend.preparing
    handle = hand_out(scheduler, 1)
    assert entered.wait(30)
    if stage == "on the device":
        await handle.enqueued(3)
    if stage == "landed":
        device.resume("h2d")
        await handle
    assert not handle.cancel()
    backend.release()
    device.resume("h2d")
    assert (await handle).status is AckStatus.OK
    assert not handle.stale

"""Listeners: told once of each burst and of when it got where; without one nothing is timed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_sched import AckStatus, HiCacheSchedError, LoadFailedError, LoadOp, TransferScheduler
from hicache_sched.burst_times import BurstTimes
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.progress import Progress
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.copy.builders import make_pair
from tests.scheduler.crowd import WAIT, eventually, in_thread
from tests.scheduler.hearing import Hearing
from tests.scheduler.interrupt import InterruptAfterCall

MODES = pytest.mark.parametrize("mode", ["async", "inline"])
NUM_LAYERS = 4
LOOP = "hicache-sched"


def layered_pools(device: EmulatedDevice) -> PooledBackend:
    """Pools whose bursts a native data plane plans and submits itself."""
    return PooledBackend([make_pair(num_layers=NUM_LAYERS)])


BACKENDS = pytest.mark.parametrize("make_backend", [LaunchingBackend, layered_pools])
"""One whose layers Python submits, whatever observes their landing, and one whose layers it need not."""


@pytest.fixture
def hearing() -> Hearing:
    return Hearing()


def assert_in_order(*times: float | None) -> None:
    assert None not in times
    assert list(times) == sorted(times)  # type: ignore[type-var]


# -- times of bursts --------------------------------------------------------------------------------------------------


@MODES
@BACKENDS
def test_a_burst_that_landed_got_everywhere_in_order(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    hearing: Hearing,
    mode: str,
    make_backend: Callable[[EmulatedDevice], Any],
) -> None:
    scheduler = make_scheduler(make_backend(device), mode=mode)
    scheduler.listen(hearing)
    before = time.monotonic()
    ack = hand_out(scheduler, 1).result(WAIT)
    (times,) = hearing.wait_bursts(1)

    assert hearing.acks == [ack]
    assert len(times.enqueued) == len(times.landed) == NUM_LAYERS
    assert_in_order(before, times.asked, times.handed_out, times.begun, times.planned, *times.enqueued, times.submitted)
    assert_in_order(*times.landed, times.ended, time.monotonic())
    assert_in_order(times.submitted, times.ended)
    for enqueued, landed in zip(times.enqueued, times.landed, strict=True):
        assert_in_order(enqueued, landed)
    if mode == "inline":
        assert times.job_began is None, "there is no loop"
    else:
        assert_in_order(times.handed_out, times.job_began, time.monotonic())


@MODES
@BACKENDS
def test_the_time_of_a_layer_is_when_it_landed(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    hearing: Hearing,
    mode: str,
    make_backend: Callable[[EmulatedDevice], Any],
) -> None:
    scheduler = make_scheduler(make_backend(device), mode=mode)
    scheduler.listen(hearing)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    eventually(lambda: handle._burst.progress.submitted)
    between = [time.monotonic()]
    for layer in range(NUM_LAYERS):
        device.step("h2d")
        handle.wait_layer(layer, WAIT)
        between.append(time.monotonic())
    handle.result(WAIT)
    (times,) = hearing.wait_bursts(1)

    assert_in_order(*times.enqueued, times.submitted, between[0])
    for layer, landed in enumerate(times.landed):
        assert_in_order(between[layer], landed, between[layer + 1])


async def test_a_hand_out_that_waits_was_asked_for_before_it_was_handed_out(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.listen(hearing)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = asyncio.create_task(scheduler.start_loading())
    await asyncio.sleep(0)  # it looks, and waits
    between = time.monotonic()
    device.resume("h2d")
    handle = await waiting
    assert handle is not None
    await handle
    _, second = hearing.wait_bursts(2)
    assert_in_order(second.asked, between, second.handed_out, second.begun)


def with_one_in_prepare(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> tuple[TransferScheduler, LaunchingBackend]:
    """A scheduler with a listener, whose first burst is kept in `prepare` until the backend's gate is set."""
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    scheduler.listen(hearing)
    backend.gate.clear()
    hand_out(scheduler, 1)
    assert backend.preparing.wait(WAIT)
    return scheduler, backend


def test_a_burst_that_waits_for_its_turn_is_begun_after_the_one_before(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler, backend = with_one_in_prepare(device, make_scheduler, hearing)
    hand_out(scheduler, 2)
    between = time.monotonic()
    backend.gate.set()
    first, second = hearing.wait_bursts(2)

    assert_in_order(first.begun, between, first.planned)
    assert_in_order(second.handed_out, between, first.submitted, second.begun)


@MODES
@pytest.mark.parametrize("layer", [0, 2])
def test_a_burst_that_failed_at_a_layer_has_times_up_to_there(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing, mode: str, layer: int
) -> None:
    backend = LaunchingBackend(device)
    backend.failures[layer] = RuntimeError("no such page")
    scheduler = make_scheduler(backend, mode=mode)
    scheduler.listen(hearing)
    with pytest.raises(LoadFailedError):
        hand_out(scheduler, 1).result(WAIT)
    (times,) = hearing.wait_bursts(1)

    assert hearing.acks[0].status is AckStatus.FAILED
    assert_in_order(times.begun, times.planned, *times.enqueued[:layer], times.submitted, times.ended)
    assert_in_order(*times.landed[:layer], times.ended)
    assert times.enqueued[layer:] == times.landed[layer:] == (None,) * (NUM_LAYERS - layer)


@MODES
def test_a_burst_whose_indices_are_refused_was_begun_and_not_planned(
    make_scheduler: MakeScheduler, hearing: Hearing, mode: str, device: EmulatedDevice
) -> None:
    scheduler = make_scheduler(layered_pools(device), mode=mode)
    scheduler.listen(hearing)
    scheduler.load(LoadOp(1, torch.tensor([0]), torch.tensor([10_000])))
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    (times,) = hearing.wait_bursts(1)

    assert_in_order(times.handed_out, times.begun, times.submitted, times.ended)
    assert times.planned is None
    assert times.enqueued == times.landed == (None,) * NUM_LAYERS


def assert_never_begun(times: BurstTimes) -> None:
    assert (times.begun, times.planned, times.submitted) == (None, None, None)
    assert times.enqueued == times.landed == (None,) * NUM_LAYERS
    assert_in_order(times.asked, times.handed_out, times.ended)


def test_a_cancelled_burst_was_handed_out_and_ended_and_nothing_between(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler, backend = with_one_in_prepare(device, make_scheduler, hearing)
    assert hand_out(scheduler, 2).cancel()
    backend.gate.set()
    _, times = hearing.wait_bursts(2)

    assert hearing.acks[1].status is AckStatus.CANCELLED
    assert_never_begun(times)


def test_a_hand_out_that_failed_was_handed_out_and_ended_and_nothing_between(
    make_scheduler: MakeScheduler, hearing: Hearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler()
    scheduler.listen(hearing)

    def fail(*args: Any) -> None:
        raise RuntimeError("no event today")

    monkeypatch.setattr(scheduler._submission, "record_hand_out", fail)
    with pytest.raises(LoadFailedError):
        hand_out(scheduler, 1).result(WAIT)
    (times,) = hearing.wait_bursts(1)
    assert_never_begun(times)


def test_a_job_begins_when_the_loop_comes_to_it_and_not_when_the_burst_has_ended(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler, has_come = make_scheduler(), threading.Event()
    scheduler.listen(hearing)
    device.hold("h2d")
    hand_out(scheduler, 1)
    assert scheduler._threads is not None
    scheduler._threads.loop.call(has_come.set)
    assert has_come.wait(WAIT)
    between = time.monotonic()
    device.resume("h2d")
    (times,) = hearing.wait_bursts(1)
    assert_in_order(times.handed_out, times.job_began, between, times.ended)


def test_a_job_that_the_loop_came_to_late_began_late(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def on_ack(ack: Any) -> None:
        stuck.set()
        go_on.wait(WAIT)

    scheduler = make_scheduler(on_ack=on_ack)
    scheduler.listen(hearing)
    hand_out(scheduler, 1)
    assert stuck.wait(WAIT)
    for node in (2, 3):
        hand_out(scheduler, node).result(WAIT)  # ended before the loop knows of them
    between = time.monotonic()
    go_on.set()
    first, *others = hearing.wait_bursts(3)

    assert_in_order(first.handed_out, first.job_began, between)
    for late in others:
        assert_in_order(late.handed_out, between, late.job_began)


def test_layers_that_are_seen_to_have_got_there_at_once_have_one_time() -> None:
    progress = Progress(True)
    progress.advance_enqueued(3)
    progress.advance_landed(2)
    times = progress.times()
    assert times is not None
    assert (len(times.enqueued), len(set(times.enqueued))) == (3, 1)
    assert (len(times.landed), len(set(times.landed))) == (2, 1)


def test_times_are_frozen(make_scheduler: MakeScheduler, hearing: Hearing) -> None:
    scheduler = make_scheduler()
    scheduler.listen(hearing)
    hand_out(scheduler, 1)
    (times,) = hearing.wait_bursts(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        times.asked = 0.0  # type: ignore[misc]


# -- off --------------------------------------------------------------------------------------------------------------


@MODES
@BACKENDS
def test_without_a_listener_nothing_is_timed(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    hearing: Hearing,
    mode: str,
    make_backend: Callable[[EmulatedDevice], Any],
) -> None:
    scheduler = make_scheduler(make_backend(device), mode=mode)
    scheduler.listen(hearing)
    heard = hand_out(scheduler, 1)
    heard.result(WAIT)
    scheduler.unlisten(hearing)
    unheard = hand_out(scheduler, 2)
    unheard.result(WAIT)

    assert heard._burst.progress.times() is not None
    assert (unheard._burst.clock, unheard._burst.progress.times()) == (None, None)


# -- who is told of what, and where -----------------------------------------------------------------------------------


@pytest.mark.parametrize("listener", [None, print, SimpleNamespace(burst_ended=print)])
def test_what_is_no_listener_is_refused(make_scheduler: MakeScheduler, listener: Any) -> None:
    with pytest.raises(TypeError, match=r"lacks (burst_ended|stalled)\(\)"):
        make_scheduler().listen(listener)


def test_a_listener_is_told_on_the_loop_thread_after_on_ack(make_scheduler: MakeScheduler, hearing: Hearing) -> None:
    order: list[str] = []
    scheduler = make_scheduler(on_ack=lambda ack: order.append("on_ack"))
    scheduler.listen(hearing)
    hearing.then = lambda ack: order.append("listener")
    hand_out(scheduler, 1).add_done_callback(lambda handle: order.append("done callback"))
    hand_out(scheduler, 2)
    hearing.wait_bursts(2)
    scheduler.close(WAIT)

    assert order == ["done callback", "on_ack", "listener", "on_ack", "listener"]
    assert hearing.threads == [LOOP, LOOP]


def test_a_listener_is_told_where_the_landing_is_observed_in_inline_mode(
    make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler = make_scheduler(mode="inline")
    scheduler.listen(hearing)
    handle = hand_out(scheduler, 1)
    in_thread(partial(handle.result, WAIT)).result(WAIT)
    assert hearing.burst_ids == [1]
    assert hearing.threads != [threading.current_thread().name]


def test_a_closed_scheduler_tells_its_listeners_of_what_it_loads_inline(
    make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler = make_scheduler()
    scheduler.listen(hearing)
    hand_out(scheduler, 1)
    scheduler.close(WAIT)
    assert hearing.burst_ids == [1], "a close returns once they have been told"
    hand_out(scheduler, 2).result(WAIT)
    assert hearing.burst_ids == [1, 2]
    assert hearing.times[1].job_began is None


def test_a_reset_returns_once_listeners_have_been_told(make_scheduler: MakeScheduler, hearing: Hearing) -> None:
    scheduler = make_scheduler()
    scheduler.listen(hearing)
    hand_out(scheduler, 1)
    scheduler.reset(WAIT)
    assert hearing.burst_ids == [1]


@MODES
def test_a_burst_from_before_is_not_told_of(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing, mode: str
) -> None:
    scheduler, second = make_scheduler(mode=mode), Hearing()
    device.hold("h2d")
    handles = [hand_out(scheduler, 1)]
    scheduler.listen(hearing)
    handles.append(hand_out(scheduler, 2))
    scheduler.listen(second)
    handles.append(hand_out(scheduler, 3))
    device.resume("h2d")
    for handle in handles:
        handle.result(WAIT)
    scheduler.close(WAIT)

    assert hearing.burst_ids == [2, 3]
    assert second.burst_ids == [3]


async def test_a_hand_out_that_is_under_way_is_not_told_of(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler = make_scheduler(num_slots=1)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = asyncio.create_task(scheduler.start_loading())
    await asyncio.sleep(0)  # it looks, and waits
    scheduler.listen(hearing)
    device.resume("h2d")
    handle = await waiting
    assert handle is not None
    await handle
    await scheduler.aclose(WAIT)
    assert hearing.burst_ids == []


@MODES
def test_one_who_does_not_listen_any_more_is_told_nothing_and_others_are(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing, mode: str
) -> None:
    scheduler, other = make_scheduler(mode=mode), Hearing()
    scheduler.listen(hearing)
    scheduler.listen(other)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    scheduler.unlisten(hearing)
    scheduler.listen(hearing)  # from the next hand-out on
    device.resume("h2d")
    handle.result(WAIT)
    hand_out(scheduler, 2).result(WAIT)
    hearing.wait_bursts(1)
    scheduler.unlisten(hearing)
    hand_out(scheduler, 3).result(WAIT)
    scheduler.close(WAIT)

    assert hearing.burst_ids == [2]
    assert other.burst_ids == [1, 2, 3]


def test_who_listens_twice_is_told_so_and_who_does_not_listen_may_stop(
    make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    scheduler = make_scheduler()
    scheduler.unlisten(hearing)
    scheduler.listen(hearing)
    with pytest.raises(HiCacheSchedError, match="already"):
        scheduler.listen(hearing)
    hand_out(scheduler, 1)
    scheduler.close(WAIT)
    assert hearing.burst_ids == [1]


def test_a_listener_may_stop_to_listen_where_it_is_told(make_scheduler: MakeScheduler, hearing: Hearing) -> None:
    scheduler = make_scheduler()
    scheduler.listen(hearing)
    hearing.then = lambda ack: scheduler.unlisten(hearing)
    hand_out(scheduler, 1)
    hand_out(scheduler, 2)
    scheduler.close(WAIT)
    assert hearing.burst_ids == [1]


@MODES
def test_one_may_listen_to_two_schedulers(make_scheduler: MakeScheduler, hearing: Hearing, mode: str) -> None:
    one, other = make_scheduler(mode=mode), make_scheduler(mode=mode)
    for scheduler in (one, other):
        scheduler.listen(hearing)
        hand_out(scheduler, 1).result(WAIT)
        hand_out(scheduler, 2).result(WAIT)
        scheduler.close(WAIT)
    assert hearing.burst_ids == [1, 2, 1, 2]


# -- listeners that raise, loops that die, Ctrl-C ---------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_a_listener_that_raises_is_logged_and_changes_nothing(
    make_scheduler: MakeScheduler, hearing: Hearing, logs: list[Any], mode: str, error: BaseException
) -> None:
    def fail(ack: Any) -> None:
        raise error

    acks: list[int] = []
    scheduler, other = make_scheduler(mode=mode, on_ack=lambda ack: acks.append(ack.burst_id)), Hearing()
    hearing.then = fail
    scheduler.listen(hearing)
    scheduler.listen(other)
    for node in (1, 2):
        assert hand_out(scheduler, node).result(WAIT).status is AckStatus.OK
    scheduler.close(WAIT)

    assert hearing.burst_ids == other.burst_ids == acks == [1, 2]
    failed = [entry for entry in logs if entry["event"] == "listener_failed"]
    assert [(entry["burst_id"], entry["exc_info"]) for entry in failed] == [(1, error), (2, error)]


def test_closing_from_inside_a_listener_raises(
    make_scheduler: MakeScheduler, hearing: Hearing, logs: list[Any]
) -> None:
    scheduler = make_scheduler()
    hearing.then = lambda ack: scheduler.close()
    scheduler.listen(hearing)
    hand_out(scheduler, 1)
    hearing.wait_bursts(1)
    scheduler.close(WAIT)
    (failed,) = [entry for entry in logs if entry["event"] == "listener_failed"]
    assert isinstance(failed["exc_info"], HiCacheSchedError)


def test_a_loop_that_dies_where_a_listener_is_told_tells_each_once(
    make_scheduler: MakeScheduler, hearing: Hearing, logs: list[Any]
) -> None:
    scheduler, other = make_scheduler(), Hearing()
    hearing.then = lambda ack: asyncio.get_running_loop().stop()
    scheduler.listen(hearing)
    scheduler.listen(other)
    for node in (1, 2, 3):
        hand_out(scheduler, node)
    other.wait_bursts(3)
    eventually(lambda: "thread_failed" in [entry["event"] for entry in logs])  # a close stops the loop as well
    scheduler.close(WAIT)
    assert hearing.burst_ids == other.burst_ids == [1, 2, 3]


def test_ctrl_c_in_a_listener_is_the_callers_in_inline_mode_and_each_is_told_once(
    make_scheduler: MakeScheduler, hearing: Hearing
) -> None:
    def interrupt(ack: Any) -> None:
        raise KeyboardInterrupt

    scheduler, other = make_scheduler(mode="inline"), Hearing()
    hearing.then = interrupt
    scheduler.listen(hearing)
    scheduler.listen(other)
    handle = hand_out(scheduler, 1)
    with pytest.raises(KeyboardInterrupt):
        handle.result(WAIT)
    handle.result(WAIT)
    scheduler.pop_acks()
    assert hearing.burst_ids == other.burst_ids == [1]


@pytest.mark.parametrize("function", ["run", "_deliver", "_tell", "call"])
def test_ctrl_c_anywhere_in_a_delivery_tells_each_once(
    make_scheduler: MakeScheduler, hearing: Hearing, function: str
) -> None:
    scheduler, other = make_scheduler(mode="inline"), Hearing()
    scheduler.listen(hearing)
    scheduler.listen(other)
    for num_bursts in itertools.count(1):
        handle = hand_out(scheduler, num_bursts)
        scheduler.h2d_stream.synchronize()
        interrupt = InterruptAfterCall(function, num_bursts - 1)
        sys.setprofile(interrupt)
        try:
            handle.result(WAIT)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        scheduler.pop_acks()
        assert hearing.burst_ids == other.burst_ids == list(range(1, num_bursts + 1))
        if not interrupt.done:
            break
    assert num_bursts > 1, "it was interrupted at all"


# -- stalls -----------------------------------------------------------------------------------------------------------


def test_a_layer_that_is_stuck_is_told_of_once_however_often_it_is_logged(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing, logs: list[Any]
) -> None:
    scheduler = make_scheduler(stall_log_interval=0.01)
    handles = []
    for node in (1, 2):
        scheduler.listen(hearing)
        device.hold("h2d")
        handles.append(hand_out(scheduler, node))
        hearing.wait_stalls(node)
        eventually(lambda: [entry["event"] for entry in logs].count("layer_stalled") >= 3)
        scheduler.unlisten(hearing)
        device.resume("h2d")
        handles[-1].result(WAIT)
        eventually(lambda: any(entry["event"] == "layer_recovered" for entry in logs))
        logs.clear()
    assert hearing.stalls == ["layer", "layer"]


def test_a_hand_out_that_waits_too_long_for_a_slot_is_told_of_once(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing, logs: list[Any]
) -> None:
    scheduler = make_scheduler(stall_log_interval=0.01, num_slots=1)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.listen(hearing)
    scheduler.load(load_op(2))
    waiting = in_thread(partial(scheduler.start_loading_sync, WAIT))
    eventually(lambda: [entry["event"] for entry in logs].count("slot_stalled") >= 3)
    device.resume("h2d")
    waiting.result(WAIT)
    assert hearing.stalls.count("slot") == 1


def test_a_listener_that_raises_of_a_stall_is_logged_and_others_are_told(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    hearing: Hearing,
    logs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = ValueError("no")

    def fail(what: str) -> None:
        raise error

    failing = Hearing()
    monkeypatch.setattr(failing, "stalled", fail)
    scheduler = make_scheduler(stall_log_interval=0.01)
    scheduler.listen(failing)
    scheduler.listen(hearing)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    hearing.wait_stalls(1)
    eventually(lambda: [entry["event"] for entry in logs].count("layer_stalled") >= 2)
    device.resume("h2d")
    assert handle.result(WAIT).status is AckStatus.OK
    failed = [entry for entry in logs if entry["event"] == "listener_failed"]
    assert [(entry["stalled"], entry["exc_info"]) for entry in failed] == [("layer", error)]


# -- looks that observe nothing ----------------------------------------------------------------------------------------


def test_stats_that_do_not_observe_run_no_callback_and_ask_the_device_nothing(
    device: EmulatedDevice, make_scheduler: MakeScheduler, hearing: Hearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(mode="inline", num_slots=2)
    scheduler.listen(hearing)
    handle = hand_out(scheduler, 1)
    assert handle._burst.events is not None

    asked: list[Any] = []
    event_type = type(handle._burst.events.ack_finish)
    query: Callable[[Any], bool] = event_type.query

    def noted(event: Any) -> bool:
        asked.append(event)
        return query(event)

    monkeypatch.setattr(event_type, "query", noted)
    scheduler.h2d_stream.synchronize()
    stats = scheduler.stats(observe=False)
    assert (stats.bursts_in_flight, stats.free_slots, hearing.burst_ids) == (1, 1, [])
    assert asked == []
    stats = scheduler.stats()
    assert asked != []
    assert (stats.bursts_in_flight, stats.free_slots, hearing.burst_ids) == (0, 2, [1])
    assert scheduler.stats(observe=False) == stats


def test_stats_that_do_not_observe_are_there_before_the_start_and_after_the_close(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler: TransferScheduler = make_scheduler(start=False)
    assert scheduler.stats(observe=False) == scheduler.stats()
    scheduler.start()
    scheduler.close(WAIT)
    assert scheduler.stats(observe=False) == scheduler.stats()

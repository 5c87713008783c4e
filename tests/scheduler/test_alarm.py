"""When the loop is told of a burst: where a native plane serves it, at its end, or when that is long in coming."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_sched import LoadAck, LoadHandle, TransferScheduler, native
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.job import LATEST_BEGIN, Jobs
from hicache_sched.loop_thread import LoopThread
from hicache_sched.native_plane import NativePlane
from tests.builders import LaunchingBackend, MakeScheduler, hand_out
from tests.copy.builders import make_pair
from tests.scheduler.crowd import WAIT, eventually
from tests.scheduler.hearing import Hearing

pytestmark = pytest.mark.skipif(native.module is None, reason="needs the native part")


@pytest.fixture
def plane() -> str:
    return "native"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop was told to call, each time that it was woken for it."""
    calls: list[str] = []
    call = LoopThread.call

    def counted(self: LoopThread, fn: Callable[..., object], *args: Any) -> None:
        calls.append(fn.__name__)
        call(self, fn, *args)

    monkeypatch.setattr(LoopThread, "call", counted)
    return calls


def jobs_of(scheduler: TransferScheduler) -> dict[int, asyncio.Task[None]]:
    assert scheduler._threads is not None
    return scheduler._threads.jobs._of_bursts


def alarm_of(scheduler: TransferScheduler) -> str:
    """How the kernel says when the alarm will ring."""
    assert scheduler._threads is not None
    number = scheduler._threads.loop._bells.alarm_fd  # type: ignore[union-attr]
    (left,) = re.findall(r"it_value: \((.*)\)", Path(f"/proc/self/fdinfo/{number}").read_text())
    return str(left)


NEVER = "0, 0"


@pytest.mark.parametrize("looks", [True, False])
def test_a_burst_that_lands_soon_wakes_the_loop_once_and_has_no_job(
    make_scheduler: MakeScheduler, calls: list[str], monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    monkeypatch.setattr("hicache_sched.scheduler.LATEST_BEGIN", WAIT)
    acks: list[LoadAck] = []
    scheduler = make_scheduler(PooledBackend([make_pair()]), on_ack=acks.append)
    monkeypatch.setattr(Jobs, "_log_stalls_until_end", None)  # nobody calls it
    for number in range(1, 4):
        handle = hand_out(scheduler, number)
        eventually(handle.done if looks else lambda number=number: len(acks) == number)  # type: ignore[misc]
        eventually(lambda number=number: len(acks) == number)  # type: ignore[misc]
    assert calls == ["begin"] * 3
    scheduler.close(WAIT)
    assert [ack.burst_id for ack in acks] == [1, 2, 3]


@pytest.mark.usefixtures("no_debug_logs")
def test_bursts_that_land_soon_never_wake_the_loop_where_nobody_is_told_of_them(
    make_scheduler: MakeScheduler, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_sched.scheduler.LATEST_BEGIN", WAIT)
    scheduler = make_scheduler(PooledBackend([make_pair()]))
    for number in range(1, 6):
        hand_out(scheduler, number).result(WAIT)
    scheduler.close(WAIT)
    assert calls == []


@pytest.mark.usefixtures("no_debug_logs")
def test_a_burst_that_nobody_is_told_of_is_kept_by_nobody_after_a_reset(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    handle = hand_out(scheduler, 1)
    handle.result(WAIT)
    burst = weakref.ref(handle._burst)
    scheduler.reset(WAIT)
    del handle
    eventually(lambda: gc.collect() >= 0 and burst() is None)


def test_a_burst_that_lasts_has_a_job_although_nobody_looks(
    device: EmulatedDevice, make_scheduler: MakeScheduler, calls: list[str]
) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    hand_out(scheduler, 1)
    hand_out(scheduler, 2)
    eventually(lambda: list(jobs_of(scheduler)) == [1, 2])
    assert calls == [], "the alarm did it"
    assert [task.get_name() for task in jobs_of(scheduler).values()] == ["burst-1", "burst-2"]
    hand_out(scheduler, 3)
    eventually(lambda: list(jobs_of(scheduler)) == [1, 2, 3])
    device.resume("h2d")
    scheduler.close(WAIT)
    assert len(scheduler.pop_acks()) == 3
    assert calls == [], "a job is woken by what it waits for"


def test_only_bursts_that_the_alarm_went_off_for_have_jobs(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = threading.Event()
    hear = NativePlane.hear_alarm

    def hear_of_the_first(self: NativePlane) -> int:
        heard.wait(WAIT)
        return min(hear(self), 1)

    monkeypatch.setattr(NativePlane, "hear_alarm", hear_of_the_first)
    scheduler = make_scheduler()
    device.hold("h2d")
    for number in (1, 2):
        hand_out(scheduler, number)
    heard.set()
    eventually(lambda: bool(jobs_of(scheduler)))
    assert list(jobs_of(scheduler)) == [1]
    device.resume("h2d")


def test_the_alarm_is_set_while_a_burst_is_in_flight_and_not_after(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_sched.scheduler.LATEST_BEGIN", 1000.0)
    scheduler = make_scheduler(stall_log_interval=2000.0)
    assert alarm_of(scheduler) == NEVER
    for _ in range(3):
        device.hold("h2d")
        first, second = hand_out(scheduler, 1), hand_out(scheduler, 2)
        assert alarm_of(scheduler) != NEVER
        device.step("h2d", 4)
        first.result(WAIT)
        assert alarm_of(scheduler) != NEVER
        device.resume("h2d")
        second.result(WAIT)
        eventually(lambda: alarm_of(scheduler) == NEVER)


@pytest.mark.parametrize(("interval", "seconds"), [(0.01, 0.01), (30.0, LATEST_BEGIN), (float("inf"), LATEST_BEGIN)])
def test_the_alarm_is_no_later_than_the_first_stall(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, interval: float, seconds: float
) -> None:
    asked: list[float] = []
    plane = native.module.Plane

    def made(*args: Any) -> Any:
        asked.append(args[-1])
        return plane(*args)

    monkeypatch.setattr(native.module, "Plane", made)
    make_scheduler(stall_log_interval=interval)
    assert asked == [seconds]


def failed_call(device: EmulatedDevice, backend: LaunchingBackend, scheduler: TransferScheduler) -> LoadHandle:
    backend.failures["prepare"] = RuntimeError("no such page")
    handle: LoadHandle = hand_out(scheduler, 2)
    return handle


def failed_record(device: EmulatedDevice, backend: LaunchingBackend, scheduler: TransferScheduler) -> LoadHandle:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such event")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler._submission, "record_hand_out", fail)
        handle: LoadHandle = hand_out(scheduler, 2)
        return handle


@pytest.mark.parametrize("fail", [failed_call, failed_record])
def test_a_failure_is_logged_at_once_although_an_earlier_burst_is_held(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    logs: list[Any],
    fail: Callable[[EmulatedDevice, LaunchingBackend, TransferScheduler], LoadHandle],
) -> None:
    monkeypatch.setattr("hicache_sched.scheduler.LATEST_BEGIN", 1000.0)
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    hand_out(scheduler, 1)
    eventually(lambda: len(backend.events) >= 5)  # which has no room for failures any more
    handle = fail(device, backend, scheduler)
    eventually(lambda: any(entry["event"] == "burst_failed" for entry in logs))
    assert handle.stale
    assert not handle.done()
    device.resume("h2d")
    scheduler.close(WAIT)
    assert [entry["event"] for entry in logs].count("burst_failed") == 1


def test_where_somebody_listens_the_loop_comes_to_a_burst_at_once(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_sched.scheduler.LATEST_BEGIN", 1000.0)
    scheduler = make_scheduler()
    hearing = Hearing()
    scheduler.listen(hearing)
    device.hold("h2d")
    hand_out(scheduler, 1)
    eventually(lambda: list(jobs_of(scheduler)) == [1])
    device.resume("h2d")
    (times,) = hearing.wait_bursts(1)
    assert times.job_began is not None
    assert times.job_began < times.ended


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(("owner", "step"), [(NativePlane, "hear_alarm"), (Jobs, "begin_all"), (Jobs, "begin")])
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
def test_a_loop_that_dies_of_the_alarm_logs_the_stall_all_the_same(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    logs: list[Any],
    owner: type,
    step: str,
    where: str,
    event_loop: str,
) -> None:
    scheduler = make_scheduler(event_loop=event_loop, stall_log_interval=0.01)
    original = getattr(owner, step)
    deaths: list[str] = []

    def interrupted(*args: Any) -> Any:
        if where == "after":
            result = original(*args)
        if not deaths:
            deaths.append(step)
            raise SystemExit
        return result if where == "after" else original(*args)

    device.hold("h2d")
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        handle = hand_out(scheduler, 1)
        eventually(lambda: any(entry["event"] == "layer_stalled" for entry in logs))
    assert deaths == [step]
    device.resume("h2d")
    handle.result(WAIT)

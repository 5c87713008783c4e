"""The end of a burst that nobody has to be told of: nobody is woken for it, and nobody misses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from hicache_sched import AckStatus, LoadCancelledError, LoadFailedError, LoadHandle, TransferScheduler, protocol
from hicache_sched.delivery import Delivery
from hicache_sched.device import EmulatedDevice
from hicache_sched.waiting import wake_all
from tests.builders import LaunchingBackend, MakeScheduler, hand_out
from tests.scheduler.crowd import WAIT, eventually, in_thread
from tests.scheduler.hearing import Hearing

pytestmark = pytest.mark.usefixtures("no_debug_logs")


@pytest.fixture
def deliveries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bursts that somebody was woken for, to deliver their end."""
    deliveries: list[int] = []
    deliver = Delivery._deliver

    def counted(self: Delivery, burst: Any) -> None:
        deliveries.append(burst.id)
        deliver(self, burst)

    monkeypatch.setattr(Delivery, "_deliver", counted)
    return deliveries


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_bursts_that_nobody_is_told_of_are_not_delivered(
    make_scheduler: MakeScheduler, deliveries: list[int], mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)
    for number in range(1, 8):
        assert hand_out(scheduler, number).result(WAIT).burst_id == number
    assert [ack.burst_id for ack in scheduler.pop_acks()] == list(range(1, 8))
    assert scheduler.idle
    scheduler.reset(WAIT)
    scheduler.close(WAIT)
    assert deliveries == []


def listen(scheduler: TransferScheduler) -> None:
    scheduler.listen(Hearing())


def nothing(scheduler: TransferScheduler) -> None:
    pass


@pytest.mark.parametrize(("before", "on_ack"), [(listen, None), (nothing, lambda ack: None)])
def test_bursts_that_somebody_is_told_of_are_delivered(
    make_scheduler: MakeScheduler, deliveries: list[int], before: Callable[[TransferScheduler], None], on_ack: Any
) -> None:
    scheduler = make_scheduler(on_ack=on_ack)
    before(scheduler)
    for number in range(1, 4):
        hand_out(scheduler, number)
    scheduler.close(WAIT)
    assert deliveries == [1, 2, 3]


def test_with_debug_logs_they_are_delivered(make_scheduler: MakeScheduler, deliveries: list[int]) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("debug"))
    scheduler = make_scheduler()
    hand_out(scheduler, 1)
    scheduler.close(WAIT)
    assert deliveries == [1]


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_callback_that_was_added_before_the_end_is_run_and_one_after_at_once(
    device: EmulatedDevice, make_scheduler: MakeScheduler, deliveries: list[int], mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    told: list[tuple[str, str]] = []

    def tell(when: str) -> Callable[[LoadHandle], None]:
        return lambda handle: told.append((when, threading.current_thread().name))

    handle.add_done_callback(tell("before"))
    device.resume("h2d")
    handle.result(WAIT)
    scheduler.close(WAIT)
    second = hand_out(scheduler, 2)
    second.result(WAIT)
    second.add_done_callback(tell("after"))
    here = threading.current_thread().name
    assert told == [("before", here if mode == "inline" else "hicache-sched"), ("after", here)]
    assert deliveries == [1]


def test_behind_one_that_is_being_delivered_they_are_delivered_in_order(
    device: EmulatedDevice, make_scheduler: MakeScheduler, deliveries: list[int]
) -> None:
    scheduler = make_scheduler()
    entered, gate = threading.Event(), threading.Event()

    def stop(handle: LoadHandle) -> None:
        entered.set()
        assert gate.wait(WAIT)

    device.hold("h2d")
    first = hand_out(scheduler, 1)
    first.add_done_callback(stop)
    device.resume("h2d")
    assert entered.wait(WAIT)
    for number in (2, 3):
        assert hand_out(scheduler, number).result(WAIT).burst_id == number
    closing = in_thread(lambda: scheduler.close(WAIT))
    assert not closing.done()
    gate.set()
    closing.result(WAIT)
    assert deliveries == [1, 2, 3]


def test_a_failure_and_a_cancelled_burst_are_logged(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any], deliveries: list[int]
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    backend.failures["prepare"] = RuntimeError("no such page")
    with pytest.raises(LoadFailedError):
        hand_out(scheduler, 1).result(WAIT)
    backend.gate.clear()
    hand_out(scheduler, 2)
    cancelled = hand_out(scheduler, 3)
    assert cancelled.cancel()
    backend.gate.set()
    with pytest.raises(LoadCancelledError):
        cancelled.result(WAIT)
    scheduler.close(WAIT)
    assert [ack.status for ack in scheduler.pop_acks()] == [AckStatus.FAILED, AckStatus.OK, AckStatus.CANCELLED]
    assert deliveries == [1, 3]
    assert [entry["event"] for entry in logs if entry["event"].startswith("burst_")] == [
        "burst_failed",
        "burst_cancelled",
    ]


def test_one_that_lasted_recovers_and_has_no_job_any_more(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any], deliveries: list[int]
) -> None:
    scheduler = make_scheduler(stall_log_interval=0.01)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    eventually(lambda: any(entry["event"] == "layer_stalled" for entry in logs))
    device.resume("h2d")
    handle.result(WAIT)
    assert scheduler._threads is not None
    jobs = scheduler._threads.jobs
    eventually(lambda: not jobs._of_bursts)
    scheduler.close(WAIT)
    assert [entry["event"] for entry in logs].count("layer_recovered") == 1
    assert deliveries == []


def test_a_close_that_waits_is_told_of_the_end(
    device: EmulatedDevice, make_scheduler: MakeScheduler, deliveries: list[int]
) -> None:
    scheduler = make_scheduler()
    for _ in range(20):
        device.hold("h2d")
        hand_out(scheduler, 1)
        resetting = in_thread(lambda: scheduler.reset(WAIT))
        eventually(lambda: bool(scheduler._protocol._waiters))
        device.resume("h2d")
        resetting.result(WAIT)
    assert deliveries == []


def test_an_observer_interrupted_before_it_wakes_anybody_leaves_nobody_asleep(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, deliveries: list[int]
) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    waiting = in_thread(handle.result)  # without a timeout, at which it would look again
    eventually(lambda: bool(handle._burst.waiter_names()))
    interrupted = threading.Event()

    def interrupt_once(waiters: Any) -> None:
        if handle._burst.ended and not interrupted.is_set():
            interrupted.set()
            raise SystemExit
        wake_all(waiters)

    monkeypatch.setattr(protocol, "wake_all", interrupt_once)
    device.resume("h2d")
    assert waiting.result(WAIT).status is AckStatus.OK
    assert interrupted.is_set()
    scheduler.close(WAIT)
    assert [ack.burst_id for ack in scheduler.pop_acks()] == [1]
    assert deliveries == []

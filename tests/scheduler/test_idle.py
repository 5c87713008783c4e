"""Idle is free: with nothing in flight no thread of the process wakes up, counted by the kernel."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache_sched import LoadFailedError, TransferScheduler
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out

SECOND = 1.0
TIMEOUT = 30.0

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel counts wake-ups in /proc")


class WakeUps:
    """Counts how often the threads that were started since it was made wake up."""

    def __init__(self) -> None:
        self._others = set(threading.enumerate())

    def so_far(self) -> dict[str, int]:
        return {name: int(status["voluntary_ctxt_switches"]) for name, status in self._statuses().items()}

    def within(self, seconds: float) -> dict[str, int]:
        """Which of them woke up how often, from when all had come to rest."""
        before = self._at_rest()
        time.sleep(seconds)
        return {name: count - before[name] for name, count in self.so_far().items() if count != before[name]}

    def _at_rest(self) -> dict[str, int]:
        """The counts once every thread sleeps and goes on sleeping; on a busy machine one may be ready for long
        before it runs."""
        deadline = time.monotonic() + 10
        while True:
            before = self.so_far()
            time.sleep(0.05)
            asleep = all(status["State"].startswith("S") for status in self._statuses().values())
            if (asleep and self.so_far() == before) or time.monotonic() > deadline:
                return before

    def _statuses(self) -> dict[str, dict[str, str]]:
        """What the kernel says of each thread, by its name and id."""
        statuses = {}
        for thread in set(threading.enumerate()) - self._others:
            lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
            pairs = (line.partition(":") for line in lines)
            statuses[f"{thread.name} ({thread.native_id})"] = {key: value.strip() for key, _, value in pairs}
        return statuses


def fresh(scheduler: TransferScheduler, backend: LaunchingBackend, device: EmulatedDevice) -> None:
    pass


def landed(scheduler: TransferScheduler, backend: LaunchingBackend, device: EmulatedDevice) -> None:
    for node_id in range(8):
        hand_out(scheduler, node_id).result(TIMEOUT)


def failed(scheduler: TransferScheduler, backend: LaunchingBackend, device: EmulatedDevice) -> None:
    for stage in ("prepare", 2, "finish"):
        backend.failures[stage] = RuntimeError("no such page")
        with pytest.raises(LoadFailedError):
            hand_out(scheduler, 1).result(TIMEOUT)


def cancelled(scheduler: TransferScheduler, backend: LaunchingBackend, device: EmulatedDevice) -> None:
    backend.gate.clear()
    first, second = hand_out(scheduler, 1), hand_out(scheduler, 2)
    assert second.cancel()
    backend.gate.set()
    first.result(TIMEOUT)
    hand_out(scheduler, 3).result(TIMEOUT)  # behind the ack of the cancelled one


def waited_for_a_slot(scheduler: TransferScheduler, backend: LaunchingBackend, device: EmulatedDevice) -> None:
    device.hold("h2d")
    for node_id in (1, 2, 3):
        hand_out(scheduler, node_id)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(hand_out, scheduler, 4)
        device.step("h2d", 4)
        handle = waiting.result(TIMEOUT)
    device.resume("h2d")
    handle.result(TIMEOUT)


def reset(scheduler: TransferScheduler, backend: LaunchingBackend, device: EmulatedDevice) -> None:
    hand_out(scheduler, 1)
    scheduler.reset(TIMEOUT)


HISTORIES: list[Callable[[TransferScheduler, LaunchingBackend, EmulatedDevice], None]] = [
    fresh,
    landed,
    failed,
    cancelled,
    waited_for_a_slot,
    reset,
]


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
def test_with_nothing_in_flight_no_thread_wakes_up_for_a_second(
    make_scheduler: MakeScheduler, event_loop: str, logs: list[Any]
) -> None:
    wake_ups = WakeUps()
    devices = [EmulatedDevice() for _ in HISTORIES]
    schedulers = []
    for device, history in zip(devices, HISTORIES, strict=True):
        backend = LaunchingBackend(device)
        # A stall timer that outlived its burst would fire within the second.
        config: dict[str, Any] = {"event_loop": event_loop, "stall_log_interval": 0.2, "thread_name": history.__name__}
        schedulers.append(make_scheduler(backend, runtime=device, **config))
        history(schedulers[-1], backend, device)
        schedulers[-1].pop_acks()
        assert schedulers[-1].idle
    try:
        assert len(wake_ups.so_far()) > 3 * len(HISTORIES), "all our threads and the devices' are counted"
        assert wake_ups.within(SECOND) == {}
        if event_loop == "asyncio":
            loops = [scheduler._threads.loop._loop for scheduler in schedulers if scheduler._threads is not None]
            assert len(loops) == len(HISTORIES)
            timers = [timer for loop in loops for timer in loop._scheduled]  # type: ignore[attr-defined]
            assert [timer for timer in timers if not timer.cancelled()] == []
    finally:
        for scheduler in schedulers:
            scheduler.close(TIMEOUT)
        for device in devices:
            device.close()


def test_the_count_sees_a_poll(make_scheduler: MakeScheduler) -> None:
    wake_ups = WakeUps()
    scheduler = make_scheduler(thread_name="polling")
    assert scheduler._threads is not None
    loop = scheduler._threads.loop

    def poll() -> None:
        asyncio.get_running_loop().call_later(0.1, poll)

    loop.call(poll)

    assert any(name.startswith("polling (") for name in wake_ups.within(0.5))

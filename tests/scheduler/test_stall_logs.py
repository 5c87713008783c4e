"""Stall logs: what waits too long is said every interval, by whoever's fault, and its recovery once."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog

from hicache_sched import LoadCancelledError, LoadFailedError, SchedulerClosedError, TransferTimeoutError
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op

INTERVAL = 1 / 64  # exact in binary: logs are due at the very instant that the clock is moved to
TIMEOUT = 30.0
LOOPS = pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])


class LogTape:
    """A structlog processor that keeps every entry and lets threads wait for one."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def __call__(self, logger: object, method: str, entry: structlog.types.EventDict) -> structlog.types.EventDict:
        with self._changed:
            self._entries.append(dict(entry))
            self._changed.notify_all()
        raise structlog.DropEvent

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"event": event, **fields}.items()
        with self._changed:
            return [entry for entry in self._entries if wanted <= {key: entry.get(key) for key in dict(wanted)}.items()]

    def wait(self, n: int, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Block until there are `n` such entries; gives them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(event, **fields)) >= n, TIMEOUT), f"no {n} x {event}"
            return self.of(event, **fields)


class FrozenClock:
    """Stands in for the `time` module of jobs: stands still until it is moved, so that cadences are exact.

    Jobs look at it when their real timers fire, every `INTERVAL` real seconds or less.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        self._reads: Counter[str] = Counter()
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        with self._changed:
            self._reads[threading.current_thread().name] += 1
            self._changed.notify_all()
            return self._now

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds

    def wait_first_read(self, thread_name: str) -> None:
        """Block until that thread has read the clock."""
        self._wait_reads(thread_name, lambda before: 1)

    def wait_looks(self, n: int) -> None:
        """Block until jobs have looked `n` more times; a look without a log takes two reads."""
        self._wait_reads("hicache-sched", lambda before: before + 2 * n + 1)

    def _wait_reads(self, thread_name: str, target_from: Callable[[int], int]) -> None:
        with self._changed:
            target = target_from(self._reads[thread_name])
            assert self._changed.wait_for(lambda: self._reads[thread_name] >= target, TIMEOUT)


@pytest.fixture
def tape() -> Iterator[LogTape]:
    tape = LogTape()
    processors = structlog.get_config()["processors"]
    before = processors.copy()
    processors[:] = [tape]  # in place: loggers that are bound already follow
    yield tape
    processors[:] = before


@pytest.fixture
def plane() -> str:
    """The native one has a clock of its own, that cannot be stopped; see `test_native_plane`."""
    return "python"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FrozenClock:
    clock = FrozenClock()
    for module in ("hand_out", "job", "progress"):
        monkeypatch.setattr(f"hicache_sched.{module}.time", clock)
    return clock


@pytest.fixture
def backend(device: EmulatedDevice) -> LaunchingBackend:
    return LaunchingBackend(device)


class Stuck:
    """A burst of nodes 7 and 8 that is stuck, and how to let it go on."""

    def __init__(self, stage: str, scheduler: Any, backend: LaunchingBackend, device: EmulatedDevice) -> None:
        self.layer = 0
        self.blocked_behind: int | None = None
        self.queue_depth = 0
        self.release: Callable[[], None] = backend.release
        if stage == "queued":
            backend.gate.clear()
            self.blocked_behind = hand_out(scheduler, 1).burst_id
            assert backend.preparing.wait(TIMEOUT)
            self.queue_depth = 1
        elif stage == "preparing":
            backend.gate.clear()
        elif stage == "enqueuing":
            self.layer = 2
            entered = backend.hold_layer(2)
        else:
            self.layer = 1
            device.hold("h2d")
            self.release = lambda: device.resume("h2d")
        self.handle = hand_out(scheduler, 7, 8)
        if stage == "preparing":
            assert backend.preparing.wait(TIMEOUT)
        elif stage == "enqueuing":
            assert entered.wait(TIMEOUT)
            self.handle.wait_layer(1, TIMEOUT)
        elif stage == "device":
            device.step("h2d", 1)
            asyncio.run(self.handle.enqueued(3))
            self.handle.wait_layer(0, TIMEOUT)


# -- layers -----------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("stage", ["queued", "preparing", "enqueuing", "device"])
def test_a_layer_that_is_stuck_is_logged_every_interval_and_recovers_once(
    device: EmulatedDevice,
    backend: LaunchingBackend,
    make_scheduler: MakeScheduler,
    tape: LogTape,
    clock: FrozenClock,
    stage: str,
    event_loop: str,
) -> None:
    scheduler = make_scheduler(backend, event_loop=event_loop, stall_log_interval=INTERVAL)
    stuck = Stuck(stage, scheduler, backend, device)
    burst_id = stuck.handle.burst_id

    for n in (1, 2, 3):
        clock.advance(INTERVAL)
        tape.wait(n, "layer_stalled", burst_id=burst_id)
    stuck.release()
    stuck.handle.result(TIMEOUT)
    tape.wait(1, "layer_recovered", burst_id=burst_id)
    scheduler.close(TIMEOUT)

    fields = {"burst_id": burst_id, "slot": stuck.handle.slot, "generation": 1, "layer": stuck.layer}
    where = {"stage": stage, "queue_depth": stuck.queue_depth, "blocked_behind": stuck.blocked_behind}
    assert tape.of("layer_stalled", burst_id=burst_id) == [
        {"event": "layer_stalled", **fields, **where, "waited_s": waited, "waiter": None, "node_ids": [7, 8]}
        for waited in (0.016, 0.031, 0.047)
    ]
    (recovered,) = tape.of("layer_recovered", burst_id=burst_id)
    assert recovered.keys() == {"event", *fields, *where, "waited_s", "waiter", "node_ids"}
    assert fields.items() <= {key: recovered[key] for key in fields}.items()
    assert (recovered["waited_s"], recovered["node_ids"]) == (0.047, [7, 8])


@LOOPS
def test_stalls_are_logged_by_real_time(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, event_loop: str
) -> None:
    scheduler = make_scheduler(event_loop=event_loop, stall_log_interval=0.02)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    waited = [entry["waited_s"] for entry in tape.wait(4, "layer_stalled")[:4]]
    device.resume("h2d")
    handle.result(TIMEOUT)

    assert waited[0] >= 0.02
    assert all(later - earlier >= 0.01 for earlier, later in itertools.pairwise(waited))


def test_each_layer_that_is_stuck_is_a_stall_of_its_own(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock
) -> None:
    scheduler = make_scheduler(stall_log_interval=INTERVAL)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    for layer in (0, 1):
        clock.advance(INTERVAL)
        (stalled,) = tape.wait(1, "layer_stalled", layer=layer)
        assert stalled["waited_s"] == 0.016, "the wait of a layer begins when the one before it has landed"
        device.step("h2d", 1)
        tape.wait(1, "layer_recovered", layer=layer)
    device.resume("h2d")
    handle.result(TIMEOUT)
    scheduler.close(TIMEOUT)

    assert [entry["layer"] for entry in tape.of("layer_stalled")] == [0, 1]
    assert [entry["layer"] for entry in tape.of("layer_recovered")] == [0, 1]


def test_a_burst_that_makes_progress_within_each_interval_is_not_logged(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock
) -> None:
    scheduler = make_scheduler(stall_log_interval=INTERVAL)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    for layer in range(3):
        clock.advance(INTERVAL * 0.75)
        device.step("h2d", 1)
        handle.wait_layer(layer, TIMEOUT)
        clock.wait_looks(2)  # the job has looked
    assert tape.of("layer_stalled") == []

    clock.advance(INTERVAL)
    tape.wait(1, "layer_stalled", layer=3)  # it would have been said


def test_an_infinite_interval_means_never(
    device: EmulatedDevice,
    backend: LaunchingBackend,
    make_scheduler: MakeScheduler,
    tape: LogTape,
    clock: FrozenClock,
) -> None:
    scheduler = make_scheduler(backend, stall_log_interval=math.inf)
    device.hold("h2d")
    entered = backend.hold_layer(2)
    backend.failures[2] = RuntimeError("no such page")
    handle = hand_out(scheduler, 1)
    assert entered.wait(TIMEOUT)

    clock.advance(1e9)
    backend.release()
    tape.wait(1, "burst_failed")  # the job looks when a burst fails, not only by a timer
    device.resume("h2d")
    with pytest.raises(LoadFailedError):
        handle.result(TIMEOUT)
    scheduler.close(TIMEOUT)

    assert tape.of("layer_stalled") == []


def test_a_stall_that_ends_in_failure_has_one_recovery(
    backend: LaunchingBackend, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock
) -> None:
    scheduler = make_scheduler(backend, stall_log_interval=INTERVAL)
    backend.gate.clear()
    backend.failures["prepare"] = RuntimeError("no such page")
    handle = hand_out(scheduler, 1)
    clock.advance(INTERVAL)
    tape.wait(1, "layer_stalled")
    backend.release()
    with pytest.raises(LoadFailedError):
        handle.result(TIMEOUT)
    scheduler.close(TIMEOUT)

    assert len(tape.of("layer_recovered")) == 1
    assert len(tape.of("burst_failed")) == 1


# -- who waits ---------------------------------------------------------------------------------------------------


def stalls_until(tape: LogTape, clock: FrozenClock, waiter: str) -> None:
    """Let intervals pass until a stall names `waiter`, who may take a while to get there."""
    for n in range(1, 500):
        clock.advance(INTERVAL)
        if tape.wait(n, "layer_stalled")[-1]["waiter"] == waiter:
            return
    pytest.fail(f"no stall names {waiter}")


@pytest.mark.parametrize("wait", ["result", "wait_layer"])
def test_a_thread_that_waits_is_named(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock, wait: str
) -> None:
    scheduler = make_scheduler(stall_log_interval=INTERVAL)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    with ThreadPoolExecutor(thread_name_prefix="forward") as pool:
        waiting = pool.submit(lambda: handle.result(TIMEOUT) if wait == "result" else handle.wait_layer(3, TIMEOUT))
        stalls_until(tape, clock, "forward_0")
        device.resume("h2d")
        waiting.result(TIMEOUT)


@pytest.mark.parametrize("what", ["handle", "layer"])
async def test_a_task_that_waits_is_named(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock, what: str
) -> None:
    scheduler = make_scheduler(stall_log_interval=INTERVAL)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)

    async def forward() -> None:
        await (handle if what == "handle" else handle.layer(3))

    task = asyncio.create_task(forward(), name="forward-of-request-9")
    await asyncio.sleep(0)
    await asyncio.to_thread(stalls_until, tape, clock, "forward-of-request-9")
    device.resume("h2d")
    await task


def test_a_thread_that_gave_up_waiting_is_not_named(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock
) -> None:
    scheduler = make_scheduler(stall_log_interval=INTERVAL)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    with pytest.raises(TransferTimeoutError):
        handle.result(timeout=0.001)
    with pytest.raises(TransferTimeoutError):
        handle.wait_layer(0, timeout=0.001)
    clock.advance(INTERVAL)

    assert tape.wait(1, "layer_stalled")[0]["waiter"] is None


async def test_a_task_that_was_cancelled_while_it_waited_is_not_named(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock
) -> None:
    scheduler = make_scheduler(stall_log_interval=INTERVAL)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    task = asyncio.create_task(handle.layer(0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.advance(INTERVAL)

    assert tape.wait(1, "layer_stalled")[0]["waiter"] is None


# -- slots --------------------------------------------------------------------------------------------------------


def slot_logs(n: int, waiter: str, burst_id: int) -> list[dict[str, Any]]:
    return [
        {
            "event": "slot_stalled",
            "slot": 0,
            "waited_s": round(k * INTERVAL, 3),
            "waiter": waiter,
            "burst_id": burst_id,
            "stage": "device",
            "queue_depth": 0,
        }
        for k in range(1, n + 1)
    ]


@LOOPS
def test_a_thread_whose_hand_out_waits_is_logged_with_its_name(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock, event_loop: str
) -> None:
    scheduler = make_scheduler(num_slots=1, event_loop=event_loop, stall_log_interval=INTERVAL)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    asyncio.run(first.enqueued(3))
    with ThreadPoolExecutor(thread_name_prefix="engine") as pool:
        waiting = pool.submit(hand_out, scheduler, 2)
        clock.wait_first_read("engine_0")  # it has begun to wait
        for n in (1, 2):
            clock.advance(INTERVAL)
            stalled = tape.wait(n, "slot_stalled")
        device.resume("h2d")
        waiting.result(TIMEOUT).result(TIMEOUT)
    (recovered,) = tape.wait(1, "slot_recovered")
    scheduler.close(TIMEOUT)

    assert stalled == slot_logs(2, "engine_0", first.burst_id)
    assert recovered.keys() == stalled[0].keys()
    assert (recovered["slot"], recovered["waited_s"], recovered["waiter"]) == (0, 0.031, "engine_0")
    assert len(tape.of("slot_recovered")) == 1


@LOOPS
async def test_a_task_whose_hand_out_waits_is_logged_with_its_name(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock, event_loop: str
) -> None:
    scheduler = make_scheduler(num_slots=1, event_loop=event_loop, stall_log_interval=INTERVAL)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    await first.enqueued(3)
    scheduler.load(load_op(2))
    task = asyncio.create_task(scheduler.start_loading(), name="engine-scheduler")
    await asyncio.sleep(0)
    clock.advance(INTERVAL)
    stalled = await asyncio.to_thread(tape.wait, 1, "slot_stalled")
    device.resume("h2d")
    handle = await task
    assert handle is not None
    await handle
    await asyncio.to_thread(tape.wait, 1, "slot_recovered")
    await scheduler.aclose(TIMEOUT)

    assert stalled == slot_logs(1, "engine-scheduler", first.burst_id)
    assert len(tape.of("slot_recovered")) == 1


def test_a_hand_out_that_waits_less_than_an_interval_is_not_logged(
    device: EmulatedDevice, make_scheduler: MakeScheduler, tape: LogTape, clock: FrozenClock
) -> None:
    scheduler = make_scheduler(num_slots=1, stall_log_interval=INTERVAL)
    device.hold("h2d")
    hand_out(scheduler, 1)
    with ThreadPoolExecutor(thread_name_prefix="engine") as pool:
        waiting = pool.submit(hand_out, scheduler, 2)
        clock.wait_first_read("engine_0")
        clock.advance(INTERVAL * 0.75)
        clock.wait_looks(4)  # both jobs have looked
        device.resume("h2d")
        waiting.result(TIMEOUT).result(TIMEOUT)
    scheduler.close(TIMEOUT)

    assert tape.of("slot_stalled") == tape.of("slot_recovered") == []


# -- while the data plane is stuck inside a call ------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("stage", ["preparing", "enqueuing"])
def test_everything_else_answers_while_the_data_plane_is_stuck_inside_a_call(
    device: EmulatedDevice,
    backend: LaunchingBackend,
    make_scheduler: MakeScheduler,
    tape: LogTape,
    clock: FrozenClock,
    stage: str,
    event_loop: str,
) -> None:
    scheduler = make_scheduler(backend, event_loop=event_loop, stall_log_interval=INTERVAL)
    landed = hand_out(scheduler, 1)
    landed.result(TIMEOUT)
    backend.preparing.clear()
    stuck = Stuck(stage, scheduler, backend, device)
    behind = hand_out(scheduler, 9)

    assert landed.done()
    assert landed.layer_landed(3)
    asyncio.run(asyncio.wait_for(landed.layer(3), TIMEOUT))
    landed.wait_layer(3, TIMEOUT)
    assert not stuck.handle.done()
    assert behind.cancel()
    with pytest.raises(LoadCancelledError):
        behind.result(TIMEOUT)
    assert scheduler.stats().bursts_in_flight == 1
    with pytest.raises(TransferTimeoutError):
        scheduler.close(timeout=0.001)
    with pytest.raises(SchedulerClosedError):
        scheduler.load(load_op(3))
    for n in (1, 2):
        clock.advance(INTERVAL)
        tape.wait(n, "layer_stalled", burst_id=stuck.handle.burst_id, stage=stage)

    stuck.release()
    scheduler.close(TIMEOUT)
    assert stuck.handle.done()
    assert len(tape.of("layer_recovered", burst_id=stuck.handle.burst_id)) == 1

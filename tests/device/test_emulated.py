"""What is the emulated device's own: engines, what tests control, inline default streams, virtual time."""

from __future__ import annotations

import gc
import itertools
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hicache_sched import native
from hicache_sched.device import EmulatedDevice, EmulatedStream
from hicache_sched.device.emulated_core import ENGINES, EngineName
from tests.builders import running_functions
from tests.device.batches import NO_COPIES, row_copies
from tests.scheduler.interrupt import InterruptAfterCall

WAIT = 30.0


class Blocked:
    """A call on a thread of its own.

    Attributes:
        error: what it raised.
        done: set when it has returned or raised.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as exc:
            self.error = exc
        finally:
            self.done.set()

    def wait_until_parked(self) -> None:
        """Return once it sleeps inside the device."""
        assert self._thread.ident is not None
        wait_until_parked(self._thread.ident)
        assert not self.done.is_set()

    def finish(self) -> None:
        assert self.done.wait(WAIT)
        self._thread.join()
        if self.error is not None:
            raise self.error


def wait_until_parked(thread_ident: int) -> None:
    """Return once that thread sleeps in one of the device's blocking calls."""
    deadline = time.monotonic() + WAIT
    (thread,) = (thread for thread in threading.enumerate() if thread.ident == thread_ident)
    while time.monotonic() < deadline:
        where = running_functions(thread_ident)
        in_python = (
            where[:1] in (["block_on"], ["_run_inline"])
            or "_with_room" in where[:2]
            or (where[:1] == ["wait"] and {"step", "_perform"} & {*where})
        )
        in_native = {"block_on", "_run_inline", "step", "record", "wait", "operate", "_listed"} & {*where[:1]}
        if in_python if native.module is None else in_native and sleeps(thread):
            return
        time.sleep(0.001)
    raise AssertionError("the thread does not sleep in the device")


def sleeps(thread: threading.Thread) -> bool:
    """Whether the system says so."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


@pytest.fixture
def stream(device: EmulatedDevice) -> EmulatedStream:
    return device.Stream()


def launch_on(
    device: EmulatedDevice, stream: EmulatedStream, work: Callable[[], object], engine: EngineName = "compute"
) -> None:
    with device.stream(stream):
        device.launch(work, engine=engine)


# -- engines --------------------------------------------------------------------------------------------------


def test_engines_work_at_the_same_time(device: EmulatedDevice) -> None:
    met = threading.Barrier(len(ENGINES))
    for engine in ENGINES:
        launch_on(device, device.Stream(), lambda: met.wait(WAIT), engine)
    device.synchronize()
    assert not met.broken


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_does_one_thing_at_a_time(device: EmulatedDevice, engine: EngineName) -> None:
    busy, overlaps = threading.Lock(), []

    def work() -> None:
        free = busy.acquire(blocking=False)
        overlaps.append(not free)
        time.sleep(0.0005)  # gives another one the time to begin
        if free:
            busy.release()

    def submit() -> None:
        device.launch(work, engine=engine)  # on this thread, as its default stream runs inline
        with device.stream(device.Stream()):
            for _ in range(5):
                device.launch(work, engine=engine)

    threads = [Blocked(submit) for _ in range(3)]
    for thread in threads:
        thread.finish()
    device.synchronize()
    assert overlaps == [False] * 18


def test_a_device_that_nobody_refers_to_is_collected_and_its_threads_end() -> None:
    before = set(threading.enumerate())
    device = EmulatedDevice()
    with device.stream(device.Stream()):
        device.launch(lambda: None)
    device.synchronize()
    engines = set(threading.enumerate()) - before
    assert {engine.name for engine in engines} == {f"emulated-device-{name}" for name in ("compute", "h2d", "d2h")}
    del device
    gc.collect()
    for engine in engines:
        engine.join(30)
    assert not any(engine.is_alive() for engine in engines)


def test_a_parked_engine_keeps_nothing_alive(device: EmulatedDevice, stream: EmulatedStream) -> None:
    class Tensor:
        pass

    tensor, gone = Tensor(), threading.Event()
    reference = weakref.ref(tensor, lambda _: gone.set())
    launch_on(device, stream, partial(id, tensor))
    stream.synchronize()
    del tensor
    assert gone.wait(WAIT), reference()


# -- hold, step, resume ---------------------------------------------------------------------------------------


def test_a_held_engine_starts_nothing(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[str] = []
    other = device.Stream()
    device.hold("compute")
    launch_on(device, stream, lambda: done.append("compute"))
    launch_on(device, other, lambda: done.append("h2d"), "h2d")
    other.synchronize()
    assert done == ["h2d"]
    assert not stream.query()


def test_holding_an_engine_lets_what_is_running_finish(device: EmulatedDevice, stream: EmulatedStream) -> None:
    entered, leave = threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        entered.set()
        assert leave.wait(WAIT)

    launch_on(device, stream, work)
    launch_on(device, stream, lambda: done.append(2))
    event = stream.record_event()
    assert entered.wait(WAIT)
    device.hold("compute")
    leave.set()
    device.step("compute")
    event.synchronize()
    assert done == [2]


def test_what_runs_when_its_engine_is_held_is_not_one_of_the_stepped(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    entered, leave = threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        entered.set()
        assert leave.wait(WAIT)

    launch_on(device, stream, work)
    assert entered.wait(WAIT)
    device.hold("compute")
    for number in range(3):
        launch_on(device, stream, partial(done.append, number))
    leave.set()
    device.step("compute", 2)
    assert done == [0, 1]


def test_a_step_lets_exactly_n_operations_through_and_returns_when_they_are_done(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    done: list[int] = []
    device.hold("h2d")
    for number in range(6):
        launch_on(device, stream, partial(done.append, number), "h2d")
    seen = []
    for n in (1, 3, 0, 2):
        device.step("h2d", n)
        seen.append(list(done))
    assert seen == [[0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_a_step_waits_for_operations_that_are_not_queued_yet(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[int] = []
    device.hold("h2d")
    step = Blocked(lambda: device.step("h2d", 2))
    step.wait_until_parked()
    launch_on(device, stream, lambda: done.append(1), "h2d")
    stream.synchronize()
    assert not step.done.is_set()
    for number in (2, 3):
        launch_on(device, stream, partial(done.append, number), "h2d")
    step.finish()
    assert done == [1, 2]
    assert not stream.query()


def test_a_step_waits_for_an_operation_that_an_event_holds_back(device: EmulatedDevice, stream: EmulatedStream) -> None:
    other = device.Stream()
    device.hold("compute")
    device.hold("h2d")
    launch_on(device, other, lambda: None)
    stream.wait_stream(other)
    launch_on(device, stream, lambda: None, "h2d")
    step = Blocked(lambda: device.step("h2d"))
    step.wait_until_parked()
    device.step("compute")
    step.finish()


def test_events_and_waits_are_not_operations(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[int] = []
    other = device.Stream()
    device.hold("h2d")
    events = []
    for number in range(2):
        stream.wait_event(other.record_event())
        launch_on(device, stream, partial(done.append, number), "h2d")
        events.append(stream.record_event())
    device.step("h2d")
    assert done == [0]
    assert [event.query() for event in events] == [True, False]


def test_a_step_of_one_engine_lets_no_other_go_on(device: EmulatedDevice, stream: EmulatedStream) -> None:
    other = device.Stream()
    device.hold("compute")
    device.hold("h2d")
    launch_on(device, stream, lambda: None)
    launch_on(device, other, lambda: None, "h2d")
    device.step("compute")
    assert stream.query()
    assert not other.query()


def test_steps_of_several_threads_add_up(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[int] = []
    device.hold("compute")
    steps = [Blocked(lambda: device.step("compute", 2)) for _ in range(3)]
    for step in steps:
        step.wait_until_parked()
    for number in range(7):
        launch_on(device, stream, partial(done.append, number))
    for step in steps:
        step.finish()
    assert done == [0, 1, 2, 3, 4, 5]


def test_holding_a_held_engine_changes_nothing(device: EmulatedDevice, stream: EmulatedStream) -> None:
    device.hold("compute")
    step = Blocked(lambda: device.step("compute"))
    step.wait_until_parked()
    device.hold("compute")
    launch_on(device, stream, lambda: None)
    step.finish()


def test_resuming_lets_everything_through(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[int] = []
    device.hold("compute")
    for number in range(3):
        launch_on(device, stream, partial(done.append, number))
    device.resume("compute")
    launch_on(device, stream, lambda: done.append(3))
    stream.synchronize()
    assert done == [0, 1, 2, 3]


def test_resuming_an_engine_that_is_not_held_changes_nothing(device: EmulatedDevice, stream: EmulatedStream) -> None:
    device.resume("compute")
    launch_on(device, stream, lambda: None)
    stream.synchronize()


def test_a_step_needs_a_held_engine(device: EmulatedDevice) -> None:
    with pytest.raises(RuntimeError, match=r"hold\('h2d'\)"):
        device.step("h2d")
    device.hold("h2d")
    device.resume("h2d")
    with pytest.raises(RuntimeError, match=r"hold\('h2d'\)"):
        device.step("h2d")


# -- faults ---------------------------------------------------------------------------------------------------


def test_a_planned_failure_is_raised_once_where_the_next_operation_is_submitted(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    done: list[int] = []
    first, second = KeyError("first"), SystemExit("second")
    device.fail_next("h2d", first)
    device.fail_next("h2d", second)
    raised = []
    for number in range(4):
        try:
            launch_on(device, stream, partial(done.append, number), "h2d")
        except BaseException as exc:
            raised.append(exc)
    stream.synchronize()
    assert raised == [first, second]
    assert done == [2, 3]


def test_a_planned_failure_is_its_engines(device: EmulatedDevice, stream: EmulatedStream) -> None:
    device.fail_next("h2d", KeyError())
    launch_on(device, stream, lambda: None, "compute")
    stream.record_event().synchronize()
    with pytest.raises(KeyError):
        launch_on(device, stream, lambda: None, "h2d")


@pytest.mark.parametrize("submit", ["inline launch", "copies", "read"])
def test_a_planned_failure_hits_whatever_is_submitted_next(device: EmulatedDevice, submit: str) -> None:
    submissions: dict[str, tuple[EngineName, Callable[[], object]]] = {
        "inline launch": ("compute", lambda: device.launch(lambda: None)),
        "copies": ("h2d", lambda: device.enqueue_copies(NO_COPIES)),
        "read": ("d2h", lambda: device.read([torch.zeros(1)])),
    }
    engine, call = submissions[submit]
    device.fail_next(engine, KeyError())
    with pytest.raises(KeyError):
        call()
    call()


class DeviceGoneError(Exception):
    pass


def calls_of(device: EmulatedDevice) -> dict[str, Callable[[], object]]:
    """Every call that a device which is there answers at once."""
    stream, event = device.Stream(), device.Event(enable_timing=True)
    event.record(stream)
    stream.synchronize()
    return {
        "Stream": device.Stream,
        "Event": device.Event,
        "set_device": lambda: device.set_device(0),
        "synchronize": device.synchronize,
        "launch": lambda: device.launch(lambda: None),
        "launch of nothing": lambda: device.launch(None),
        "launch on a stream": lambda: launch_on(device, stream, lambda: None),
        "enqueue_copies": lambda: device.enqueue_copies(NO_COPIES),
        "read": lambda: device.read([torch.zeros(1)]),
        "event.record": event.record,
        "event.wait": event.wait,
        "event.query": event.query,
        "event.synchronize": event.synchronize,
        "event.elapsed_time": lambda: event.elapsed_time(event),
        "stream.record_event": stream.record_event,
        "stream.wait_event": lambda: stream.wait_event(event),
        "stream.wait_stream": lambda: stream.wait_stream(device.default_stream()),
        "stream.query": stream.query,
        "stream.synchronize": stream.synchronize,
    }


def test_every_call_on_a_lost_device_raises(device: EmulatedDevice) -> None:
    calls = calls_of(device)
    for call in calls.values():
        call()
    device.lose(DeviceGoneError("fell off the bus"))
    answered = []
    for name, call in calls.items():
        try:
            call()
            answered.append(name)
        except DeviceGoneError:
            pass
    assert answered == []


def blocking_calls(device: EmulatedDevice) -> dict[str, Callable[[], object]]:
    """Calls that wait for a held compute engine."""
    stream = device.Stream()
    event = device.Event()

    def occupied() -> None:
        launch_on(device, stream, lambda: None)
        event.record(stream)

    def after(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            occupied()
            call()

        return run

    def read_behind() -> None:
        occupied()
        with device.stream(stream):
            device.read([torch.zeros(1)])

    return {
        "event.synchronize": after(event.synchronize),
        "event.wait inline": after(event.wait),
        "stream.synchronize": after(stream.synchronize),
        "stream.wait_stream inline": after(lambda: device.default_stream().wait_stream(stream)),
        "device.synchronize": after(device.synchronize),
        "inline launch": lambda: device.launch(lambda: None),
        "read": read_behind,
        "step": lambda: device.step("compute", 2),
        "running inline launch": lambda: device.launch(lambda: None, engine="d2h", duration=WAIT),
    }


BLOCKING = [
    "event.synchronize",
    "event.wait inline",
    "stream.synchronize",
    "stream.wait_stream inline",
    "device.synchronize",
    "inline launch",
    "read",
    "step",
    "running inline launch",
]


@pytest.mark.parametrize("name", BLOCKING)
def test_losing_the_device_wakes_who_is_blocked_and_raises_there(device: EmulatedDevice, name: str) -> None:
    device.hold("compute")
    blocked = Blocked(blocking_calls(device)[name])
    blocked.wait_until_parked()
    device.lose(DeviceGoneError())
    with pytest.raises(DeviceGoneError):
        blocked.finish()


@pytest.mark.parametrize("name", BLOCKING)
def test_closing_the_device_wakes_who_is_blocked_and_raises_there(device: EmulatedDevice, name: str) -> None:
    device.hold("compute")
    blocked = Blocked(blocking_calls(device)[name])
    blocked.wait_until_parked()
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        blocked.finish()


def test_an_inline_launch_that_a_loss_wakes_does_not_do_its_work(device: EmulatedDevice) -> None:
    done: list[int] = []
    device.hold("compute")
    blocked = Blocked(lambda: device.launch(lambda: done.append(1)))
    blocked.wait_until_parked()
    device.lose(DeviceGoneError())
    with pytest.raises(DeviceGoneError):
        blocked.finish()
    assert done == []


def test_a_lost_device_drops_what_is_queued(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[int] = []
    device.hold("compute")
    launch_on(device, stream, lambda: done.append(1))
    device.lose(DeviceGoneError())
    device.resume("compute")
    device.close()
    assert done == []


def test_the_first_loss_is_the_one_that_is_raised(device: EmulatedDevice, stream: EmulatedStream) -> None:
    first = DeviceGoneError("first")
    device.lose(first)
    device.lose(DeviceGoneError("second"))
    device.close()
    with pytest.raises(DeviceGoneError) as raised:
        stream.query()
    assert raised.value is first


@pytest.mark.parametrize("error", [KeyError("no"), SystemExit(3)])
def test_a_kernel_that_raises_loses_the_device(
    device: EmulatedDevice, stream: EmulatedStream, error: BaseException
) -> None:
    def kernel() -> None:
        raise error

    launch_on(device, stream, kernel)
    with pytest.raises(type(error)) as raised:
        stream.synchronize()
    assert raised.value is error
    with pytest.raises(type(error)):
        device.Stream()


def test_an_inline_kernel_that_raises_does_so_at_the_launch_and_the_device_goes_on(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    def kernel() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        device.launch(kernel)
    done: list[int] = []
    device.launch(lambda: done.append(1))
    launch_on(device, stream, lambda: done.append(2))
    stream.synchronize()
    assert done == [1, 2]


# -- recorded calls -------------------------------------------------------------------------------------------


def test_every_stream_and_event_call_but_queries_is_recorded_in_order(device: EmulatedDevice) -> None:
    event, other_event = device.Event(enable_timing=True), device.Event()
    first, second = device.Stream(), device.Stream()
    default, thread = device.default_stream(), threading.current_thread().name
    event.record(first)  # before anything is recorded
    calls = device.record_calls()
    event.record(first)
    first.record_event(other_event)
    event.wait(second)
    second.wait_event(other_event)
    second.wait_stream(first)
    event.synchronize()
    second.synchronize()
    with device.stream(second):
        event.record()
        event.wait()
        with device.stream(None):
            event.synchronize()
        device.launch(lambda: None)
    event.query()
    second.query()
    event.elapsed_time(event)
    device.current_stream()
    assert calls == [
        ("record", event, first, thread),
        ("record", other_event, first, thread),
        ("wait", event, second, thread),
        ("wait", other_event, second, thread),
        ("wait_stream", first, second, thread),
        ("synchronize", event, default, thread),
        ("synchronize", second, second, thread),
        ("enter", second, second, thread),
        ("record", event, second, thread),
        ("wait", event, second, thread),
        ("synchronize", event, second, thread),
        ("leave", second, second, thread),
    ]


def test_recorded_calls_name_the_thread_that_made_them(device: EmulatedDevice, stream: EmulatedStream) -> None:
    event = device.Event()
    calls = device.record_calls()
    thread = threading.Thread(target=event.record, args=(stream,), name="engine-thread")
    thread.start()
    thread.join(WAIT)
    assert calls == [("record", event, stream, "engine-thread")]


def test_recording_again_starts_a_new_list(device: EmulatedDevice, stream: EmulatedStream) -> None:
    first = device.record_calls()
    stream.record_event()
    second = device.record_calls()
    stream.record_event()
    assert (len(first), len(second)) == (1, 1)


# -- recorded operations --------------------------------------------------------------------------------------


def test_what_the_engines_do_is_recorded_in_the_order_in_which_they_complete_it(device: EmulatedDevice) -> None:
    first, second = device.Stream(), device.Stream()
    operations = device.record_operations()
    for engine in ENGINES:
        device.hold(engine)
    launch_on(device, first, lambda: None, "compute")
    launch_on(device, second, lambda: None, "h2d")
    launch_on(device, first, lambda: None, "d2h")
    for engine in ("h2d", "compute", "d2h"):
        device.step(engine)
    assert [(each.engine, each.stream) for each in operations] == [("h2d", second), ("compute", first), ("d2h", first)]


def test_copies_and_reads_are_recorded_as_one_operation_each(device: EmulatedDevice, stream: EmulatedStream) -> None:
    operations = device.record_operations()
    batch = row_copies((np.zeros((4, 8), np.uint8), [0, 1, 2], np.ones((4, 8), np.uint8), [3, 2, 1]))
    with device.stream(stream):
        device.enqueue_copies(batch)
        device.read([torch.zeros(3), torch.zeros(4)])
    assert [(each.engine, each.stream) for each in operations] == [("h2d", stream), ("d2h", stream)]


def test_operations_of_inline_streams_are_recorded_those_that_raise_too(device: EmulatedDevice) -> None:
    operations = device.record_operations()
    before = time.monotonic()
    device.launch(lambda: None)
    device.enqueue_copies(NO_COPIES)

    def kernel() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        device.launch(kernel, engine="d2h")
    after = time.monotonic()
    default = device.default_stream()
    assert [(each.engine, each.stream) for each in operations] == [(name, default) for name in ENGINES]
    times = [time for each in operations for time in (each.begin, each.end)]
    assert [before, *times, after] == sorted([before, *times, after])


def test_an_operation_has_the_times_that_events_around_it_have(device: EmulatedDevice, stream: EmulatedStream) -> None:
    operations = device.record_operations()
    start, middle, end = (device.Event(enable_timing=True) for _ in range(3))
    device.hold("compute")
    with device.stream(stream):
        device.launch(lambda: None)
        start.record()
        device.launch(lambda: None, duration=0.004)
        middle.record()
        device.launch(lambda: None, duration=0.002)
        end.record()
    device.resume("compute")
    stream.synchronize()
    lasted = [(each.end - each.begin) * 1e3 for each in operations[1:]]
    assert lasted == pytest.approx([start.elapsed_time(middle), middle.elapsed_time(end)])
    assert min(lasted[0] - 4, lasted[1] - 2) >= -1e-6


def test_paced_operations_of_several_streams_do_not_overlap_on_their_engine(device: EmulatedDevice) -> None:
    operations = device.record_operations()
    streams = [device.Stream() for _ in range(3)]
    device.hold("h2d")
    for each in streams * 4:
        with device.stream(each):
            device.launch(lambda: None, engine="h2d", duration=0.001)
    device.resume("h2d")
    for each in streams:
        each.synchronize()
    assert len(operations) == 12
    assert all(later.begin >= earlier.end for earlier, later in pairwise(operations))


@pytest.mark.parametrize("how", ["step", "resume"])
def test_an_operation_of_a_held_engine_begins_after_it_was_let_through(
    device: EmulatedDevice, stream: EmulatedStream, how: str
) -> None:
    operations = device.record_operations()
    device.hold("compute")
    for _ in range(2):
        launch_on(device, stream, lambda: None)
    let_through = []
    for _ in range(2):
        let_through.append(time.monotonic())
        if how == "step":
            device.step("compute")
        else:
            device.resume("compute")
            stream.synchronize()
    assert operations[0].begin >= let_through[0]
    assert operations[1].begin >= let_through[how == "step"]


def test_an_operation_begins_when_what_its_stream_waits_for_is_done(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    operations = device.record_operations()
    other = device.Stream()
    with device.stream(other):
        device.launch(lambda: None, engine="h2d", duration=0.003)
    stream.wait_stream(other)
    launch_on(device, stream, lambda: None)
    stream.synchronize()
    copy, kernel = operations
    assert kernel.begin == copy.end


def test_an_inline_launch_that_was_interrupted_before_its_turn_is_no_operation(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    operations = device.record_operations()
    device.hold("compute")
    launch_on(device, stream, lambda: None)
    with interrupted():
        device.launch(lambda: None)
    launch_on(device, stream, lambda: None)
    device.resume("compute")
    device.synchronize()
    assert [each.stream for each in operations] == [stream, stream]


def test_what_a_lost_device_cuts_short_is_no_operation(device: EmulatedDevice, stream: EmulatedStream) -> None:
    operations = device.record_operations()
    started, go_on = threading.Event(), threading.Event()

    def kernel() -> None:
        started.set()
        assert go_on.wait(WAIT)

    launch_on(device, stream, kernel)
    assert started.wait(WAIT)
    device.lose(DeviceGoneError())
    go_on.set()
    device.close()
    assert list(operations) == []


def test_operations_are_recorded_from_then_on_and_again_in_a_new_list(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    def operate() -> None:
        launch_on(device, stream, lambda: None)
        stream.synchronize()

    operate()
    first = device.record_operations()
    operate()
    second = device.record_operations()
    operate()
    assert (len(first), len(second), len(first)) == (1, 1, 1)


def test_nothing_is_kept_of_operations_while_they_are_not_recorded(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    launch_on(device, stream, lambda: None)
    device.launch(lambda: None)
    device.synchronize()
    core: Any = device._core
    assert core._operations is None
    assert native.module is None or core._native.take_operations() == []


def test_the_stream_of_a_recorded_operation_is_none_where_it_was_collected_before_somebody_looked(
    device: EmulatedDevice,
) -> None:
    operations = device.record_operations()
    stream = device.Stream()
    device.hold("compute")
    launch_on(device, stream, lambda: None)
    del stream
    gc.collect()
    device.step("compute")
    assert [each.stream for each in operations] == [None]


# -- inline default streams -----------------------------------------------------------------------------------


def test_only_default_streams_run_inline(device: EmulatedDevice, stream: EmulatedStream) -> None:
    assert device.default_stream().runs_inline
    assert not stream.runs_inline


def test_each_thread_has_a_default_stream_of_its_own(device: EmulatedDevice) -> None:
    streams: list[Any] = []

    def look() -> None:
        streams.extend([device.default_stream(), device.current_stream()])

    Blocked(look).finish()
    assert streams[0] is streams[1]
    assert streams[0] is not device.default_stream()
    assert device.current_stream() is device.default_stream()


@pytest.mark.parametrize("engine", ENGINES)
def test_work_on_a_default_stream_is_done_by_the_caller_before_the_call_returns(
    device: EmulatedDevice, engine: EngineName
) -> None:
    done_by: list[threading.Thread] = []
    device.launch(lambda: done_by.append(threading.current_thread()), engine=engine)
    assert done_by == [threading.current_thread()]


def test_an_event_recorded_on_a_default_stream_is_complete_at_once(device: EmulatedDevice) -> None:
    event = device.Event()
    device.launch(lambda: None)
    event.record()
    assert event.query()
    assert device.default_stream().query()


@pytest.mark.parametrize("how", ["event.wait", "stream.wait_event", "stream.wait_stream"])
def test_a_wait_on_a_default_stream_blocks_until_what_it_waits_for_is_done(
    device: EmulatedDevice, stream: EmulatedStream, how: str
) -> None:
    done: list[int] = []
    device.hold("compute")
    launch_on(device, stream, lambda: done.append(1))
    event = stream.record_event()
    seen: list[list[int]] = []

    def wait() -> None:
        default = device.default_stream()
        waits: dict[str, Callable[[], None]] = {
            "event.wait": event.wait,
            "stream.wait_event": lambda: default.wait_event(event),
            "stream.wait_stream": lambda: default.wait_stream(stream),
        }
        waits[how]()
        seen.append(list(done))

    blocked = Blocked(wait)
    blocked.wait_until_parked()
    device.step("compute")
    blocked.finish()
    assert seen == [[1]]


def test_an_inline_launch_waits_for_its_engine(device: EmulatedDevice) -> None:
    done: list[int] = []
    device.hold("compute")
    blocked = Blocked(lambda: device.launch(lambda: done.append(1)))
    blocked.wait_until_parked()
    assert done == []
    device.step("compute")
    assert done == [1]
    blocked.finish()


def test_an_inline_launch_waits_behind_what_its_engine_was_given_before(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    done: list[str] = []
    device.hold("compute")
    launch_on(device, stream, lambda: done.append("queued"))
    blocked = Blocked(lambda: device.launch(lambda: done.append("inline")))
    blocked.wait_until_parked()
    device.resume("compute")
    blocked.finish()
    assert done == ["queued", "inline"]


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C for the main thread, once it sleeps in the device."""
    main = threading.main_thread().ident
    assert main is not None
    assert main == threading.get_ident()

    def interrupt() -> None:
        wait_until_parked(main)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        thread.join(WAIT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_an_inline_launch_waits_for_its_engine_leaves_engine_and_stream_usable(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    done: list[str] = []
    device.hold("compute")
    launch_on(device, stream, lambda: done.append("before"))
    with interrupted():
        device.launch(lambda: done.append("interrupted"))
    launch_on(device, stream, lambda: done.append("after"))
    device.resume("compute")
    device.launch(lambda: done.append("inline again"))
    stream.synchronize()
    assert set(done) == {"before", "after", "inline again"}
    assert device.default_stream().query()


def test_ctrl_c_while_an_inline_launch_takes_its_time_leaves_engine_and_stream_usable(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    done: list[str] = []
    with interrupted():
        device.launch(lambda: None, duration=WAIT)
    launch_on(device, stream, lambda: done.append("after"))
    stream.synchronize()
    device.launch(lambda: done.append("inline again"))
    assert done == ["after", "inline again"]


@pytest.mark.parametrize("function", ["operate", "_run_inline"])
def test_ctrl_c_anywhere_in_an_inline_launch_leaves_the_engine_usable_though_somebody_keeps_the_exception(
    device: EmulatedDevice, stream: EmulatedStream, function: str
) -> None:
    kept: list[BaseException] = []
    for call in itertools.count():
        interrupt = InterruptAfterCall(function, call)
        sys.setprofile(interrupt)
        try:
            device.launch(lambda: None)
        except KeyboardInterrupt as exc:
            kept.append(exc)
        finally:
            sys.setprofile(None)
        if not interrupt.done:
            break
        launch_on(device, stream, lambda: None)
        Blocked(stream.synchronize).finish()
    assert len(kept) == call > 2


@pytest.mark.parametrize("name", ["event.synchronize", "event.wait inline", "stream.synchronize", "device.synchronize"])
def test_ctrl_c_in_a_blocked_wait_loses_nothing(device: EmulatedDevice, name: str) -> None:
    device.hold("compute")
    call = blocking_calls(device)[name]
    with interrupted():
        call()
    device.step("compute")
    done: list[int] = []
    device.resume("compute")
    device.launch(lambda: done.append(1))
    device.synchronize()
    assert done == [1]


def test_ctrl_c_in_a_step_still_lets_its_operations_through(device: EmulatedDevice, stream: EmulatedStream) -> None:
    device.hold("compute")
    with interrupted():
        device.step("compute")
    launch_on(device, stream, lambda: None)
    stream.synchronize()


# -- virtual time ---------------------------------------------------------------------------------------------


def on_schedule(measure: Callable[[], float], expected_ms: float) -> None:
    """`measure` gives the virtual time that was planned for it.

    An operation that ends later than planned, because this process did not get the CPU for so long, has a later
    completion time, so that is measured again.
    """
    for _ in range(10):
        measured = measure()
        assert measured >= expected_ms - 1e-6, "nothing is done earlier than planned"
        if measured == pytest.approx(expected_ms):
            return
    raise AssertionError(f"took {measured} ms, {expected_ms} ms were planned")


def elapsed(device: EmulatedDevice, work: Callable[[], None]) -> float:
    """Milliseconds between two events on one stream, around `work`, once everything is queued."""
    stream = device.Stream()
    start, end = (device.Event(enable_timing=True) for _ in range(2))
    for engine in ENGINES:
        device.hold(engine)
    with device.stream(stream):
        device.launch(lambda: None)  # starts when the engines are resumed, and the measurement with it
        start.record()
        work()
        end.record()
    for engine in ENGINES:
        device.resume(engine)
    end.synchronize()
    return start.elapsed_time(end)


def test_a_kernel_takes_its_duration(device: EmulatedDevice) -> None:
    on_schedule(lambda: elapsed(device, lambda: device.launch(lambda: None, duration=0.05)), 50)


def test_a_kernel_that_does_nothing_takes_its_duration(device: EmulatedDevice) -> None:
    on_schedule(lambda: elapsed(device, lambda: device.launch(None, duration=0.05)), 50)


@pytest.mark.skipif(native.module is None, reason="engines in Python need the GIL")
def test_a_kernel_that_does_nothing_needs_no_gil(device: EmulatedDevice, stream: EmulatedStream) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # this thread lets nobody have it
    try:
        with device.stream(stream):
            device.launch(None)
        while not stream.query():
            pass
    finally:
        sys.setswitchinterval(interval)


def test_kernels_back_to_back_add_up_exactly(device: EmulatedDevice) -> None:
    def work() -> None:
        for duration in (0.02, 0.03, 0.05):
            device.launch(lambda: None, duration=duration)

    on_schedule(lambda: elapsed(device, work), 100)


def test_work_of_an_operation_is_part_of_its_duration(device: EmulatedDevice) -> None:
    on_schedule(lambda: elapsed(device, lambda: device.launch(lambda: time.sleep(0.01), duration=0.06)), 60)


def test_different_engines_take_their_time_at_the_same_time(device: EmulatedDevice) -> None:
    def work() -> None:
        current, other = device.current_stream(), device.Stream()
        other.wait_stream(current)
        device.launch(lambda: None, engine="compute", duration=0.05)
        with device.stream(other):
            device.launch(lambda: None, engine="h2d", duration=0.06)
        current.wait_stream(other)

    on_schedule(lambda: elapsed(device, work), 60)


def test_streams_take_turns_on_one_engine(device: EmulatedDevice) -> None:
    def work() -> None:
        current, other = device.current_stream(), device.Stream()
        other.wait_stream(current)
        device.launch(lambda: None, duration=0.03)
        with device.stream(other):
            device.launch(lambda: None, duration=0.04)
        current.wait_stream(other)

    on_schedule(lambda: elapsed(device, work), 70)


def test_copies_take_their_bytes_over_the_bandwidth_of_their_engine() -> None:
    with EmulatedDevice(h2d_bandwidth=1e9, d2h_bandwidth=0.5e9) as device:

        def work() -> None:
            device.launch(lambda: None, engine="h2d", nbytes=20_000_000)
            device.launch(lambda: None, engine="d2h", nbytes=20_000_000)
            device.launch(lambda: None, engine="h2d", nbytes=20_000_000, duration=0.01)

        on_schedule(lambda: elapsed(device, work), 20 + 40 + 30)


def test_pool_copies_are_paced_by_the_bytes_they_move() -> None:
    source, target = np.zeros((4, 1000), dtype=np.uint8), np.zeros((4, 1000), dtype=np.uint8)
    batch = row_copies((target, [0, 2, 1, 3], source, [1, 3, 1, 0]))
    with EmulatedDevice(h2d_bandwidth=1e5) as device:
        on_schedule(lambda: elapsed(device, lambda: device.enqueue_copies(batch)), 40)


@pytest.mark.parametrize("how", ["step", "resume"])
def test_the_time_an_engine_is_held_is_not_made_up_for(
    device: EmulatedDevice, stream: EmulatedStream, how: str
) -> None:
    start, end = (device.Event(enable_timing=True) for _ in range(2))
    device.hold("compute")
    with device.stream(stream):
        start.record()
        device.launch(lambda: None, duration=0.02)
        end.record()
    time.sleep(0.03)  # longer than the kernel takes
    let_go = time.monotonic()
    if how == "step":
        device.step("compute")
    else:
        device.resume("compute")
        end.synchronize()
    assert time.monotonic() - let_go >= 0.02
    assert start.elapsed_time(end) >= 30 + 20


# -- bytes ----------------------------------------------------------------------------------------------------


def test_copies_move_the_rows_they_name_and_no_others(device: EmulatedDevice, stream: EmulatedStream) -> None:
    source = np.arange(12, dtype=np.int64).reshape(6, 2)
    scattered, run = np.full((6, 2), -1, dtype=np.int64), np.full((6, 2), -1, dtype=np.int64)
    with device.stream(stream):
        device.enqueue_copies(row_copies((scattered, [5, 0], source, [1, 2]), (run, [2, 3], source, [4, 5])))
    stream.synchronize()
    assert scattered.tolist() == [[4, 5], [-1, -1], [-1, -1], [-1, -1], [-1, -1], [2, 3]]
    assert run.tolist() == [[-1, -1], [-1, -1], [8, 9], [10, 11], [-1, -1], [-1, -1]]


def test_copies_that_are_enqueued_together_are_one_operation(device: EmulatedDevice, stream: EmulatedStream) -> None:
    source, target = np.ones((2, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64)
    device.hold("h2d")
    with device.stream(stream):
        device.enqueue_copies(row_copies((target, [0], source, [0]), (target, [1], source, [1])))
    assert target.tolist() == [[0], [0]]
    device.step("h2d")
    assert target.tolist() == [[1], [1]]


def test_queued_copies_keep_their_memory_alive(device: EmulatedDevice, stream: EmulatedStream) -> None:
    source, target = np.ones((1, 4), dtype=np.int64), np.zeros((1, 4), dtype=np.int64)
    device.hold("h2d")
    with device.stream(stream):
        device.enqueue_copies(row_copies((target, [0], source, [0])))
    source_is_alive = weakref.ref(source)
    del source
    assert source_is_alive() is not None
    device.resume("h2d")
    stream.synchronize()
    assert target.tolist() == [[1, 1, 1, 1]]


def test_a_read_sees_what_its_stream_was_given_before_and_nothing_later(
    device: EmulatedDevice, stream: EmulatedStream
) -> None:
    cell = torch.tensor([0])
    with device.stream(stream):
        device.launch(lambda: cell.fill_(5), duration=0.01)
        (result,) = device.read([cell])
        device.launch(lambda: cell.fill_(6))
    stream.synchronize()
    assert result.tolist() == [5]


def test_a_read_gives_all_tensors_as_one_operation(device: EmulatedDevice, stream: EmulatedStream) -> None:
    device.hold("d2h")
    results: list[torch.Tensor] = []

    def read() -> None:
        with device.stream(stream):
            results.extend(device.read([torch.tensor([1]), torch.tensor([2, 3])]))

    blocked = Blocked(read)
    device.step("d2h")
    blocked.finish()
    assert [result.tolist() for result in results] == [[1], [2, 3]]


# -- lifecycle ------------------------------------------------------------------------------------------------


def test_closing_ends_the_engines_threads() -> None:
    before = set(threading.enumerate())
    device = EmulatedDevice()
    device.hold("d2h")
    for engine in ENGINES:
        launch_on(device, device.Stream(), lambda: None, engine)
    device.close()
    assert set(threading.enumerate()) == before


def test_closing_does_not_wait_for_what_is_queued_or_held(device: EmulatedDevice, stream: EmulatedStream) -> None:
    done: list[int] = []
    device.hold("compute")
    launch_on(device, stream, lambda: done.append(1))
    launch_on(device, device.Stream(), lambda: None, "h2d")
    device.close()
    assert done == []


def test_closing_cuts_the_duration_of_what_runs_short(device: EmulatedDevice, stream: EmulatedStream) -> None:
    entered = threading.Event()
    with device.stream(stream):
        device.launch(entered.set, duration=3600)
    assert entered.wait(WAIT)
    device.close()


def test_every_call_on_a_closed_device_raises(device: EmulatedDevice) -> None:
    calls = calls_of(device)
    device.close()
    for call in calls.values():
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_closing_again_changes_nothing(device: EmulatedDevice, stream: EmulatedStream) -> None:
    launch_on(device, stream, lambda: None)
    closing = [Blocked(device.close) for _ in range(3)]
    for call in closing:
        call.finish()
    device.close()


def test_leaving_the_context_closes_the_device() -> None:
    with EmulatedDevice() as device:
        stream = device.Stream()
    with pytest.raises(RuntimeError, match="closed"):
        stream.query()


def test_a_kernel_may_close_the_device(device: EmulatedDevice, stream: EmulatedStream) -> None:
    closed: list[BaseException | None] = []

    def kernel() -> None:
        try:
            device.close()
            closed.append(None)
        except BaseException as exc:
            closed.append(exc)

    launch_on(device, stream, kernel)
    with pytest.raises(RuntimeError, match="closed"):
        stream.synchronize()
    device.close()
    assert closed == [None]


# -- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan])
@pytest.mark.parametrize("name", ["h2d_bandwidth", "d2h_bandwidth"])
def test_a_bandwidth_is_positive(name: str, bandwidth: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        EmulatedDevice(**cast(dict[str, Any], {name: bandwidth}))


@pytest.mark.parametrize("call", ["launch", "enqueue_copies", "hold", "step", "resume", "fail_next"])
def test_an_unknown_engine_is_named_in_the_error(device: EmulatedDevice, call: str) -> None:
    unknown = cast(EngineName, "disk")
    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: device.launch(lambda: None, engine=unknown),
        "enqueue_copies": lambda: device.enqueue_copies(NO_COPIES, engine=unknown),
        "hold": lambda: device.hold(unknown),
        "step": lambda: device.step(unknown),
        "resume": lambda: device.resume(unknown),
        "fail_next": lambda: device.fail_next(unknown, KeyError()),
    }
    with pytest.raises(ValueError, match="'disk'; there are compute, h2d, d2h"):
        calls[call]()
    device.launch(lambda: None)


def test_there_is_one_device(device: EmulatedDevice) -> None:
    assert device.is_available()
    assert (device.device_count(), device.current_device()) == (1, 0)
    assert not device.is_current_stream_capturing()


# -- a full queue -------------------------------------------------------------------------------------------------


def test_a_queue_depth_is_positive() -> None:
    with pytest.raises(ValueError, match="queue_depth must be at least 1"):
        EmulatedDevice(queue_depth=0)


SUBMITTING: dict[str, Callable[[EmulatedDevice, EmulatedStream], object]] = {
    "launch": lambda device, stream: device.launch(lambda: None),
    "copies": lambda device, stream: device.enqueue_copies(NO_COPIES),
    "record": lambda device, stream: device.Event().record(stream),
    "wait_stream": lambda device, stream: device.Stream().wait_stream(stream),
}


@pytest.mark.parametrize("call", SUBMITTING)
def test_a_full_stream_blocks_who_submits_to_it_and_then_everybody_until_there_is_room(call: str) -> None:
    with EmulatedDevice(queue_depth=3) as device:
        stream, other = device.Stream(), device.Stream()
        device.hold("h2d")

        def submit() -> None:
            with device.stream(stream):
                SUBMITTING[call](device, stream)

        with device.stream(stream):
            for _ in range(3):
                device.launch(lambda: None, engine="h2d")
        first = Blocked(submit)
        first.wait_until_parked()
        second = Blocked(lambda: device.Event().record(other))
        second.wait_until_parked()
        assert not stream.query(), "what submits nothing goes on"
        device.step("h2d")
        first.finish()
        second.finish()
        device.resume("h2d")
        device.synchronize()


def test_who_waits_for_room_is_told_that_the_device_is_lost() -> None:
    with EmulatedDevice(queue_depth=1) as device:
        stream = device.Stream()
        device.hold("h2d")
        with device.stream(stream):
            device.launch(lambda: None, engine="h2d")
        blocked = Blocked(lambda: device.Event().record(stream))
        blocked.wait_until_parked()
        device.lose(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            blocked.finish()


def test_ctrl_c_interrupts_a_wait_for_room_and_the_engine_stays_usable() -> None:
    with EmulatedDevice(queue_depth=1) as device:
        stream, other = device.Stream(), device.Stream()
        device.hold("h2d")
        with device.stream(stream):
            device.launch(lambda: None, engine="h2d")
        blocked = Blocked(lambda: device.Event().record(stream))
        blocked.wait_until_parked()
        with interrupted():
            device.launch(lambda: None)  # inline, behind the thread that waits for room
        device.resume("h2d")
        blocked.finish()
        done: list[int] = []
        device.launch(lambda: done.append(1))
        assert done == [1]
        other.synchronize()


def test_listed_calls_of_others_go_on_while_one_waits_for_room() -> None:
    with EmulatedDevice(queue_depth=1) as device:
        stream, other = device.Stream(), device.Stream()
        calls = device.record_calls()
        device.hold("h2d")
        with device.stream(stream):
            device.launch(lambda: None, engine="h2d")
        blocked = Blocked(lambda: device.Event().record(stream))
        blocked.wait_until_parked()
        with device.stream(other):
            device.Event().synchronize()
        device.resume("h2d")
        blocked.finish()
        assert [call[0] for call in calls if call[2] is other] == ["enter", "synchronize", "leave"]


def test_several_threads_may_close_a_device_at_once(device: EmulatedDevice, stream: EmulatedStream) -> None:
    source, target = np.ones((1, 64 << 20), np.uint8), np.zeros((1, 64 << 20), np.uint8)
    with device.stream(stream):
        device.enqueue_copies(row_copies((target, [0], source, [0])))
    closing = [Blocked(device.close) for _ in range(3)]
    for each in closing:
        each.finish()

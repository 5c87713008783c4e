"""CUDA's ordering rules, stated once: for the emulated device everywhere, for `torch.cuda` where there is one.

A gate holds up a stream until the test opens it, so what a test finds done meanwhile did not wait for it, and what it
finds pending did. Values are computed by operations that do not commute. On the emulated device a closed gate also
occupies the compute engine; what must go on meanwhile are copies, which have their own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.device.machines import WAIT, Gate, Machine


def gated_stream(machine: Machine) -> tuple[Any, Gate]:
    """A new stream with work that ends when the gate is opened."""
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        return stream, machine.gate()


def copy_on(machine: Machine, stream: Any, dst: torch.Tensor, value: int) -> None:
    source = machine.host(value)
    with machine.runtime.stream(stream):
        machine.copy(dst, source)


def kernel_on(machine: Machine, stream: Any, work: Callable[[], object]) -> None:
    with machine.runtime.stream(stream):
        machine.kernel(work)


def waits(machine: Machine, stream: Any) -> bool:
    """Whether `stream` is still busy once a copy has been done that was submitted after everything on it."""
    control = machine.runtime.Stream()
    copy_on(machine, control, machine.cells(0), 1)
    control.synchronize()
    return not stream.query()


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` on another thread and wait for it; what it raises is raised here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()
    for error in errors:
        raise error


# -- streams --------------------------------------------------------------------------------------------------


def test_work_on_one_stream_is_done_in_the_order_it_was_submitted(machine: Machine) -> None:
    cell, ten = machine.cells(0), machine.host(10)
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        machine.slow()
        machine.kernel(lambda: cell.add_(1))
        machine.copy(cell, ten)
        machine.kernel(lambda: cell.mul_(3))
    stream.synchronize()
    assert machine.read(cell) == [30]


def test_work_on_different_streams_is_concurrent(machine: Machine) -> None:
    cell = machine.cells(0)
    held, _ = gated_stream(machine)
    free = machine.runtime.Stream()
    copy_on(machine, free, cell, 7)
    free.synchronize()
    assert not held.query()
    assert machine.read(cell) == [7]


def test_a_stream_is_busy_until_its_work_is_done(machine: Machine) -> None:
    stream = machine.runtime.Stream()
    assert stream.query()
    with machine.runtime.stream(stream):
        gate = machine.gate()
    assert not stream.query()
    gate.set()
    stream.synchronize()
    assert stream.query()


def test_synchronizing_a_stream_waits_for_its_work(machine: Machine) -> None:
    cell = machine.cells(0)
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        machine.slow()
        machine.kernel(lambda: cell.fill_(5))
    stream.synchronize()
    assert machine.read(cell) == [5]


def test_synchronizing_the_device_waits_for_every_stream(machine: Machine) -> None:
    cells = [machine.cells(0) for _ in range(3)]
    for cell in cells:
        with machine.runtime.stream(machine.runtime.Stream()):
            machine.slow()
            machine.kernel(partial(cell.fill_, 5))
    machine.runtime.synchronize()
    assert [machine.read(cell) for cell in cells] == [[5]] * 3


def test_a_stream_that_nobody_refers_to_any_more_does_its_work(machine: Machine) -> None:
    cell = machine.cells(0)
    stream, gate = gated_stream(machine)
    kernel_on(machine, stream, lambda: cell.fill_(5))
    del stream
    gc.collect()
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [5]


def test_wait_stream_orders_behind_what_the_other_stream_has_got(machine: Machine) -> None:
    cell = machine.cells(1)
    first, gate = gated_stream(machine)
    kernel_on(machine, first, lambda: cell.fill_(9))
    second = machine.runtime.Stream()
    second.wait_stream(first)
    copy_on(machine, second, cell, 4)
    assert waits(machine, second)
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [4]


def test_wait_stream_does_not_order_behind_what_the_other_stream_gets_later(machine: Machine) -> None:
    cell = machine.cells(0)
    first, second = machine.runtime.Stream(), machine.runtime.Stream()
    second.wait_stream(first)
    with machine.runtime.stream(first):
        machine.gate()
    copy_on(machine, second, cell, 7)
    second.synchronize()
    assert not first.query()


def test_work_submitted_before_a_wait_is_not_delayed_by_it(machine: Machine) -> None:
    cell, event = machine.cells(0), machine.runtime.Event()
    held, _ = gated_stream(machine)
    stream = machine.runtime.Stream()
    copy_on(machine, stream, cell, 7)
    event.record(stream)
    stream.wait_stream(held)
    event.synchronize()
    assert waits(machine, stream)
    assert machine.read(cell) == [7]


# -- events ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
def test_an_event_that_was_never_recorded_is_complete(machine: Machine, blocking: bool) -> None:
    event = machine.runtime.Event(blocking=blocking)
    assert event.query()
    event.synchronize()


def test_waiting_for_an_event_that_was_never_recorded_changes_nothing(machine: Machine) -> None:
    cell, event = machine.cells(0), machine.runtime.Event()
    stream = machine.runtime.Stream()
    stream.wait_event(event)
    event.record(gated_stream(machine)[0])
    copy_on(machine, stream, cell, 7)
    stream.synchronize()
    assert not event.query()
    assert machine.read(cell) == [7]


def test_an_event_is_complete_once_the_work_before_it_is_done(machine: Machine) -> None:
    event = machine.runtime.Event()
    stream, gate = gated_stream(machine)
    event.record(stream)
    assert not event.query()
    gate.set()
    stream.synchronize()
    assert event.query()


def test_an_event_does_not_wait_for_work_after_it(machine: Machine) -> None:
    event = machine.runtime.Event()
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        machine.slow()
        event.record()
        machine.gate()
    event.synchronize()
    assert event.query()
    assert not stream.query()


@pytest.mark.parametrize("blocking", [False, True])
def test_synchronizing_an_event_waits_for_the_work_before_it(machine: Machine, blocking: bool) -> None:
    cell, event = machine.cells(0), machine.runtime.Event(blocking=blocking)
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        machine.slow()
        machine.kernel(lambda: cell.fill_(5))
        event.record()
    event.synchronize()
    assert machine.read(cell) == [5]


def test_a_wait_orders_what_the_stream_gets_later_behind_the_event(machine: Machine) -> None:
    cell, event = machine.cells(1), machine.runtime.Event()
    first, gate = gated_stream(machine)
    kernel_on(machine, first, lambda: cell.fill_(9))
    event.record(first)
    second = machine.runtime.Stream()
    second.wait_event(event)
    copy_on(machine, second, cell, 4)
    assert waits(machine, second)
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [4]


def test_a_wait_goes_to_the_current_stream_where_none_is_named(machine: Machine) -> None:
    event = machine.runtime.Event()
    event.record(gated_stream(machine)[0])
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        event.wait()
    copy_on(machine, stream, machine.cells(0), 4)
    assert waits(machine, stream)


def test_order_is_transitive(machine: Machine) -> None:
    cell = machine.cells(1)
    first, gate = gated_stream(machine)
    second, third = machine.runtime.Stream(), machine.runtime.Stream()
    kernel_on(machine, first, lambda: cell.add_(1))
    second.wait_event(first.record_event())
    copy_on(machine, second, cell, 10)
    third.wait_event(second.record_event())
    kernel_on(machine, third, lambda: cell.mul_(2))
    assert waits(machine, third)
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [20]


def test_one_event_orders_any_number_of_streams(machine: Machine) -> None:
    cells = [machine.cells(1) for _ in range(3)]
    first, gate = gated_stream(machine)
    kernel_on(machine, first, lambda: [cell.fill_(9) for cell in cells])
    event = first.record_event()
    streams = [machine.runtime.Stream() for _ in cells]
    for stream, cell in zip(streams, cells, strict=True):
        stream.wait_event(event)
        copy_on(machine, stream, cell, 4)
    assert [waits(machine, stream) for stream in streams] == [True] * 3
    gate.set()
    machine.runtime.synchronize()
    assert [machine.read(cell) for cell in cells] == [[4]] * 3


def test_a_stream_may_wait_for_an_event_of_its_own(machine: Machine) -> None:
    cell = machine.cells(0)
    stream, gate = gated_stream(machine)
    stream.wait_event(stream.record_event())
    copy_on(machine, stream, cell, 7)
    gate.set()
    stream.synchronize()
    assert machine.read(cell) == [7]


def test_a_wait_captures_the_latest_record(machine: Machine) -> None:
    cell, event = machine.cells(1), machine.runtime.Event()
    event.record(machine.runtime.Stream())
    first, gate = gated_stream(machine)
    kernel_on(machine, first, lambda: cell.fill_(9))
    event.record(first)
    second = machine.runtime.Stream()
    second.wait_event(event)
    copy_on(machine, second, cell, 4)
    assert waits(machine, second)
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [4]


def test_a_later_record_does_not_move_a_wait_forward(machine: Machine) -> None:
    cell, event = machine.cells(1), machine.runtime.Event()
    first, gate = gated_stream(machine)
    kernel_on(machine, first, lambda: cell.fill_(9))
    event.record(first)
    second = machine.runtime.Stream()
    second.wait_event(event)
    event.record(machine.runtime.Stream())
    copy_on(machine, second, cell, 4)
    event.synchronize()
    assert waits(machine, second), "the record that it waits for is not complete"
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [4]


def test_a_later_record_does_not_move_a_wait_back(machine: Machine) -> None:
    cell, event = machine.cells(0), machine.runtime.Event()
    first, second = machine.runtime.Stream(), machine.runtime.Stream()
    with machine.runtime.stream(first):
        machine.slow()
    event.record(first)
    second.wait_event(event)
    with machine.runtime.stream(first):
        machine.gate()
    event.record(first)
    copy_on(machine, second, cell, 7)
    second.synchronize()
    assert not event.query()


def test_a_later_record_moves_query_and_synchronize_back(machine: Machine) -> None:
    cell, event = machine.cells(0), machine.runtime.Event()
    event.record(machine.runtime.Stream())
    event.synchronize()
    stream, gate = gated_stream(machine)
    with machine.runtime.stream(stream):
        machine.slow()
        machine.kernel(lambda: cell.fill_(5))
    event.record(stream)
    assert not event.query()
    gate.set()
    event.synchronize()
    assert machine.read(cell) == [5]


def test_a_later_record_moves_query_and_synchronize_forward(machine: Machine) -> None:
    event = machine.runtime.Event()
    held, _ = gated_stream(machine)
    event.record(held)
    event.record(machine.runtime.Stream())
    event.synchronize()
    assert event.query()
    assert not held.query()


def test_an_event_that_nobody_refers_to_any_more_is_still_waited_for(machine: Machine) -> None:
    cell, event = machine.cells(1), machine.runtime.Event()
    first, gate = gated_stream(machine)
    kernel_on(machine, first, lambda: cell.fill_(9))
    event.record(first)
    second = machine.runtime.Stream()
    second.wait_event(event)
    del event
    gc.collect()
    copy_on(machine, second, cell, 4)
    assert waits(machine, second)
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [4]


def test_record_event_records_the_event_it_is_given(machine: Machine) -> None:
    event = machine.runtime.Event()
    stream, _ = gated_stream(machine)
    assert stream.record_event(event) is event
    assert not event.query()


def test_record_event_makes_an_event_where_it_is_given_none(machine: Machine) -> None:
    stream, _ = gated_stream(machine)
    assert not stream.record_event().query()


def test_an_event_recorded_by_one_thread_orders_the_streams_of_another(machine: Machine) -> None:
    cell, event = machine.cells(1), machine.runtime.Event()
    first, gate = gated_stream(machine)
    second = machine.runtime.Stream()

    def record() -> None:
        kernel_on(machine, first, lambda: cell.fill_(9))
        event.record(first)

    def wait() -> None:
        second.wait_event(event)
        copy_on(machine, second, cell, 4)

    in_thread(record)
    in_thread(wait)
    assert waits(machine, second)
    gate.set()
    machine.runtime.synchronize()
    assert machine.read(cell) == [4]


# -- timing ---------------------------------------------------------------------------------------------------


def test_elapsed_time_is_the_milliseconds_between_two_records(machine: Machine) -> None:
    start, end = (machine.runtime.Event(enable_timing=True) for _ in range(2))
    stream = machine.runtime.Stream()
    with machine.runtime.stream(stream):
        start.record()
        machine.slow()
        end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 5
    assert start.elapsed_time(start) == 0
    assert end.elapsed_time(start) == pytest.approx(-start.elapsed_time(end))


@pytest.mark.parametrize("timed", [(False, False), (True, False), (False, True)])
def test_elapsed_time_needs_two_timed_events(machine: Machine, timed: tuple[bool, bool]) -> None:
    start, end = (machine.runtime.Event(enable_timing=enabled) for enabled in timed)
    stream = machine.runtime.Stream()
    start.record(stream)
    end.record(stream)
    stream.synchronize()
    with pytest.raises((RuntimeError, ValueError)):  # torch's choice depends on its version
        start.elapsed_time(end)


@pytest.mark.parametrize("recorded", [(False, False), (True, False), (False, True)])
def test_elapsed_time_needs_two_recorded_events(machine: Machine, recorded: tuple[bool, bool]) -> None:
    events = [machine.runtime.Event(enable_timing=True) for _ in range(2)]
    for event, wanted in zip(events, recorded, strict=True):
        if wanted:
            event.record()
            event.synchronize()
    with pytest.raises((RuntimeError, ValueError)):
        events[0].elapsed_time(events[1])


def test_elapsed_time_needs_two_completed_events(machine: Machine) -> None:
    start, end = (machine.runtime.Event(enable_timing=True) for _ in range(2))
    stream = machine.runtime.Stream()
    start.record(stream)
    stream.synchronize()
    with machine.runtime.stream(stream):
        machine.gate()
        end.record()
    with pytest.raises(RuntimeError):
        start.elapsed_time(end)


# -- current streams and devices ------------------------------------------------------------------------------


def test_a_thread_starts_with_its_default_stream(machine: Machine) -> None:
    runtime = machine.runtime
    assert runtime.current_stream() == runtime.default_stream()
    with runtime.stream(runtime.Stream()):
        assert runtime.current_stream() != runtime.default_stream()


def test_work_and_records_go_to_the_current_stream(machine: Machine) -> None:
    stream, event = machine.runtime.Stream(), machine.runtime.Event()
    with machine.runtime.stream(stream):
        machine.gate()
        event.record()
    assert not stream.query()
    assert not event.query()


def test_current_streams_nest(machine: Machine) -> None:
    runtime = machine.runtime
    outer, inner = runtime.Stream(), runtime.Stream()
    before = runtime.current_stream()
    with runtime.stream(outer):
        with runtime.stream(inner):
            assert runtime.current_stream() == inner
        assert runtime.current_stream() == outer
    assert runtime.current_stream() == before


def test_the_current_stream_comes_back_after_an_exception(machine: Machine) -> None:
    runtime = machine.runtime
    before = runtime.current_stream()
    with pytest.raises(KeyError):
        with runtime.stream(runtime.Stream()):
            raise KeyError
    assert runtime.current_stream() == before


def test_no_stream_as_current_stream_changes_nothing(machine: Machine) -> None:
    runtime = machine.runtime
    stream = runtime.Stream()
    with runtime.stream(stream):
        with runtime.stream(None):
            assert runtime.current_stream() == stream
        assert runtime.current_stream() == stream


def test_the_current_stream_is_a_threads_own(machine: Machine) -> None:
    runtime = machine.runtime
    mine, theirs = runtime.Stream(), runtime.Stream()
    seen: list[Any] = []

    def work() -> None:
        seen.append(runtime.current_stream() == runtime.default_stream())
        with runtime.stream(theirs):
            in_thread(lambda: seen.append(runtime.current_stream() == runtime.default_stream()))
            seen.append(runtime.current_stream() == theirs)

    with runtime.stream(mine):
        in_thread(work)
        assert runtime.current_stream() == mine
    assert seen == [True, True, True]


def test_streams_events_and_current_streams_can_be_taken_for_a_device_by_number(machine: Machine) -> None:
    runtime = machine.runtime
    index = runtime.current_device()
    runtime.set_device(index)
    stream = runtime.Stream(device=index)
    with runtime.stream(stream):
        assert runtime.current_stream(index) == stream
    assert runtime.current_device() == index


def test_streams_are_different_from_each_other(machine: Machine) -> None:
    runtime = machine.runtime
    first, second = runtime.Stream(), runtime.Stream()
    assert first != second
    assert len({first, second}) == 2

"""Random programs of launches, records and waits: no operation starts before what is ordered before it is done.

The oracle keeps, for every stream, the set of operations that are ordered before whatever the stream gets next; a
record copies that set and a wait adds the recorded one. Every operation checks its own set when it starts.
"""

from __future__ import annotations

import threading
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched.device import EmulatedDevice
from hicache_sched.device.emulated_core import ENGINES, EngineName

NUM_STREAMS = 3
NUM_EVENTS = 3

streams = st.integers(0, NUM_STREAMS - 1)
events = st.integers(0, NUM_EVENTS - 1)
engines = st.sampled_from(ENGINES)
launches = st.tuples(st.just("launch"), streams, engines)
actions = st.one_of(
    launches,
    launches,
    st.tuples(st.just("record"), events, streams),
    st.tuples(st.just("wait"), events, streams),
    st.tuples(st.just("wait_stream"), streams, streams),
    st.tuples(st.just("query"), events),
    st.tuples(st.sampled_from(("hold", "resume")), engines),
    st.tuples(st.just("step"), engines, st.integers(1, 3)),
)
thread_actions = st.one_of(
    st.tuples(st.sampled_from(("launch", "launch inline")), engines),
    st.tuples(st.sampled_from(("record", "wait", "record inline", "wait inline")), events),
    st.tuples(st.just("wait_stream"), streams),
)


class Operations:
    """What the engines have done; operations are numbers.

    Attributes:
        done: those that have ended.
        wrong: what should not have happened.
    """

    def __init__(self) -> None:
        self.done: list[int] = []
        self.wrong: list[str] = []
        self.clock = 0
        self.started: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self._running: dict[EngineName, int] = {}

    def run(self, operation: int, engine: EngineName, before: frozenset[int] = frozenset()) -> None:
        """The kernel of an operation that comes after those of `before`."""
        with self._lock:
            self.clock += 1
            self.started[operation] = self.clock
            if missing := before.difference(self.done):
                self.wrong.append(f"{operation} started before {sorted(missing)} were done")
            if engine in self._running:
                self.wrong.append(f"{engine} ran {operation} while it ran {self._running[engine]}")
            self._running[engine] = operation
        with self._lock:
            self.clock += 1
            self.ended[operation] = self.clock
            del self._running[engine]
            self.done.append(operation)

    def snapshot(self) -> set[int]:
        with self._lock:
            return set(self.done)


@dataclass(frozen=True)
class Launched:
    engine: EngineName
    before: frozenset[int]


class Program:
    """Makes each action on the device and in the oracle."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._streams = [device.Stream() for _ in range(NUM_STREAMS)]
        self._events = [device.Event() for _ in range(NUM_EVENTS)]
        self._ordered: list[frozenset[int]] = [frozenset()] * NUM_STREAMS
        self._recorded: list[frozenset[int]] = [frozenset()] * NUM_EVENTS
        self._launched: list[Launched] = []
        self._held: dict[EngineName, int | None] = {}
        self.operations = Operations()

    def run(self, program: Sequence[tuple[Any, ...]]) -> None:
        for action, *arguments in program:
            getattr(self, action)(*arguments)
        for engine in ENGINES:
            self.resume(engine)
        self._device.synchronize()
        assert [event.query() for event in self._events] == [True] * NUM_EVENTS
        assert [stream.query() for stream in self._streams] == [True] * NUM_STREAMS
        assert sorted(self.operations.done) == list(range(len(self._launched)))
        assert self.operations.wrong == []

    def launch(self, stream: int, engine: EngineName) -> None:
        operation, before = len(self._launched), self._ordered[stream]
        self._launched.append(Launched(engine, before))
        self._ordered[stream] = before | {operation}
        with self._device.stream(self._streams[stream]):
            self._device.launch(partial(self.operations.run, operation, engine, before), engine=engine)

    def record(self, event: int, stream: int) -> None:
        self._recorded[event] = self._ordered[stream]
        self._events[event].record(self._streams[stream])

    def wait(self, event: int, stream: int) -> None:
        self._ordered[stream] |= self._recorded[event]
        self._streams[stream].wait_event(self._events[event])

    def wait_stream(self, stream: int, other: int) -> None:
        self._ordered[stream] |= self._ordered[other]
        self._streams[stream].wait_stream(self._streams[other])

    def query(self, event: int) -> None:
        if self._events[event].query():
            assert self._recorded[event] <= self.operations.snapshot(), "a complete event has its work done"
        elif not self._held:
            self._events[event].synchronize()
            assert self._recorded[event] <= self.operations.snapshot()

    def hold(self, engine: EngineName) -> None:
        if engine not in self._held:
            self._device.hold(engine)
            self._held[engine] = None

    def resume(self, engine: EngineName) -> None:
        self._held.pop(engine, None)
        self._device.resume(engine)

    def step(self, engine: EngineName, most: int) -> None:
        """Step as far as there is something to do; the step would wait for what is not queued yet."""
        if engine not in self._held:
            return
        # What ran when the engine was held is not one of the stepped, but may not be done yet.
        may_run = len(self._able_to_run(engine)) - (self._held[engine] is None)
        if may_run < 1:
            return
        n = min(most, may_run)
        self._device.step(engine, n)
        done = sum(self._launched[operation].engine == engine for operation in self.operations.snapshot())
        if (expected := self._held[engine]) is not None:
            assert done == expected + n, "exactly n operations are let through, and done"
        self._held[engine] = done

    def _able_to_run(self, engine: EngineName) -> set[int]:
        """Operations of `engine` that could run if it were not held, and only it."""
        able = self.operations.snapshot()
        done = set(able)
        for operation, launched in enumerate(self._launched):  # in the order of submission, so before is known
            if (launched.engine == engine or launched.engine not in self._held) and launched.before <= able:
                able.add(operation)
        return {operation for operation in able - done if self._launched[operation].engine == engine}


@settings(deadline=None, max_examples=200)  # a busy machine is no failure
@given(st.lists(actions, max_size=40))
def test_no_operation_starts_before_what_is_ordered_before_it_is_done(program: list[tuple[Any, ...]]) -> None:
    with EmulatedDevice() as device:
        Program(device).run(program)


class Threads:
    """A program per thread, all at once; each thread submits to a stream of its own and to its default stream.

    In which order the calls of different threads came is read from the recorded calls.
    """

    def __init__(self, device: EmulatedDevice, programs: Sequence[Sequence[tuple[Any, ...]]], hold: bool) -> None:
        self._device = device
        self._programs = programs
        self._hold = hold
        self._streams = [device.Stream() for _ in range(NUM_STREAMS)]
        self._events = [device.Event() for _ in range(NUM_EVENTS)]
        self._calls: MutableSequence[Any] = device.record_calls()
        self._operations = Operations()
        self._start = threading.Barrier(len(programs))
        self._errors: list[BaseException] = []

    def run(self) -> None:
        if self._hold:
            for engine in ENGINES:
                self._device.hold(engine)
        threads = [threading.Thread(target=self._run_thread, args=(number,)) for number in range(len(self._programs))]
        for thread in threads:
            thread.start()
        if self._hold:
            for engine in reversed(ENGINES):
                self._device.resume(engine)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        self._device.synchronize()
        assert self._errors == []
        assert self._operations.wrong == []
        self._check_order()

    def _run_thread(self, number: int) -> None:
        try:
            self._start.wait(30)
            for index, (action, argument) in enumerate(self._programs[number]):
                self._act(number, 1000 * number + index, action, argument)
        except BaseException as exc:
            self._errors.append(exc)

    def _act(self, number: int, operation: int, action: str, argument: Any) -> None:
        inline = action.endswith("inline")
        stream = self._device.default_stream() if inline else self._streams[number]
        with self._device.stream(stream):
            match action.removesuffix(" inline"):
                case "launch":
                    self._device.launch(partial(self._operations.run, operation, argument), engine=argument)
                    self._calls.append(("launched", operation, stream))
                case "record":
                    self._events[argument].record()
                case "wait":
                    self._events[argument].wait()
                case "wait_stream":
                    stream.wait_stream(self._streams[argument])

    def _check_order(self) -> None:
        ordered: dict[Any, frozenset[int]] = {}
        recorded: dict[Any, frozenset[int]] = {}
        nothing: frozenset[int] = frozenset()
        launched = set()
        for name, what, stream, *_ in self._calls:
            before = ordered.get(stream, nothing)
            match name:
                case "launched":
                    late = {other for other in before if self._operations.ended[other] > self._operations.started[what]}
                    assert not late, f"{what} started before {late} were done"
                    ordered[stream] = before | {what}
                    launched.add(what)
                case "record":
                    recorded[what] = before
                case "wait":
                    ordered[stream] = before | recorded.get(what, nothing)
                case "wait_stream":
                    ordered[stream] = before | ordered.get(what, nothing)
        assert sorted(self._operations.done) == sorted(launched)


@settings(deadline=None, max_examples=100)  # a busy machine is no failure
@given(
    st.lists(st.lists(thread_actions, max_size=15), min_size=NUM_STREAMS, max_size=NUM_STREAMS),
    st.booleans(),
)
def test_the_same_holds_for_programs_of_several_threads(programs: list[list[tuple[Any, ...]]], hold: bool) -> None:
    with EmulatedDevice() as device:
        Threads(device, programs, hold).run()

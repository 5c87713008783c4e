"""A thread of ours that is killed, and a loop that is stopped, are failures like any other: the work goes on.

A thread is killed as a debugger or a watchdog does it, by an exception that the interpreter raises in it at its next
instruction, or by one raised at a chosen step.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from hicache_sched import AckStatus, LoadAck, LoadFailedError, LoadHandle, TransferScheduler, native
from hicache_sched.burst import ENDED, Burst
from hicache_sched.delivery import Delivery
from hicache_sched.device import EmulatedDevice
from hicache_sched.event_set import EventSetPool
from hicache_sched.failure import FailureDesk
from hicache_sched.job import Jobs
from hicache_sched.landing import BurstEnd
from hicache_sched.listeners import BurstClock
from hicache_sched.native_plane import NativePlane
from hicache_sched.protocol import TransferProtocol
from hicache_sched.submission import Submission
from hicache_sched.waiting import LoopWaiter, NativeWaiter, ThreadWaiter, wake_all
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.crowd import WAIT, Loops, errors_of, eventually, in_thread, parked_crowd
from tests.scheduler.hearing import Hearing

NUM_LAYERS = 4
WORKER, OBSERVER, LOOP = "hicache-sched-worker", "hicache-sched-observer", "hicache-sched"
SHORT = 0.01
"""A stall interval, in seconds, for tests of what is logged again and again."""

each_thread = pytest.mark.parametrize("name", [WORKER, OBSERVER, LOOP])


def thread_named(name: str) -> threading.Thread:
    """The newest thread of that name: one that an earlier test left behind must not fail this one."""
    return [thread for thread in threading.enumerate() if thread.name == name][-1]


def kill(name: str, error: type[BaseException] = SystemExit) -> None:
    """Raise `error` in that thread as soon as it runs Python code."""
    ident = thread_named(name).ident
    assert ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error)) == 1


@dataclass
class Setup:
    """A scheduler on one kind of loop, and what its `on_ack` and a listener were told.

    Attributes:
        on_ack: what `on_ack` does besides.
    """

    device: EmulatedDevice
    backend: LaunchingBackend
    scheduler: TransferScheduler
    hearing: Hearing | None
    acks: list[Any] = field(default_factory=list)
    on_ack: Callable[[Any], object] = lambda ack: None

    def assert_served(self, *statuses: AckStatus) -> None:
        """The next burst is served, and there has been one ack of each, in order, by every way."""
        assert hand_out(self.scheduler, 99).result(WAIT).status is AckStatus.OK
        for name in (WORKER, OBSERVER, LOOP):
            assert thread_named(name).is_alive()
        self.scheduler.close(WAIT)
        acks = self.scheduler.pop_acks()
        assert [ack.burst_id for ack in acks] == list(range(1, len(statuses) + 2))
        assert [ack.status for ack in acks] == [*statuses, AckStatus.OK]
        if self.hearing is not None:
            assert self.acks == self.hearing.acks == acks

    def on_the_loop(self, fn: Callable[[], object]) -> None:
        """Have the loop thread call `fn`."""
        threads = self.scheduler._threads
        assert threads is not None
        threads.loop.call(fn)


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    """No tracing while threads are killed: while one thread has an exception to come, CPython 3.11 does not get
    ahead in any other that is traced, as all are when coverage is measured."""
    main, started = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    yield
    threading.settrace(started)
    sys.settrace(main)


class Kind(NamedTuple):
    """A kind of scheduler."""

    event_loop: str
    plane: str
    is_heard: bool = True
    """Whether somebody is told of acks: else there is mostly nothing for the loop to do."""


needs_native = pytest.mark.skipif(native.module is None, reason="needs the native part")
KINDS = [
    pytest.param(Kind("uvloop", "python"), id="uvloop-python"),
    pytest.param(Kind("asyncio", "python"), id="asyncio-python"),
    pytest.param(Kind("uvloop", "native"), id="uvloop-native", marks=needs_native),
    pytest.param(Kind("uvloop", "native", is_heard=False), id="uvloop-native-unheard", marks=needs_native),
    pytest.param(Kind("asyncio", "python", is_heard=False), id="asyncio-python-unheard"),
]
"""Loops and data planes do not know of each other, so that not every pair is tried."""
heard = pytest.mark.parametrize("kind", KINDS[:3], indirect=True)
asyncio_only = pytest.mark.parametrize("kind", KINDS[1:2], indirect=True)
native_only = pytest.mark.parametrize("kind", KINDS[2:4], indirect=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def event_loop(kind: Kind) -> str:
    return kind.event_loop


@pytest.fixture
def plane(kind: Kind) -> str:
    return kind.plane


@pytest.fixture
def make_setup(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    event_loop: str,
    kind: Kind,
    no_debug_logs: None,
) -> Callable[..., Setup]:
    setup: Setup

    def acknowledge(ack: LoadAck) -> None:
        setup.acks.append(ack)
        setup.on_ack(ack)

    def make(**config: Any) -> Setup:
        nonlocal setup
        backend = LaunchingBackend(device)
        on_ack = acknowledge if kind.is_heard else None
        scheduler = make_scheduler(backend, on_ack=on_ack, event_loop=event_loop, **config)
        setup = Setup(device, backend, scheduler, Hearing() if kind.is_heard else None)
        if setup.hearing is not None:
            scheduler.listen(setup.hearing)
        return setup

    return make


@pytest.fixture
def setup(make_setup: Callable[..., Setup]) -> Setup:
    return make_setup(stall_log_interval=float("inf"))


@pytest.fixture
def loops() -> Iterator[Loops]:
    both = Loops()
    yield both
    both.close()


def deaths(logs: list[Any]) -> list[str]:
    """Names of the threads of which a death was logged."""
    return [entry["thread"] for entry in logs if entry["event"] == "thread_failed"]


# -- killed where it is -----------------------------------------------------------------------------------------------


@each_thread
def test_a_parked_thread_that_is_killed_serves_the_next_burst(setup: Setup, name: str, logs: list[Any]) -> None:
    kill(name)
    setup.on_the_loop(lambda: None)  # which has nothing to do else, and dies when it has
    setup.assert_served()
    assert deaths(logs) == [name]
    assert isinstance(setup.scheduler.last_error, SystemExit)


def test_a_worker_killed_in_prepare_fails_that_burst_only(setup: Setup, loops: Loops) -> None:
    setup.backend.gate.clear()
    killed, queued = hand_out(setup.scheduler, 1), hand_out(setup.scheduler, 2)
    crowd = parked_crowd(killed, setup.device, loops)
    kill(WORKER)
    setup.backend.gate.set()
    for error in errors_of(crowd.ends):
        assert isinstance(error, LoadFailedError)
        assert isinstance(error.cause, SystemExit)
    assert errors_of([waiter for waiters in crowd.waits.values() for waiter in waiters]) == [None] * 2 * NUM_LAYERS
    assert queued.result(WAIT).status is AckStatus.OK
    setup.assert_served(AckStatus.FAILED, AckStatus.OK)


def test_a_worker_killed_in_a_layer_lands_the_layers_before_it(setup: Setup) -> None:
    entered = setup.backend.hold_layer(2)
    setup.device.hold("h2d")
    handle = hand_out(setup.scheduler, 1)
    assert entered.wait(WAIT)
    kill(WORKER)
    setup.backend.release()
    handle.wait_layer(3, WAIT)
    assert handle.stale
    setup.device.step("h2d", 1)
    assert not handle.done()
    setup.device.resume("h2d")
    with pytest.raises(LoadFailedError) as failure:
        handle.result(WAIT)
    assert failure.value.layer == 2
    assert [handle.layer_landed(layer) for layer in range(NUM_LAYERS)] == [True, True, False, False]
    setup.assert_served(AckStatus.FAILED)


def test_an_observer_killed_while_it_waits_for_a_layer_goes_on_waiting(setup: Setup, loops: Loops) -> None:
    setup.device.hold("h2d")
    setup.backend.gate.clear()
    handle = hand_out(setup.scheduler, 1)
    crowd = parked_crowd(handle, setup.device, loops)
    setup.backend.gate.set()
    setup.device.step("h2d", 1)
    handle.wait_layer(0, WAIT)
    kill(OBSERVER)
    setup.device.resume("h2d")
    assert errors_of(crowd.everybody) == [None] * len(crowd.everybody)
    setup.assert_served(AckStatus.OK)


def test_an_observer_killed_while_the_burst_is_prepared_goes_on_waiting(setup: Setup, loops: Loops) -> None:
    setup.backend.gate.clear()
    handle = hand_out(setup.scheduler, 1)
    crowd = parked_crowd(handle, setup.device, loops)
    kill(OBSERVER)
    setup.backend.gate.set()
    assert errors_of(crowd.everybody) == [None] * len(crowd.everybody)
    setup.assert_served(AckStatus.OK)


@pytest.mark.parametrize("step", ["TaskStep", "task_wakeup"])
@asyncio_only
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_lost_a_step_of_a_job_delivers_its_burst(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    run = asyncio.Handle._run
    lost = threading.Event()

    def lose(handle: asyncio.Handle) -> None:
        """Killed between taking a step from its queue and making it, asyncio's loop has lost the step."""
        if threading.current_thread().name == LOOP and step in repr(handle) and not lost.is_set():
            lost.set()
            raise SystemExit
        run(handle)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", lose)
        setup.device.hold("h2d")
        done = threading.Event()
        handle = hand_out(setup.scheduler, 1)
        handle.add_done_callback(lambda handle: done.set())
        eventually(lambda: ENDED in handle._burst._waiters)  # its job waits for the end
        setup.device.resume("h2d")
        assert done.wait(WAIT)
        assert lost.is_set()
    setup.assert_served(AckStatus.OK)
    # The job that lost its step ends here, and not in a later test.
    assert setup.scheduler.last_error is not None
    setup.scheduler.last_error.__traceback__ = None
    handle._burst._waiters.clear()
    gc.collect()


def test_an_observer_killed_in_finish_fails_the_burst(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def finish(prepared: Any) -> None:
        inside.set()
        go_on.wait(WAIT)

    with monkeypatch.context() as patch:
        patch.setattr(setup.backend, "finish", finish)
        handle = hand_out(setup.scheduler, 1)
        assert inside.wait(WAIT)
        kill(OBSERVER)
        go_on.set()
        with pytest.raises(LoadFailedError):
            handle.result(WAIT)
    setup.assert_served(AckStatus.FAILED)


def test_a_loop_killed_while_a_burst_is_under_way_delivers_it(setup: Setup, logs: list[Any]) -> None:
    setup.device.hold("h2d")
    handles = [hand_out(setup.scheduler, node) for node in (1, 2)]
    done = threading.Event()
    handles[1].add_done_callback(lambda handle: done.set())
    kill(LOOP)
    setup.device.resume("h2d")
    assert done.wait(WAIT), "although no stall timer looks again"
    setup.assert_served(AckStatus.OK, AckStatus.OK)
    assert deaths(logs) == [LOOP]


@heard
def test_a_loop_killed_in_on_ack_calls_it_once(setup: Setup) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def on_ack(ack: Any) -> None:
        inside.set()
        go_on.wait(WAIT)

    setup.on_ack = on_ack
    handle = hand_out(setup.scheduler, 1)
    assert inside.wait(WAIT)
    assert handle.result(WAIT).status is AckStatus.OK, "the loop is not in the way of the landing"
    kill(LOOP)
    go_on.set()
    setup.assert_served(AckStatus.OK)


@each_thread
def test_a_thread_killed_again_and_again_serves_every_burst(setup: Setup, name: str) -> None:
    setup.device.hold("h2d")
    for number in range(5):
        handle = hand_out(setup.scheduler, number)
        eventually(lambda handle=handle: handle.layer_enqueued(NUM_LAYERS - 1))  # type: ignore[misc]
        kill(name)
        setup.device.step("h2d", NUM_LAYERS)
        assert handle.result(WAIT).status is AckStatus.OK
        eventually(lambda number=number: setup.hearing is None or len(setup.acks) == number + 1)  # type: ignore[misc]
    setup.device.resume("h2d")
    setup.assert_served(*[AckStatus.OK] * 5)


# -- a loop that is stopped -------------------------------------------------------------------------------------------


@heard
def test_an_on_ack_that_stops_the_loop_is_called_once_per_burst(setup: Setup, logs: list[Any]) -> None:
    setup.on_ack = lambda ack: asyncio.get_running_loop().stop()
    handles = [hand_out(setup.scheduler, node) for node in (1, 2, 3)]
    assert [handle.result(WAIT).status for handle in handles] == [AckStatus.OK] * 3
    setup.assert_served(*[AckStatus.OK] * 3)
    assert LOOP in deaths(logs)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_through_the_loop_does_not_end_it(
    setup: Setup, error: type[BaseException], logs: list[Any]
) -> None:
    def raise_error() -> None:
        raise error

    setup.device.hold("h2d")
    handle = hand_out(setup.scheduler, 1)
    setup.on_the_loop(raise_error)
    eventually(lambda: deaths(logs) == [LOOP])
    assert isinstance(setup.scheduler.last_error, error)
    setup.device.resume("h2d")
    assert handle.result(WAIT).status is AckStatus.OK
    setup.assert_served(AckStatus.OK)


def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def test_a_job_that_somebody_cancels_is_taken_up_again(setup: Setup) -> None:
    setup.device.hold("h2d")
    done = threading.Event()
    hand_out(setup.scheduler, 1).add_done_callback(lambda handle: done.set())
    cancelled = threading.Event()

    def cancel() -> None:
        cancel_all_tasks()
        asyncio.get_running_loop().call_later(SHORT, cancelled.set)  # some turns of the loop later

    setup.on_the_loop(cancel)
    assert cancelled.wait(WAIT)
    setup.device.resume("h2d")
    assert done.wait(WAIT)
    setup.assert_served(AckStatus.OK)


def kill_it(setup: Setup) -> None:
    kill(LOOP)
    setup.on_the_loop(lambda: None)


def stop_it(setup: Setup) -> None:
    setup.on_the_loop(lambda: asyncio.get_running_loop().stop())


def cancel_its_tasks(setup: Setup) -> None:
    setup.on_the_loop(cancel_all_tasks)


@pytest.mark.parametrize("interrupt", [kill_it, stop_it, cancel_its_tasks])
def test_stalls_are_logged_after_the_loop_was_interrupted(
    make_setup: Callable[..., Setup], interrupt: Callable[[Setup], None], logs: list[Any]
) -> None:
    setup = make_setup(stall_log_interval=SHORT)

    def stalls() -> int:
        return [entry["event"] for entry in logs].count("layer_stalled")

    setup.device.hold("h2d")
    handle = hand_out(setup.scheduler, 1)
    eventually(lambda: stalls() >= 1)
    interrupt(setup)
    interrupted = threading.Event()
    setup.on_the_loop(interrupted.set)
    assert interrupted.wait(WAIT)
    before = stalls()
    eventually(lambda: stalls() >= before + 2)
    setup.device.resume("h2d")
    assert handle.result(WAIT).status is AckStatus.OK
    eventually(lambda: "layer_recovered" in [entry["event"] for entry in logs])
    setup.assert_served(AckStatus.OK)


@pytest.mark.parametrize("interrupt", [kill_it, stop_it, cancel_its_tasks])
def test_a_waiting_hand_out_does_not_mind_the_loop(setup: Setup, interrupt: Callable[[Setup], None]) -> None:
    setup.device.hold("h2d")
    for node in (1, 2, 3):
        hand_out(setup.scheduler, node)
    setup.scheduler.load(load_op(4))
    waiting = in_thread(lambda: setup.scheduler.start_loading_sync(WAIT))
    eventually(lambda: setup.scheduler._protocol._waiters != set())
    interrupt(setup)
    setup.device.resume("h2d")
    handle = waiting.result(WAIT)
    assert handle.result(WAIT).status is AckStatus.OK
    setup.assert_served(*[AckStatus.OK] * 4)


@pytest.mark.parametrize("killed_at", range(3))
def test_a_thread_killed_between_two_wake_ups_gives_the_others(monkeypatch: pytest.MonkeyPatch, killed_at: int) -> None:
    waiters = [ThreadWaiter() for _ in range(3)]
    raised = Step(threading.current_thread().name, ThreadWaiter, "wake").interrupt(monkeypatch, "before", killed_at + 1)
    with pytest.raises(SystemExit):
        wake_all(waiters)
    assert raised.is_set()
    assert [waiter._gate.acquire(blocking=False) for waiter in waiters] == [True] * 3


# -- at a step --------------------------------------------------------------------------------------------------------


Where = Literal["before", "after"]


@dataclass(frozen=True)
class Step:
    """A step that a thread is interrupted at.

    Attributes:
        once: whether it comes to that once only.
        plane: the only data plane that makes it; None for each.
        of_job: a job makes it, which a burst that ends soon has only where somebody listens.
    """

    thread: str
    owner: type
    method: str
    once: bool = False
    plane: str | None = None
    of_job: bool = False

    def __str__(self) -> str:
        return f"{self.thread.removeprefix('hicache-sched') or '-loop'} {self.owner.__name__}.{self.method}"[1:]

    def interrupt(self, patch: pytest.MonkeyPatch, where: Where, nth: int) -> threading.Event:
        """Raise SystemExit there, once, at its `nth` time; gives the event that is set when it is raised."""
        original = getattr(self.owner, self.method)
        raised = threading.Event()
        countdown = [nth]

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            here = threading.current_thread().name == self.thread and not raised.is_set()
            if here:
                countdown[0] -= 1
            die = here and countdown[0] == 0
            if die and where == "before":
                raised.set()
                raise SystemExit(str(self))
            result = original(*args, **kwargs)
            if die:
                raised.set()
                raise SystemExit(str(self))
            return result

        patch.setattr(self.owner, self.method, interrupted)
        return raised


STEPS = [
    Step(WORKER, Submission, "submit"),
    Step(WORKER, Submission, "_begin"),
    Step(WORKER, Submission, "_fail", once=True),
    Step(WORKER, EventSetPool, "take", plane="python"),
    Step(WORKER, Burst, "begin"),
    Step(WORKER, Burst, "enter_enqueuing"),
    Step(WORKER, Burst, "advance_enqueued"),
    Step(WORKER, Burst, "fail", once=True),
    Step(WORKER, Burst, "mark_submitted"),
    Step(WORKER, FailureDesk, "burst_failed", once=True),
    Step(WORKER, ThreadWaiter, "wake", plane="python"),
    Step(WORKER, NativeWaiter, "wake", once=True, plane="native"),
    Step(WORKER, LoopWaiter, "wake"),
    Step(OBSERVER, Burst, "look_submitted", plane="python"),
    Step(OBSERVER, Burst, "advance_landed", plane="python"),
    Step(OBSERVER, Burst, "end"),
    Step(OBSERVER, BurstEnd, "end"),
    Step(OBSERVER, TransferProtocol, "oldest_in_flight"),
    Step(OBSERVER, TransferProtocol, "publish"),
    Step(OBSERVER, Delivery, "has_news"),
    Step(OBSERVER, ThreadWaiter, "wake"),
    Step(OBSERVER, LoopWaiter, "wake"),
    Step(LOOP, Jobs, "begin"),
    Step(LOOP, Burst, "register_for", of_job=True),
    Step(LOOP, Burst, "forget", of_job=True),
    Step(LOOP, Delivery, "run"),
    Step(LOOP, Delivery, "_deliver"),
    Step(LOOP, BurstClock, "begin_job", of_job=True),
    Step(LOOP, TransferProtocol, "next_undelivered"),
    Step(LOOP, TransferProtocol, "delivered"),
    Step(LOOP, LoopWaiter, "_resolve", of_job=True),
]
LOOP_STEPS = [
    Step(LOOP, NativePlane, "hear_doorbell"),
    Step(LOOP, Jobs, "wake_reached"),
    Step(LOOP, Burst, "wake_reached"),
    Step(LOOP, LoopWaiter, "wake"),
]


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    ("step", "nth"),
    [pytest.param(step, nth, id=f"{step} {nth}") for step in STEPS for nth in ((1,) if step.once else (1, 2))],
)
def test_a_thread_interrupted_at_a_step_loses_nothing(
    setup: Setup, loops: Loops, monkeypatch: pytest.MonkeyPatch, kind: Kind, step: Step, where: Where, nth: int
) -> None:
    if step.plane not in (None, kind.plane):
        pytest.skip(f"a step of the {step.plane} plane")
    if step.of_job and not kind.is_heard:
        pytest.skip("a step that is not always made")
    backend, scheduler = setup.backend, setup.scheduler
    with monkeypatch.context() as patch:
        backend.gate.clear()
        handles: list[LoadHandle] = [hand_out(scheduler, 1)]
        assert backend.preparing.wait(WAIT)
        raised = step.interrupt(patch, where, nth)
        backend.failures[1] = RuntimeError("layer 1 of the first burst")
        crowds = [parked_crowd(handles[0], setup.device, loops)]
        handles += [hand_out(scheduler, node) for node in (2, 3)]
        crowds += [parked_crowd(handle, setup.device, loops) for handle in handles[1:]]
        done: list[threading.Event] = []
        for handle in handles if kind.is_heard or step.thread == LOOP else ():  # else there is nothing to deliver
            done.append(event := threading.Event())
            handle.add_done_callback(lambda handle, event=event: event.set())  # type: ignore[misc]
        backend.gate.set()
        for crowd in crowds:
            errors_of(crowd.everybody)  # each is released
        assert all(event.wait(WAIT) for event in done)
        assert raised.wait(WAIT)
    statuses = [AckStatus.FAILED if handle.stale else AckStatus.OK for handle in handles]
    assert statuses.count(AckStatus.FAILED) <= (2 if step.thread == WORKER else 1)
    for handle, status in zip(handles, statuses, strict=True):
        copied = [layer for node, layer in backend.copied() if node == handle.node_ids[0]]
        assert status is AckStatus.FAILED or copied == list(range(NUM_LAYERS)), "ok means that all of it was copied"
    setup.assert_served(*statuses)


@native_only
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("step", LOOP_STEPS, ids=str)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_loop_interrupted_while_it_wakes_others_wakes_them_all_the_same(
    setup: Setup, loops: Loops, monkeypatch: pytest.MonkeyPatch, step: Step, where: Where, nth: int
) -> None:
    setup.device.hold("h2d")
    with monkeypatch.context() as patch:
        setup.backend.gate.clear()
        handle = hand_out(setup.scheduler, 1)
        crowd = parked_crowd(handle, setup.device, loops)
        setup.backend.gate.set()
        assert (
            errors_of([waiter for waiters in crowd.enqueued.values() for waiter in waiters]) == [None] * 2 * NUM_LAYERS
        )
        raised = step.interrupt(patch, where, nth)
        for layer in range(NUM_LAYERS):
            setup.device.step("h2d")
            assert errors_of(crowd.layers[layer]) == [None, None]
        assert raised.is_set()
    setup.device.resume("h2d")
    assert errors_of(crowd.everybody) == [None] * len(crowd.everybody)
    setup.assert_served(AckStatus.OK)

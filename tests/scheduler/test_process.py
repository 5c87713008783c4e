"""A process that ends without a close, is interrupted, or forks.

Each test is a scenario that runs as the main thread of a process of its own. Importing torch takes seconds, so one
nursery process imports everything, has no thread, and forks for each scenario; the child leaves through the
interpreter's own exit, as a program does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_sched import (
    LoadAck,
    LoadHandle,
    SchedulerClosedError,
    SchedulerConfig,
    TransferScheduler,
)
from hicache_sched.device import EmulatedDevice, at_exit
from hicache_sched.progress import Progress
from tests.builders import LaunchingBackend, hand_out, load_op, running_functions
from tests.scheduler.conftest import PLANES
from tests.scheduler.hearing import Hearing

PLANE = "auto"
"""The data plane of a scenario's schedulers; set in its process."""

SECONDS_TO_END = 30
"""After which a scenario's process is killed."""


# -- the nursery --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a scenario's process ended; its exit code is None where it had to be killed."""

    exit_code: int | None
    stdout: str
    stderr: str


class Nursery:
    """Runs scenarios, functions of this module by their name."""

    def __init__(self, folder: Path, plane: str) -> None:
        self._folder = folder
        self._plane = plane
        self._process = subprocess.Popen(
            # Python 3.12 and later warn of forks with threads, which is what some scenarios are about.
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", f"import {__name__} as m; m.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def run(self, scenario: Callable[..., None], *args: str) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(self._folder), self._plane, scenario.__name__, args]) + "\n")
        self._process.stdin.flush()
        exit_code = json.loads(self._process.stdout.readline())
        return Ended(exit_code, (self._folder / "stdout").read_text(), (self._folder / "stderr").read_text())

    def close(self) -> None:
        self._process.communicate(timeout=SECONDS_TO_END)


def serve() -> None:
    """Body of the nursery process; in a forked child it returns into the end of the program."""
    gc.freeze()  # a child that ends need not look through everything that was imported
    while line := sys.stdin.readline():
        folder, plane, scenario, args = json.loads(line)
        child = os.fork()
        if child == 0:
            for stream, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            globals()["PLANE"] = plane
            globals()[scenario](*args)
            return
        print(json.dumps(exit_code_of(child)), flush=True)


def exit_code_of(child: int, seconds: float = SECONDS_TO_END) -> int | None:
    """How a child process ends; None after it had to be killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(1e-3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.fixture(scope="module", params=PLANES)
def nursery(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"), request.param)
    yield nursery
    nursery.close()


# -- parts of scenarios -------------------------------------------------------------------------------------------


def config(mode: str = "async") -> SchedulerConfig:
    return SchedulerConfig(mode=mode, plane=PLANE)  # type: ignore[arg-type]


class BusyBackend(LaunchingBackend):
    """Keeps the device or the data plane busy for longer than anybody waits for them.

    It does not hold the scheduler, so nobody does once the program has left the function that made it.
    """

    def __init__(self, device: EmulatedDevice, busy: str) -> None:
        super().__init__(device)
        self._busy = busy
        self._keep_on = True

    def bind(self, scheduler: Any) -> None:
        pass

    def prepare(self, ops: Any) -> Any:
        prepared = super().prepare(ops)
        if self._busy == "torch work in prepare":
            work_for(seconds=0.5)
        return prepared

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        if self._busy == "paced copies":
            self._device.launch(lambda: None, engine="h2d", duration=1000.0)
        elif self._busy == "torch work on the engines":
            for engine in ("compute", "h2d", "d2h"):
                with self._device.stream(self._device.Stream()):
                    for _ in range(20):
                        self._device.launch(lambda: work_for(seconds=0.01), engine=engine)
        else:
            super().enqueue_layer(prepared, layer)


def work_for(seconds: float) -> None:
    """Small torch operations, each of which lets other threads run."""
    end = time.monotonic() + seconds
    matrix = torch.rand(64, 64)
    while time.monotonic() < end:
        matrix = torch.softmax(matrix @ matrix, dim=0)


def leaves_busy(busy: str, ending: str) -> None:
    """Scenario: end the program as `ending` says while the scheduler is busy.

    Its exit is held up only by what cannot be stopped: code of the backend's that blocks.
    """
    at_exit.JOIN_SECONDS = 0.3 if busy == "blocked in prepare" else 2 * SECONDS_TO_END
    device = EmulatedDevice()
    backend = BusyBackend(device, busy)
    scheduler = TransferScheduler(backend, runtime=device, config=config())
    scheduler.start()
    if busy == "held copies":
        device.hold("h2d")
    elif busy == "blocked in prepare":
        backend.gate.clear()
    handle = hand_out(scheduler, 1)
    hand_out(scheduler, 2)
    if busy in ("blocked in prepare", "torch work in prepare"):
        backend.preparing.wait(SECONDS_TO_END)
    else:
        asyncio.run(handle.enqueued(0))
    if ending == "exits":
        sys.exit(0)
    elif ending == "raises":
        raise RuntimeError("the engine failed")


class HeldUntilTheEnd(LaunchingBackend):
    """Lets the data plane go on when the process has begun to end, and tells what it submits then."""

    held: LoadHandle | None = None

    @property
    def is_done(self) -> bool:
        return self.held is not None and self.held._burst.progress.submitted

    def stop_at_exit(self) -> None:
        self.gate.set()
        until(lambda: self.is_done)

    def join_at_exit(self, deadline: float) -> None:
        print(*(event for event in self.events if event[:2] == ("enqueue", 2)), file=sys.stderr, end="")


def leaves_while_loop_and_data_plane_are_inside_calls() -> None:
    """Scenario: what both come back to finds that the process ends; the loop comes back last."""
    device = EmulatedDevice()
    backend = HeldUntilTheEnd(device)
    at_exit.stop_at_exit(backend)  # after the device and before the scheduler, so stopped between them
    entered = threading.Event()

    def on_ack(ack: LoadAck) -> None:
        entered.set()
        until(lambda: backend.is_done)

    scheduler = TransferScheduler(backend, runtime=device, config=config(), on_ack=on_ack)
    scheduler.start()
    hand_out(scheduler, 1)
    entered.wait(SECONDS_TO_END)
    backend.gate.clear()
    backend.held = hand_out(scheduler, 2)
    until(lambda: ("prepare", [2]) in backend.events)


def until(condition: Callable[[], object]) -> None:
    """Return once another thread has made `condition` true."""
    deadline = time.monotonic() + SECONDS_TO_END
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def interrupt_main_thread_when_it_blocks() -> None:
    """Interrupt the main thread once, from another one, when it sleeps in a wait.

    CPython does not look whether a signal has come between its last look and its sleep on a lock, so the signal is
    sent until the interpreter has seen it.
    """
    ident = threading.get_ident()
    interrupted = threading.Event()

    def interrupt(signum: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def send() -> None:
        until(lambda: running_functions(ident)[0] in ("sleep", "block"))
        while not interrupted.is_set():
            signal.pthread_kill(ident, signal.SIGINT)
            interrupted.wait(0.01)

    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=send, daemon=True).start()


def interrupted_in(wait: str, mode: str) -> None:
    """Scenario: Ctrl-C in a blocked wait, after which everything goes on and nothing is lost."""
    device = EmulatedDevice()
    backend = LaunchingBackend(device)
    scheduler = TransferScheduler(backend, runtime=device, config=config(mode))
    scheduler.start()
    if wait == "enqueued":
        backend.gate.clear()
    else:
        device.hold("h2d")
    handles = [hand_out(scheduler, node_id) for node_id in (1, 2, 3)]
    scheduler.load(load_op(4))
    waits: dict[str, Callable[[], object]] = {
        "hand-out": scheduler.start_loading_sync,
        "result": handles[0].result,
        "landed": lambda: handles[0].wait_layer(2),
        "enqueued": lambda: wait_on_a_stream(device, handles[0]),
        "close": scheduler.close,
        "reset": scheduler.reset,
    }
    interrupt_main_thread_when_it_blocks()
    with pytest.raises(KeyboardInterrupt):
        waits[wait]()
    assert scheduler.stats().queued_ops == 1
    assert not handles[0].done()
    backend.release()
    device.resume("h2d")
    if wait == "close":
        scheduler.close(timeout=SECONDS_TO_END)
    handle = scheduler.start_loading_sync(timeout=SECONDS_TO_END)
    assert handle is not None
    assert (handle.slot, handle.generation, handle.node_ids) == (0, 2, (4,))
    handles.append(handle)
    for each in handles:
        each.wait_layer(3, timeout=SECONDS_TO_END)
    acks = [each.result(timeout=SECONDS_TO_END) for each in handles]
    assert [ack.burst_id for ack in acks] == [1, 2, 3, 4]
    assert scheduler.pop_acks() == acks
    assert scheduler._protocol._waiters == set()
    scheduler.reset(timeout=SECONDS_TO_END)
    assert hand_out(scheduler, 5).result(timeout=SECONDS_TO_END).slot == 0
    scheduler.close(timeout=SECONDS_TO_END)


def wait_on_a_stream(device: EmulatedDevice, handle: LoadHandle) -> None:
    with device.stream(device.Stream()):
        handle.wait_layer(2)


def forks(mode: str, what_the_child_does: str) -> None:
    """Scenario: fork while bursts are held and other threads are inside the scheduler; child and parent go on."""
    device = EmulatedDevice()
    scheduler = TransferScheduler(
        LaunchingBackend(device),
        runtime=device,
        config=config(mode),
    )
    scheduler.start()
    landed = hand_out(scheduler, 1)
    landed.result(timeout=SECONDS_TO_END)
    until(lambda: scheduler._protocol.next_undelivered() is None)  # a logger's lock must not be held at the fork
    device.hold("h2d")
    handle = hand_out(scheduler, 2)
    scheduler.load(load_op(3))
    inside, leave = threading.Event(), threading.Event()

    def be_inside() -> None:
        with scheduler._protocol._lock, handle._burst.lock, getattr(device._core, "_lock", nullcontext()):
            inside.set()
            leave.wait(SECONDS_TO_END)

    thread = threading.Thread(target=be_inside)
    thread.start()
    inside.wait(SECONDS_TO_END)
    child = os.fork()
    if child == 0:
        globals()[what_the_child_does](scheduler, landed, handle)
        sys.exit(0)
    leave.set()
    thread.join()
    assert exit_code_of(child, SECONDS_TO_END / 2) == 0
    device.resume("h2d")
    assert handle.result(timeout=SECONDS_TO_END).node_ids == (2,)
    next_one = scheduler.start_loading_sync(timeout=SECONDS_TO_END)
    assert next_one is not None
    acks = [landed.result(), handle.result(), next_one.result(timeout=SECONDS_TO_END)]
    assert scheduler.pop_acks() == acks
    scheduler.close(timeout=SECONDS_TO_END)


def every_use_raises(scheduler: TransferScheduler, landed: LoadHandle, handle: LoadHandle) -> None:
    """In the child, where the locks of the parent's other threads stay held for ever: whatever it calls is refused."""

    async def await_handle() -> None:
        await handle

    def never_called(handle: LoadHandle) -> None:
        raise AssertionError

    uses: dict[str, Callable[[], object]] = {
        "load": lambda: scheduler.load(load_op()),
        "start_loading": lambda: scheduler.start_loading().send(None),
        "start_loading_sync": scheduler.start_loading_sync,
        "pop_acks": scheduler.pop_acks,
        "handle_for": lambda: scheduler.handle_for(0),
        "stats": scheduler.stats,
        "stats without a look": lambda: scheduler.stats(observe=False),
        "listen": lambda: scheduler.listen(Hearing()),
        "unlisten": lambda: scheduler.unlisten(Hearing()),
        "idle": lambda: scheduler.idle,
        "start": scheduler.start,
        "reset": scheduler.reset,
        "areset": lambda: scheduler.areset().send(None),
        "close": scheduler.close,
        "aclose": lambda: scheduler.aclose().send(None),
        "await": lambda: await_handle().send(None),
        "result": handle.result,
        "result of a landed burst": landed.result,
        "layer": lambda: handle.layer(0).send(None),
        "enqueued": lambda: handle.enqueued(3).send(None),
        "wait_layer": lambda: handle.wait_layer(3),
        "layer_landed": lambda: handle.layer_landed(0),
        "cancel": handle.cancel,
        "done": handle.done,
        "stale": lambda: handle.stale,
        "exception": handle.exception,
        "add_done_callback": lambda: handle.add_done_callback(never_called),
    }
    progress, handle._burst.progress = handle._burst.progress, Progress()  # inline mode has enqueued every layer
    for name, use in uses.items():
        print(name)
        with pytest.raises(SchedulerClosedError, match="fork"):
            use()
    handle._burst.progress = progress


def child_has_its_own(scheduler: TransferScheduler, landed: LoadHandle, handle: LoadHandle) -> None:
    """In the child: a scheduler of its own on a device of its own works, and so does ending without a close."""
    device = EmulatedDevice()
    own = TransferScheduler(LaunchingBackend(device), runtime=device, config=config())
    own.start()
    assert hand_out(own, 7).result(timeout=SECONDS_TO_END).node_ids == (7,)
    device.hold("h2d")
    hand_out(own, 8)


def forks_with_the_default_device() -> None:
    """Scenario: parent and child each use the emulated device of their process."""

    def load_on_the_default_device() -> None:
        with TransferScheduler(DefaultDeviceBackend(), config=config()) as scheduler:
            assert hand_out(scheduler, 1).result(timeout=SECONDS_TO_END).node_ids == (1,)

    load_on_the_default_device()
    child = os.fork()
    if child == 0:
        load_on_the_default_device()
        sys.exit(0)
    assert exit_code_of(child, SECONDS_TO_END / 2) == 0
    load_on_the_default_device()


class DefaultDeviceBackend(LaunchingBackend):
    """Launches on whatever device the scheduler has."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def bind(self, scheduler: Any) -> None:
        self._device = scheduler.runtime


# -- tests --------------------------------------------------------------------------------------------------------


def said(ended: Ended) -> list[str]:
    """What the scheduler logged, but for its start and what has landed."""
    expected = ("scheduler_started", "burst_landed")
    return [line for line in ended.stdout.splitlines() if not any(event in line for event in expected)]


@pytest.mark.parametrize(
    ("busy", "ending"),
    [
        *((busy, "returns") for busy in ("paced copies", "blocked in prepare", "torch work on the engines")),
        *((busy, ending) for busy in ("held copies", "torch work in prepare") for ending in ("returns", "exits")),
    ],
)
def test_a_process_that_ends_without_a_close_ends_cleanly(nursery: Nursery, busy: str, ending: str) -> None:
    ended = nursery.run(leaves_busy, busy, ending)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert said(ended) == []


def test_nothing_is_submitted_or_logged_by_calls_that_return_when_the_process_has_begun_to_end(
    nursery: Nursery,
) -> None:
    ended = nursery.run(leaves_while_loop_and_data_plane_are_inside_calls)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert said(ended) == []


@pytest.mark.parametrize("busy", ["held copies", "torch work in prepare"])
def test_a_process_that_ends_with_an_exception_says_nothing_else(nursery: Nursery, busy: str) -> None:
    ended = nursery.run(leaves_busy, busy, "raises")
    assert ended.exit_code == 1
    assert ended.stderr.startswith("Traceback (most recent call last)")
    assert ended.stderr.endswith("\nRuntimeError: the engine failed\n")
    assert ended.stderr.count("Traceback") == 1
    assert said(ended) == []


@pytest.mark.parametrize(
    ("wait", "mode"),
    [
        *((wait, mode) for mode in ("async", "inline") for wait in ("hand-out", "result", "landed", "close", "reset")),
        ("enqueued", "async"),
    ],
)
def test_ctrl_c_interrupts_a_blocked_wait_and_loses_nothing(nursery: Nursery, wait: str, mode: str) -> None:
    ended = nursery.run(interrupted_in, wait, mode)
    assert (ended.exit_code, ended.stderr) == (0, "")


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("child", [every_use_raises, child_has_its_own])
def test_a_forked_child_uses_only_what_is_its_own_and_the_parent_goes_on(
    nursery: Nursery, child: Callable[..., None], mode: str
) -> None:
    ended = nursery.run(forks, mode, child.__name__)
    assert (ended.exit_code, ended.stderr) == (0, "")


def test_a_forked_child_has_a_default_device_of_its_own(nursery: Nursery) -> None:
    ended = nursery.run(forks_with_the_default_device)
    assert (ended.exit_code, ended.stderr) == (0, "")

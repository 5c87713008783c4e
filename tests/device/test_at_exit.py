"""The end of a process, and forking, in the middle of device work."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from hicache_sched.device import at_exit

RUN_EACH = """
import atexit, gc, json, os, signal, sys, threading, time
began = []
# The first to register is called last.
atexit.register(lambda: print("exit took", time.monotonic() - began[0]) if began else None)

import numpy as np
import torch
from hicache_sched.device import EmulatedDevice, at_exit
from hicache_sched.device.copy_batch import CopyBatch
at_exit.JOIN_SECONDS = 50

started, ended = {}, {}
gc.freeze()  # makes the ends quicker
for name, script in json.load(sys.stdin).items():
    files = [os.memfd_create("stdout"), os.memfd_create("stderr")]
    started[name] = pid, files = os.fork(), files
    if pid == 0:
        signal.alarm(100)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        exec(script)
        began.append(time.monotonic())
        sys.exit()
for name, (pid, files) in started.items():
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended[name] = [status, *(os.pread(file, 1 << 20, 0).decode() for file in files)]
print(json.dumps(ended))
"""
"""Runs the scripts at the same time, each in a process that ends as programs do, but imports torch only once."""

PRELUDE = """
threading.excepthook = lambda args: None  # a thread that is blocked in a device is woken by an error, as it should
device = EmulatedDevice()
stream, other = device.Stream(), device.Stream()
entered = threading.Event()
source, target = torch.ones(1 << 20), torch.zeros(1 << 20)

def launch(work, **kwargs):
    with device.stream(stream):
        device.launch(work, **kwargs)

def in_daemon(work):
    threading.Thread(target=work, daemon=True).start()
"""

ENDINGS = {
    "engines are idle": """
launch(lambda: None)
stream.synchronize()
""",
    "operations are held": """
device.hold("h2d")
for _ in range(3):
    launch(lambda: target.copy_(source), engine="h2d")
event = stream.record_event()
other.wait_event(event)
""",
    "an operation takes its time": """
launch(entered.set, duration=3600)
entered.wait()
""",
    "copies are on their way": """
for _ in range(2000):
    launch(lambda: (entered.set(), target.copy_(source)), engine="h2d")
entered.wait()
""",
    "a daemon thread waits for an event": """
device.hold("compute")
launch(lambda: None)
event = stream.record_event()
in_daemon(event.synchronize)
""",
    "a daemon thread launches inline": """
device.hold("compute")
in_daemon(lambda: device.launch(lambda: None))
""",
    "a daemon thread steps": """
device.hold("compute")
in_daemon(lambda: device.step("compute"))
""",
    "several devices work": """
devices = [EmulatedDevice() for _ in range(3)]
for each in devices:
    with each.stream(each.Stream()):
        each.launch(lambda: None, duration=3600)
""",
}

FORK = """
device.hold("h2d")
launch(lambda: None, engine="h2d")
event = stream.record_event()
none = np.empty(0, dtype=np.int64)
nothing = CopyBatch(none, none, none, 0, None)
calls = [
    device.Stream, device.Event, device.synchronize, stream.query, stream.synchronize, event.query, event.synchronize,
    event.record, event.wait, lambda: stream.wait_stream(other), lambda: device.launch(lambda: None),
    lambda: device.step("h2d"), lambda: device.read([source]), lambda: device.enqueue_copies(nothing),
]

def use_parents_device():
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as exc:
            if "fork" in str(exc):
                continue
        os._exit(number + 1)

def use_own_device():
    device.resume("h2d")
    device.close()
    with EmulatedDevice() as own, own.stream(own.Stream()):
        own.launch(entered.set)
        own.synchronize()
    os._exit(0 if entered.is_set() else 1)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # rather than hang
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

FORKS = {
    "use of the parent's device": "print(in_child(use_parents_device))\n",
    "use of an own device": "print(in_child(use_own_device))\n",
    "the parent goes on": """
in_child(use_parents_device)
device.step("h2d")
event.synchronize()
print(0)
""",
    "fork in the middle of a call": """
stop = threading.Event()

def query():
    while not stop.is_set():
        event.query()

threads = [threading.Thread(target=query) for _ in range(2)]
for thread in threads:
    thread.start()
print(*{in_child(use_parents_device) for _ in range(20)})
stop.set()
""",
    "a child's normal exit": "print(in_child(sys.exit))\n",
}

OTHERS = {
    "an operation does not end": """
at_exit.JOIN_SECONDS = 0.2
launch(lambda: (entered.set(), time.sleep(3600)))
entered.wait()
""",
    "sys.exit": """
launch(entered.set, duration=3600)
entered.wait()
sys.exit(7)
""",
}


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    """How each of the scripts above ended."""
    scripts = {name: PRELUDE + script for name, script in (ENDINGS | OTHERS).items()}
    scripts |= {name: PRELUDE + FORK + script + "sys.stdout.flush()\nos._exit(0)\n" for name, script in FORKS.items()}
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RUN_EACH],  # of forking with threads
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {name: Ended(*values) for name, values in json.loads(result.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_cleanly_and_soon_while(ended: dict[str, Ended], ending: str) -> None:
    returncode, stdout, stderr = ended[ending]
    assert (returncode, stderr) == (0, "")
    assert float(stdout.split()[-1]) < 50, "no join has run out"


def test_an_operation_that_does_not_end_holds_the_exit_up_for_a_bounded_time_only(ended: dict[str, Ended]) -> None:
    returncode, _, stderr = ended["an operation does not end"]
    assert (returncode, stderr) == (0, "")


def test_the_exit_status_is_the_programs_own(ended: dict[str, Ended]) -> None:
    returncode, _, stderr = ended["sys.exit"]
    assert (returncode, stderr) == (7, "")


# -- forking --------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_every_call_on_its_parents_device(ended: dict[str, Ended]) -> None:
    assert ended["use of the parent's device"].stdout.startswith("0\n"), "the number of the call it was not refused"


def test_a_fork_in_the_middle_of_a_call_leaves_the_child_no_lock_to_wait_for(ended: dict[str, Ended]) -> None:
    assert ended["fork in the middle of a call"].stdout.startswith("0\n")


def test_a_forked_child_may_close_its_parents_device_and_make_its_own(ended: dict[str, Ended]) -> None:
    assert ended["use of an own device"].stdout.startswith("0\n")


def test_the_parents_device_goes_on_after_a_fork(ended: dict[str, Ended]) -> None:
    assert ended["the parent goes on"].stdout.startswith("0\n")


def test_a_forked_child_ends_cleanly(ended: dict[str, Ended]) -> None:
    _, stdout, stderr = ended["a child's normal exit"]
    assert stdout.startswith("0\n")
    assert stderr == ""


# -- the registry ---------------------------------------------------------------------------------------------


class Owner:
    def __init__(self, name: str, said: list[str]) -> None:
        self._name = name
        self._said = said

    def stop_at_exit(self) -> None:
        self._said.append(f"stop {self._name}")

    def join_at_exit(self, deadline: float) -> None:
        assert 0 < deadline - time.monotonic() <= at_exit.JOIN_SECONDS
        self._said.append(f"join {self._name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the owners of this test were told, without those that live in this process."""
    monkeypatch.setattr(at_exit, "_owners", [])
    return []


def test_the_last_owner_is_stopped_first_and_all_are_stopped_before_any_is_joined(said: list[str]) -> None:
    owners = [Owner("device", said), Owner("scheduler", said)]
    for owner in owners:
        at_exit.stop_at_exit(owner)
    at_exit._stop_all()
    assert said == ["stop scheduler", "stop device", "join scheduler", "join device"]


def test_an_owner_that_is_gone_is_not_kept_for_the_exit(said: list[str]) -> None:
    at_exit.stop_at_exit(Owner("gone", said))
    gc.collect()
    at_exit._stop_all()
    assert said == []
    assert at_exit._owners == []

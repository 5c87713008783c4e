"""A data plane that submits in Python has the GIL: whoever it wakes is to run all the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hicache_sched import submission
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out
from tests.scheduler.crowd import WAIT, eventually, in_thread

NUM_LAYERS = 4


@pytest.fixture
def switch_interval(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what the interpreter says of its switch interval, in seconds."""
    return lambda seconds: monkeypatch.setattr(sys, "getswitchinterval", lambda: seconds)


@pytest.fixture
def given_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that gave way."""
    names: list[str] = []
    monkeypatch.setattr(submission, "give_way", lambda: names.append(threading.current_thread().name))
    return names


def submit(scheduler: Any, backend: LaunchingBackend, device: EmulatedDevice, *, waits: bool) -> None:
    """Submit a burst, whose layer 1 somebody waits for if `waits`."""
    entered, gate = threading.Event(), threading.Event()
    backend.entered_layers[1], backend.layer_gates[1] = entered, gate
    handle = hand_out(scheduler, 1)
    assert entered.wait(WAIT)
    if waits:

        def wait() -> None:
            with device.stream(device.Stream()):
                handle.wait_layer(1, WAIT)

        waiting = in_thread(wait)
        eventually(lambda: bool(handle._burst.waiter_names()))
    gate.set()
    handle.result(WAIT)
    if waits:
        waiting.result(WAIT)


def test_the_gil_is_given_up_to_one_who_was_woken(
    device: EmulatedDevice, make_scheduler: MakeScheduler, switch_interval: Any, given_way: list[str]
) -> None:
    switch_interval(0.0)
    backend = LaunchingBackend(device, NUM_LAYERS)
    submit(make_scheduler(backend), backend, device, waits=True)
    assert given_way == ["hicache-sched-worker"], "once: nobody was woken after that"


def test_it_is_kept_where_nobody_waits(
    device: EmulatedDevice, make_scheduler: MakeScheduler, switch_interval: Any, given_way: list[str]
) -> None:
    switch_interval(0.0)
    backend = LaunchingBackend(device, NUM_LAYERS)
    submit(make_scheduler(backend), backend, device, waits=False)
    assert given_way == []


def test_it_is_given_up_some_layers_later_where_it_had_been_given_up_a_moment_ago(
    device: EmulatedDevice, make_scheduler: MakeScheduler, switch_interval: Any, given_way: list[str]
) -> None:
    backend = LaunchingBackend(device, NUM_LAYERS)
    scheduler = make_scheduler(backend)
    switch_interval(float("inf"))
    submit(scheduler, backend, device, waits=True)
    assert given_way == []
    switch_interval(0.0)
    submit(scheduler, backend, device, waits=False)
    assert given_way == ["hicache-sched-worker"]

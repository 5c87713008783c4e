"""Fixtures of the scheduler's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hicache_sched import TransferScheduler, native
from hicache_sched.device import EmulatedDevice
from tests.builders import MakeScheduler, Schedulers
from tests.scheduler.looking import StartLoading

PLANES = [
    "python",
    pytest.param("native", marks=pytest.mark.skipif(native.module is None, reason="needs the native part")),
]


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    """Each data plane."""
    name: str = request.param
    return name


@pytest.fixture
def make_scheduler(device: EmulatedDevice, plane: str) -> Iterator[MakeScheduler]:
    """As everywhere, with each data plane."""
    schedulers = Schedulers(device, plane)
    yield schedulers.make
    schedulers.close()


@pytest.fixture(params=["async", "sync"])
def start_loading(request: pytest.FixtureRequest) -> StartLoading:
    """A hand-out as a coroutine, whichever twin makes it."""
    if request.param == "async":
        return TransferScheduler.start_loading
    return lambda scheduler: asyncio.to_thread(scheduler.start_loading_sync, 30)

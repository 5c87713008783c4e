"""Fixtures of the scheduler's tests."""

from __future__ import annotations

import asyncio

import pytest

from hicache_sched import TransferScheduler
from tests.scheduler.looking import StartLoading


@pytest.fixture(params=["async", "sync"])
def start_loading(request: pytest.FixtureRequest) -> StartLoading:
    """A hand-out as a coroutine, whichever twin makes it."""
    if request.param == "async":
        return TransferScheduler.start_loading
    return lambda scheduler: asyncio.to_thread(scheduler.start_loading_sync, 30)

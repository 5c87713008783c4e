"""What tests of waits do between two looks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hicache_sched import LoadHandle, TransferScheduler

StartLoading = Callable[[TransferScheduler], Awaitable[LoadHandle | None]]


async def until(condition: Callable[[], object]) -> None:
    """Return once another thread or task has made `condition` true."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def looks_again(scheduler: TransferScheduler) -> None:
    """Make whoever waits for a slot, a reset or a close look once more, and give them the time to."""
    scheduler._protocol.wake()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.02)

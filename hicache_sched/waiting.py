"""Waiting without owning: one look at shared state, two ways to wait between looks.

A *look* is one critical section. It returns what it found, or `PENDING` after registering the waiter it was given
where the state changes. A wake-up is a hint: whoever wakes looks again, so a lost, late or spurious one changes
nothing, and a waiter that goes away (cancelled, timed out, interrupted) takes nothing with it.

Threads and loops wait through the same looks: `block` for a thread, `wait` for a coroutine of any event loop.
`NotifiedWaits` is woken by whoever changes the state; `PolledWaits` is for inline mode, where nobody else is there
to notice a landing, and observes the device itself between looks.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

from hicache_sched import native
from hicache_sched.errors import HiCacheSchedError, SchedulerClosedError, TransferTimeoutError

T = TypeVar("T")


class Pending(Enum):
    PENDING = "pending"


PENDING: Final = Pending.PENDING

WAKE_UP_SECONDS: Final = 50e-6
"""About what a thread that is woken needs until it runs."""


class Waiter(Protocol):
    """Somebody to wake.

    Attributes:
        name: who waits, for logs; empty for threads and jobs of ours.
        forget: undoes its registration; set by whoever registers it, must accept a waiter that has gone.
    """

    forget: Callable[[Waiter], None] | None

    @property
    def name(self) -> str: ...

    def wake(self) -> None:
        """Make the waiter look again; from any thread, any number of times, never blocking or raising."""


Look = Callable[[Waiter | None], T | Pending]
"""Looks once; given None it must not register anybody."""


def check_timeout(timeout: float | None) -> None:
    """:raises TypeError, ValueError: it is no number of seconds. One below 0 is over, as a deadline may be."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds, or None for no limit, not {timeout!r}")
    try:
        float(timeout)
    except OverflowError:
        raise ValueError("timeout must be seconds, or None for no limit, not more than a float can hold") from None
    if math.isnan(timeout):
        raise ValueError("timeout must be seconds, or None for no limit, not nan")


def wake_all(waiters: Iterable[Waiter]) -> None:
    """Wake each of them; where that is interrupted, the others are woken all the same."""
    remaining = list(waiters)
    try:
        while remaining:
            remaining[-1].wake()
            remaining.pop()
    finally:
        if remaining:
            wake_all(remaining)


def give_way() -> None:
    """Let go of the GIL for as long as a thread that was woken a moment ago needs to take it. A shorter release, such
    as that of a call that returns at once, would only wake it up in vain."""
    time.sleep(WAKE_UP_SECONDS)


class ThreadWaiter:
    """A thread that sleeps on a lock; one use."""

    __slots__ = ("_gate", "forget", "name")

    def __init__(self, name: str | None = None) -> None:
        self.forget: Callable[[Waiter], None] | None = None
        self.name = threading.current_thread().name if name is None else name
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # already awake: two wake-ups are one hint
            self._gate.release()

    def sleep(self, timeout: float | None) -> None:
        """Return when woken, when `timeout` seconds are over, or raise what a signal handler raises."""
        self._gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))


class NativeWaiter:
    """A thread that waits for a layer of a burst whose data plane is native, and is woken by that without the GIL.

    :param progress: the native burst.
    :param landed: whether it waits for the layer to land, or to be enqueued.
    """

    __slots__ = ("_sleeper", "forget", "name")

    def __init__(self, progress: Any, landed: bool, layer: int) -> None:
        self.forget: Callable[[Waiter], None] | None = None
        self.name = threading.current_thread().name
        self._sleeper = native.module.Sleeper(progress, landed, layer)

    def wake(self) -> None:
        self._sleeper.wake()

    def sleep(self, timeout: float | None) -> None:
        """As `ThreadWaiter.sleep`; for a moment it keeps a core busy, as a layer often gets there at once."""
        self._sleeper.sleep(timeout)


BlockedWaiter = ThreadWaiter | NativeWaiter


class LoopWaiter:
    """A coroutine that awaits `future`; one use, made on its loop's thread."""

    __slots__ = ("_loop", "forget", "future", "name")

    def __init__(self, name: str | None = None) -> None:
        self.forget: Callable[[Waiter], None] | None = None
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()
        if name is None:
            task = asyncio.current_task()
            name = "coroutine" if task is None else task.get_name()
        self.name = name

    def wake(self) -> None:
        try:
            # Futures of a loop are touched only on its thread.
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            _forget(self)  # the loop is closed; registered here, whoever awaited could not even be collected

    async def sleep(self, timeout: float | None) -> None:
        """Until it is woken, or for `timeout` seconds; as `asyncio.wait` without what several futures need."""
        timer = None if timeout is None else self._loop.call_later(timeout, self._resolve)
        try:
            await self.future
        finally:
            if timer is not None:
                timer.cancel()

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waits(Protocol):
    """How to wait for a look to find something."""

    def block(
        self, look: Look[T], timeout: float | None, what: str, waiter: Callable[[], BlockedWaiter] = ThreadWaiter
    ) -> T:
        """Look until something is found, blocking the calling thread.

        :param what: completes "timed out after ... s waiting for ..."
        :param waiter: makes what the thread sleeps on.
        :raises TransferTimeoutError: `timeout` seconds are over.
        :raises SchedulerClosedError: called in a forked child.
        """

    async def wait(self, look: Look[T], timeout: float | None, what: str) -> T:
        """The same for a coroutine. A look that finds something is not followed by an await, so a cancelled task
        has either found it or left everything as it was."""


class ForkGuard:
    """Knows the process in which it was made."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """:raises SchedulerClosedError: called in a forked child."""
        if os.getpid() != self._pid:
            raise SchedulerClosedError(
                "this scheduler belongs to the parent process: its threads do not survive a fork; "
                "make a TransferScheduler of its own in the child"
            )


def _forget(waiter: Waiter) -> None:
    """A waiter that goes away is woken no more, and nobody is told that it waits."""
    if waiter.forget is not None:
        waiter.forget(waiter)


def _timed_out(timeout: float | None, what: str) -> TransferTimeoutError:
    return TransferTimeoutError(f"timed out after {timeout} s waiting for {what}; nothing is lost, call again")


class NotifiedWaits:
    """Sleeps until somebody who changed the state says so."""

    def __init__(self, guard: ForkGuard) -> None:
        self._guard = guard

    def block(
        self,
        look: Look[T],
        timeout: float | None,
        what: str,
        waiter: Callable[[], BlockedWaiter] = ThreadWaiter,
    ) -> T:
        self._guard.check()
        found = look(None)
        if found is not PENDING:
            return found
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            blocked = waiter()
            try:
                found = look(blocked)
                if found is not PENDING:
                    return found
                if deadline is None:
                    blocked.sleep(None)
                elif (remaining := deadline - time.monotonic()) > 0:
                    blocked.sleep(remaining)
                else:
                    raise _timed_out(timeout, what)
            finally:
                _forget(blocked)

    async def wait(self, look: Look[T], timeout: float | None, what: str) -> T:
        self._guard.check()
        found = look(None)
        if found is not PENDING:
            return found
        try:
            async with asyncio.timeout(timeout):
                while True:
                    waiter = LoopWaiter()
                    try:
                        found = look(waiter)
                        if found is not PENDING:
                            return found
                        await waiter.future
                    finally:
                        _forget(waiter)
        except TimeoutError as exc:
            if isinstance(exc, TransferTimeoutError):
                raise
            raise _timed_out(timeout, what) from None


class Observer(Protocol):
    """Notices what has landed, on the thread that asks."""

    @property
    def is_running_here(self) -> bool: ...

    def observe(self) -> None: ...


class PolledWaits:
    """Observes the device between looks; for inline mode.

    The time between two looks grows from `SHORTEST` to `LONGEST` seconds.
    """

    SHORTEST = 50e-6
    LONGEST = 1e-3

    def __init__(self, guard: ForkGuard, observer: Observer) -> None:
        self._guard = guard
        self._observer = observer

    def block(
        self, look: Look[T], timeout: float | None, what: str, waiter: Callable[[], BlockedWaiter] = ThreadWaiter
    ) -> T:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = self.SHORTEST
        while True:
            found = self._look(look)
            if found is not PENDING:
                return found
            self._check_may_wait(deadline, timeout, what)
            time.sleep(pause)
            pause = min(2 * pause, self.LONGEST)

    async def wait(self, look: Look[T], timeout: float | None, what: str) -> T:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = self.SHORTEST
        while True:
            found = self._look(look)
            if found is not PENDING:
                return found
            self._check_may_wait(deadline, timeout, what)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.LONGEST)

    def _look(self, look: Look[T]) -> T | Pending:
        self._guard.check()
        self._observer.observe()
        return look(None)

    def _check_may_wait(self, deadline: float | None, timeout: float | None, what: str) -> None:
        if deadline is not None and time.monotonic() >= deadline:
            raise _timed_out(timeout, what)
        if self._observer.is_running_here:
            raise HiCacheSchedError(
                f"waiting for {what} inside a callback or finish() in inline mode: this thread is the one that "
                "observes the device, and would wait for itself; wait after the callback has returned"
            )

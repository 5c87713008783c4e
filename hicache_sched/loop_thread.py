"""The dedicated event-loop thread.

It does what is not on the path of a copy: jobs, callbacks, stall timers, logs. Nothing that can block on the device
runs here, so it goes on answering while the data plane is stuck in a call. If the loop dies (somebody stopped it, or
a SystemExit got through) it is run again, and its jobs are taken up from the shared state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from hicache_sched.config import EventLoop
from hicache_sched.failure import FailureDesk
from hicache_sched.job import Jobs
from hicache_sched.own_thread import OwnThread


def loop_factory(event_loop: EventLoop) -> tuple[Callable[[], asyncio.AbstractEventLoop], EventLoop]:
    """How to make the loop, and what it really is: uvloop falls back to asyncio where it is not installed."""
    if event_loop == "uvloop":
        try:
            import uvloop
        except ImportError:
            return asyncio.new_event_loop, "asyncio"
        return uvloop.new_event_loop, "uvloop"
    return asyncio.SelectorEventLoop, "asyncio"


class Bells(Protocol):
    """What a data plane tells the loop by, as it wakes nobody itself.

    Attributes:
        doorbell_fd: readable once a layer has got where somebody waits for it.
        alarm_fd: readable once a burst has not ended for a while.
    """

    @property
    def doorbell_fd(self) -> int: ...

    @property
    def alarm_fd(self) -> int: ...

    def hear_doorbell(self) -> None:
        """Silence it; what it was rung for is looked at after that."""

    def hear_alarm(self) -> int:
        """The same; the id of the last burst that it has gone off for."""


CANCEL_SECONDS = 1.0
"""How long the end of the loop waits for tasks that it has cancelled."""


class LoopThread(OwnThread):
    """Runs one event loop until it is told to stop."""

    def __init__(
        self,
        name: str,
        make_loop: Callable[[], asyncio.AbstractEventLoop],
        jobs: Jobs,
        failures: FailureDesk,
        on_end: Callable[[], None],
        bells: Bells | None = None,
    ) -> None:
        """
        :param bells: of a data plane that has any.
        """
        super().__init__(name, failures, on_end)
        self._make_loop = make_loop
        self._jobs = jobs
        self._bells = bells
        self._closing = False
        self._loop = make_loop()

    def call(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn` on the loop thread soon; from any thread, never blocking.

        Only a hint: what the loop had not got to when it died, it finds in the shared state.
        """
        with suppress(RuntimeError):  # the loop has just been closed; the next one looks for itself
            self._loop.call_soon_threadsafe(fn, *args)

    def stop(self) -> None:
        self._stopping = True
        with suppress(RuntimeError):  # it has ended and its loop is closed
            self._loop.call_soon_threadsafe(self._stop_loop)

    def _stop_loop(self) -> None:
        if not self._closing:  # told twice, it would stop short of the end of its tasks
            self._closing = True
            self._loop.stop()

    def _run_until_stopped(self) -> None:
        while not self._stopping:
            try:
                if self._loop.is_closed():
                    self._loop = self._make_loop()
                asyncio.set_event_loop(self._loop)
                self._loop.call_soon(self._resume)
                self._loop.run_forever()
                if not self._stopping:
                    raise RuntimeError("the event loop was stopped by somebody else")
            except BaseException as exc:
                if not self._stopping:
                    self._failures.thread_failed(self._name, exc)
        self._close_loop()

    def _resume(self) -> None:
        if (bells := self._bells) is not None:
            # What the last loop had heard and not answered: whoever waits was told when that died, and `resume` begins
            # all jobs.
            self._loop.add_reader(bells.doorbell_fd, self._answer_doorbell, bells)
            self._loop.add_reader(bells.alarm_fd, self._answer_alarm, bells)
        self._jobs.resume()

    def _answer_doorbell(self, bells: Bells) -> None:
        bells.hear_doorbell()
        self._jobs.wake_reached()

    def _answer_alarm(self, bells: Bells) -> None:
        self._jobs.begin_all(bells.hear_alarm())

    def _close_loop(self) -> None:
        if self._loop.is_closed():
            return
        self._closing = True
        try:
            self._jobs.abandon()
            self._loop.run_until_complete(_cancel_all_tasks())
        except BaseException as exc:
            self._failures.thread_failed(self._name, exc)
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


async def _cancel_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:  # one that lost its next step with a loop that died does not come to its end
        await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

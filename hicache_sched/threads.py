"""The threads of a scheduler in async mode, started and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hicache_sched.burst import Burst
from hicache_sched.data_plane import PythonDataPlane
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.failure import FailureDesk
from hicache_sched.job import Jobs
from hicache_sched.landing import BurstEnd, LandingObserver
from hicache_sched.loop_thread import LoopThread
from hicache_sched.native_plane import NativePlane
from hicache_sched.native_threads import NativeDataPlane, NativeLandingObserver, NativeLandings
from hicache_sched.own_thread import OwnThread
from hicache_sched.protocol import TransferProtocol
from hicache_sched.submission import Submission
from hicache_sched.waiting import Waiter


class JobCall:
    """Has the job of a burst begun when somebody wakes it; a `Waiter` that stands in for the job until then.

    Most bursts end before anything of theirs is the loop's to do, and each time that it is woken costs the engine's
    threads the GIL.
    """

    __slots__ = ("_burst", "_jobs", "_loop", "forget")

    name = ""

    def __init__(self, loop: LoopThread, jobs: Jobs, burst: Burst) -> None:
        self.forget: Callable[[Waiter], None] | None = None
        self._loop = loop
        self._jobs = jobs
        self._burst = burst

    def wake(self) -> None:
        self._loop.call(self._jobs.begin, self._burst)


@dataclass(frozen=True)
class Threads:
    """The loop thread with its jobs, the data plane and the landing observer.

    Attributes:
        landings: waits for landings, where the observer does not do that itself.
    """

    loop: LoopThread
    jobs: Jobs
    plane: PythonDataPlane | NativeDataPlane
    observer: LandingObserver | NativeLandingObserver
    landings: NativeLandings | None = None

    @property
    def _all(self) -> list[OwnThread]:
        """In the order in which they end."""
        threads: list[OwnThread | None] = [self.plane, self.landings, self.observer, self.loop]
        return [thread for thread in threads if thread is not None]

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is one of them."""
        return any(thread.is_current for thread in self._all)

    @property
    def ended(self) -> bool:
        """Whether each has called `on_end`, or is about to; joining them then takes no time."""
        return all(thread.ended for thread in self._all)

    def start(self) -> None:
        for thread in reversed(self._all):
            thread.start()

    def hand_over(self, burst: Burst) -> None:
        """Give a burst to all three, the data plane first: copies do not wait for the loop. Never blocks."""
        has_news = burst.stale or burst.clock is not None
        burst.job_call = JobCall(self.loop, self.jobs, burst)
        self.plane.hand_over(burst)
        self.observer.hint()
        if has_news or not self.plane.sets_alarm:
            self.loop.call(self.jobs.begin, burst)

    def stop(self) -> None:
        """Tell each to end when it has nothing to do; must not block."""
        for thread in self._all:
            thread.stop()

    def abandon(self) -> None:
        """Tell each to end although there is something to do; must not block."""
        self.observer.abandon()
        self.stop()

    def join(self, deadline: float | None = None) -> None:
        """Wait until all have ended, or until `deadline` (`time.monotonic` seconds)."""
        for thread in self._all:
            thread.join(deadline)


def native_thread_names(name: str) -> tuple[str, str]:
    """Of those that make native device calls, where the loop's is `name`."""
    return f"{name}-worker", f"{name}-landings"


def make_threads(
    name: str,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    jobs: Jobs,
    device: DeviceBinding,
    failures: FailureDesk,
    on_end: Callable[[], None],
    protocol: TransferProtocol,
    submission: Submission,
    burst_end: BurstEnd,
    native_plane: NativePlane | None,
) -> Threads:
    """
    :param name: of the loop thread, and the prefix of the others'.
    :param on_end: the last call of each of them.
    :param native_plane: what the data plane and the observer live in; None for those in Python.
    """
    (worker, landings), observer = native_thread_names(name), f"{name}-observer"
    common = device, failures, on_end
    loop = LoopThread(name, make_loop, jobs, failures, on_end, native_plane)
    if native_plane is None:
        return Threads(
            loop,
            jobs,
            PythonDataPlane(worker, *common, submission),
            LandingObserver(observer, *common, protocol, burst_end),
        )
    return Threads(
        loop,
        jobs,
        NativeDataPlane(worker, *common, submission, native_plane),
        NativeLandingObserver(observer, *common, protocol, native_plane, burst_end),
        NativeLandings(landings, *common, native_plane),
    )

"""Listeners: who is told when bursts got where. While there are none nothing is timed."""

from __future__ import annotations

import threading
import time
from typing import Literal, Protocol

from hicache_sched.ack import LoadAck
from hicache_sched.burst_times import BurstTimes, ProgressTimes
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.progress import AnyProgress

StallKind = Literal["layer", "slot"]


class BurstListener(Protocol):
    """Told of bursts and stalls; see `TransferScheduler.listen`."""

    def burst_ended(self, ack: LoadAck, times: BurstTimes) -> object:
        """A burst has ended; in hand-out order, once for each."""

    def stalled(self, what: StallKind) -> object:
        """A layer, or a hand-out that waits for a slot, began to take longer than `stall_log_interval`; once for each
        time that it is stuck."""


class Listening:
    """One listener, from `listen` until `unlisten`.

    Attributes:
        last_burst: id of the last burst that it was told of.
        over: it is told of no more.
    """

    __slots__ = ("last_burst", "listener", "over")

    def __init__(self, listener: BurstListener) -> None:
        self.listener = listener
        self.last_burst = 0
        self.over = False


class Listeners:
    """Who listens to a scheduler.

    Attributes:
        present: those who do now.
    """

    def __init__(self) -> None:
        # Reentrant, as the garbage collector may end one who listens in the middle of anything.
        self._lock = threading.RLock()
        self.present: tuple[Listening, ...] = ()

    def add(self, listener: BurstListener) -> None:
        if missing := [name for name in ("burst_ended", "stalled") if not callable(getattr(listener, name, None))]:
            raise TypeError(f"a listener has the methods of BurstListener, and {listener!r} lacks {missing[0]}()")
        with self._lock:
            if self._find(listener) is not None:
                raise HiCacheSchedError(f"{listener!r} listens to this scheduler already; unlisten() ends that")
            self.present = (*self.present, Listening(listener))

    def remove(self, listener: BurstListener) -> None:
        with self._lock:
            if (found := self._find(listener)) is not None:
                found.over = True
                self.present = tuple(each for each in self.present if each is not found)

    def _find(self, listener: BurstListener) -> Listening | None:
        return next((each for each in self.present if each.listener is listener), None)


class BurstClock:
    """Of a burst that somebody listens for: who, and the times that its progress does not keep.

    Attributes:
        audience: who listened when the hand-out began.
        job_began, ended: see `BurstTimes`.
    """

    __slots__ = ("_asked", "_handed_out", "audience", "ended", "job_began")

    def __init__(self, audience: tuple[Listening, ...], asked: float) -> None:
        self.audience = audience
        self._asked = asked
        self._handed_out = time.monotonic()
        self.job_began: float | None = None
        self.ended: float | None = None

    def begin_job(self) -> None:
        """The loop has come to the burst; only the first time counts."""
        if self.job_began is None:
            self.job_began = time.monotonic()

    def end(self) -> None:
        self.ended = time.monotonic()

    def times(self, progress: AnyProgress, num_layers: int) -> BurstTimes:
        """Of a burst that has ended."""
        assert self.ended is not None
        reached = ProgressTimes(*progress.times())
        return BurstTimes(
            asked=self._asked,
            handed_out=self._handed_out,
            job_began=self.job_began,
            begun=reached.begun,
            planned=reached.planned,
            # One that was dropped before it was begun is called submitted, too, so that nobody waits for it.
            submitted=None if reached.begun is None else reached.submitted,
            ended=self.ended,
            enqueued=reached.enqueued + (None,) * (num_layers - len(reached.enqueued)),
            landed=reached.landed + (None,) * (num_layers - len(reached.landed)),
        )

"""A listener that keeps what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_sched import LoadAck
from hicache_sched.burst_times import BurstTimes
from tests.scheduler.crowd import WAIT


class Hearing:
    """Keeps what it is told, and lets threads wait for it.

    Attributes:
        acks, times: of bursts, in the order in which it was told of them.
        threads: the names of those that told it.
        stalls: what was stuck.
        then: called with each ack when that has been kept.
    """

    def __init__(self) -> None:
        self.acks: list[LoadAck] = []
        self.times: list[BurstTimes] = []
        self.threads: list[str] = []
        self.stalls: list[str] = []
        self.then: Callable[[LoadAck], object] = lambda ack: None
        self._changed = threading.Condition()

    def burst_ended(self, ack: LoadAck, times: BurstTimes) -> None:
        with self._changed:
            self.acks.append(ack)
            self.times.append(times)
            self.threads.append(threading.current_thread().name)
            self._changed.notify_all()
        self.then(ack)

    def stalled(self, what: str) -> None:
        with self._changed:
            self.stalls.append(what)
            self._changed.notify_all()

    @property
    def burst_ids(self) -> list[int]:
        return [ack.burst_id for ack in self.acks]

    def wait_bursts(self, n: int) -> list[BurstTimes]:
        """Block until it has been told of `n` bursts; gives their times."""
        self._wait(lambda: len(self.acks) >= n)
        return self.times[:n]

    def wait_stalls(self, n: int) -> list[str]:
        self._wait(lambda: len(self.stalls) >= n)
        return self.stalls[:n]

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT), "it was not told"

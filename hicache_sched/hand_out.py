"""The hand-out: the synchronous half of `start_loading`, and the wait for a slot before it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache_sched.burst import Burst
from hicache_sched.device.runtime import Stream
from hicache_sched.protocol import TransferProtocol, Turn
from hicache_sched.waiting import Pending, Waiter, Waits

Launch = Callable[[Burst, Stream | None], None]


class HandOut:
    """One call of `start_loading`; at most one is under way in a scheduler.

    Everything happens in `look`: it claims the slot, takes the ops, records the events and queues the burst in one
    step, on the caller's thread, so a caller that goes away between two looks takes nothing with it.
    """

    what = "a free slot"

    def __init__(
        self, protocol: TransferProtocol, turn: Turn, fence_stream: Stream | None, waits: Waits, launch: Launch
    ) -> None:
        self._protocol = protocol
        self._turn = turn
        self._fence_stream = fence_stream
        self._launch = launch
        self.waits = waits

    def look(self, waiter: Waiter | None) -> Burst | Pending | None:
        """Hand out if the next slot is free; None if there is nothing to hand out."""
        found = self._protocol.look_for_slot(self._turn, self.waits, waiter)
        if isinstance(found, Burst):
            self._launch(found, self._fence_stream)
        return found


class SlotWait:
    """A hand-out that waits for a slot, as those who report on it see it.

    Attributes:
        waiter: which thread or task waits.
        slot: the slot it waits for.
        since: when it began, in `time.monotonic` seconds.
    """

    def __init__(self, waiter: str, slot: int, turn: Turn) -> None:
        self.waiter = waiter
        self.slot = slot
        self.since = time.monotonic()
        self._turn = weakref.ref(turn)
        self._finished = False
        self._watcher: Waiter | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended; also where Ctrl-C came before it could say so."""
        return self._finished or (turn := self._turn()) is None or turn.over

    def watch(self, watcher: Waiter) -> None:
        """Have `watcher` woken when the wait ends; it looks at `over` afterwards."""
        self._watcher = watcher

    def finish(self) -> None:
        self._finished = True
        if (watcher := self._watcher) is not None:
            watcher.wake()


@contextmanager
def slot_wait(
    protocol: TransferProtocol, turn: Turn, report: Callable[[SlotWait], None], waiter: str | None
) -> Iterator[None]:
    """Report the wait for the next slot while the body waits."""
    slot, _ = protocol.next_slot()
    wait = SlotWait(waiter or threading.current_thread().name, slot, turn)
    report(wait)
    try:
        yield
    finally:
        wait.finish()

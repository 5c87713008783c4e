"""Jobs: what the loop does for one burst, and for one hand-out that waits for a slot, while they last."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import Final

from hicache_sched.burst import ENDED, Burst, Watch
from hicache_sched.delivery import Delivery, log_failure
from hicache_sched.hand_out import SlotWait
from hicache_sched.log import Level, say
from hicache_sched.protocol import TransferProtocol
from hicache_sched.waiting import LoopWaiter


class StallClock:
    """When the next stall of something is due to be logged. All times are `time.monotonic` seconds."""

    def __init__(self, interval: float, since: float) -> None:
        self._interval = interval
        self._since = since
        self._due = since + interval

    def progressed(self, at: float) -> None:
        """Something happened at that time: the wait starts again."""
        if at > self._since:
            self._since, self._due = at, at + self._interval

    @property
    def remaining(self) -> float | None:
        """Seconds until a stall is due; None for never."""
        return None if math.isinf(self._due) else max(0.0, self._due - time.monotonic())

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since

    def is_due(self) -> bool:
        """Whether a stall is to be logged now; the next is then an interval away."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._interval
        return True


LATEST_BEGIN: Final = 0.05
"""Seconds after its hand-out at which a burst's job has to begin, so that its stalls are seen."""


class Jobs:
    """Makes and runs jobs; every method is called on the loop thread."""

    def __init__(self, protocol: TransferProtocol, delivery: Delivery, stall_log_interval: float) -> None:
        self._protocol = protocol
        self._delivery = delivery
        self._interval = stall_log_interval
        self._of_bursts: dict[int, asyncio.Task[None]] = {}
        self._slot_wait: SlotWait | None = None
        self._of_slot: asyncio.Task[None] | None = None

    def begin(self, burst: Burst) -> None:
        """Start the job of a burst; does nothing where there is one. A burst that has ended is delivered at once."""
        burst.job_call = None
        if burst.clock is not None:
            burst.clock.begin_job()
        if burst.id in self._of_bursts:
            return
        if burst.ended:
            self._delivery.run(in_job=True)
        else:
            task = asyncio.get_running_loop().create_task(self._log_stalls_until_end(burst), name=f"burst-{burst.id}")
            # Not a `finally` in the job: one that is cancelled before its first step has none.
            task.add_done_callback(partial(self._ended, burst))
            self._of_bursts[burst.id] = task

    def begin_all(self, last: float = math.inf) -> None:
        """Start the jobs of all bursts that have none.

        :param last: id of the last burst that is meant.
        """
        for burst in self._protocol.bursts_alive():
            if burst.id <= last:
                self.begin(burst)

    def wake_reached(self) -> None:
        """Wake whoever waits for a layer that has got there, of any burst."""
        for burst in self._protocol.bursts_alive():
            burst.wake_reached()

    def watch_slot(self, slot_wait: SlotWait) -> None:
        """Log while a hand-out waits too long for its slot."""
        self._slot_wait = slot_wait
        self._of_slot = asyncio.get_running_loop().create_task(self._watch(slot_wait), name="slot-wait")

    def resume(self) -> None:
        """Take up again what was under way when the loop died.

        A job that was may have lost a wake-up with it, so every burst gets a new one.
        """
        self.abandon()
        self.begin_all()
        if self._slot_wait is not None and not self._slot_wait.over:
            self.watch_slot(self._slot_wait)

    def abandon(self) -> None:
        """Give up every job; those that run are cancelled."""
        tasks = [*self._of_bursts.values(), *([] if self._of_slot is None else [self._of_slot])]
        self._of_bursts, self._of_slot = {}, None
        for task in tasks:
            if not task.cancel() and not task.cancelled():
                task.exception()  # what killed the loop has been reported

    def _ended(self, burst: Burst, task: asyncio.Task[None]) -> None:
        """Deliver the burst in its turn; where its job was interrupted before that, it gets a new one."""
        if self._of_bursts.get(burst.id) is not task:  # it was abandoned
            return
        del self._of_bursts[burst.id]
        interrupted = task.cancelled() or task.exception() is not None
        if burst.ended:
            self._delivery.run(in_job=True)
        elif interrupted:
            self.begin(burst)

    async def _log_stalls_until_end(self, burst: Burst) -> None:
        clock = StallClock(self._interval, burst.progress_at)
        stalled: int | None = None
        stalled_since = 0.0
        while burst.ack is None:
            waiter = LoopWaiter(name="")
            try:
                watches: tuple[Watch, ...] = (ENDED,) if stalled is None else (ENDED, ("landed", stalled))
                burst.register_for(watches, waiter)
                log_failure(burst)
                if burst.ended:
                    return
                clock.progressed(burst.progress_at)
                if clock.is_due():
                    if stalled is None:
                        stalled, stalled_since = burst.landed, burst.progress_at
                        burst.register_for((("landed", stalled),), waiter)
                        self._delivery.tell_stalled("layer")
                    self._say_layer("layer_stalled", "warning", burst, stalled, clock.waited)
                    if burst.landed > stalled:
                        continue
                await waiter.sleep(clock.remaining)
            finally:  # also where a close interrupts the wait: another job may have delivered the burst
                burst.forget(waiter)
                if stalled is not None and (burst.landed > stalled or burst.ended):
                    self._say_layer("layer_recovered", "info", burst, stalled, time.monotonic() - stalled_since)
                    stalled = None

    def _say_layer(self, event: str, level: Level, burst: Burst, layer: int, waited: float) -> None:
        oldest = self._protocol.oldest_in_flight()
        waiters = burst.waiter_names()
        say(
            level,
            event,
            burst_id=burst.id,
            slot=burst.slot,
            generation=burst.generation,
            layer=layer,
            stage=burst.stage,
            waited_s=round(waited, 3),
            waiter=waiters[0] if waiters else None,
            node_ids=list(burst.queue.node_ids),
            queue_depth=self._protocol.queue_depth,
            blocked_behind=None if oldest is None or oldest is burst else oldest.id,
        )

    async def _watch(self, slot_wait: SlotWait) -> None:
        clock = StallClock(self._interval, slot_wait.since)
        stalled = False
        while True:
            waiter = LoopWaiter(name="")
            slot_wait.watch(waiter)
            if slot_wait.over:
                break
            if clock.is_due():
                if not stalled:
                    self._delivery.tell_stalled("slot")
                stalled = True
                self._say_slot("slot_stalled", "warning", slot_wait, clock.waited)
            await waiter.sleep(clock.remaining)
        if stalled:
            self._say_slot("slot_recovered", "info", slot_wait, clock.waited)

    def _say_slot(self, event: str, level: Level, slot_wait: SlotWait, waited: float) -> None:
        _, burst = self._protocol.next_slot()
        say(
            level,
            event,
            slot=slot_wait.slot,
            waited_s=round(waited, 3),
            waiter=slot_wait.waiter,
            burst_id=None if burst is None else burst.id,
            stage=None if burst is None else burst.stage,
            queue_depth=self._protocol.queue_depth,
        )

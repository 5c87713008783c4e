"""The state that engine, data plane and landing observer share, and the atomic steps they make on it.

Every method is one step: one critical section, so that what happens between two of them is an interleaving of whole
steps. `tests/protocol` explores all of those on a model that makes the same steps.

Locks are taken in one order, this one's before a burst's, and nobody is woken, called back or logged to while one is
held.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto

from hicache_sched.ack import AckStatus, LoadAck
from hicache_sched.burst import Burst
from hicache_sched.errors import DeviceLostError, HiCacheSchedError, SchedulerClosedError
from hicache_sched.event_set import EventSet
from hicache_sched.listeners import BurstClock, Listening
from hicache_sched.load_op import LoadOp
from hicache_sched.op_queue import IndexList, OpQueue
from hicache_sched.progress import AnyProgress, Progress
from hicache_sched.slots import SlotRing
from hicache_sched.waiting import PENDING, Pending, Waiter, Waits, wake_all

ACK_BACKLOG = 4096
"""Unpopped acks over which the engine is told that it does not pop them."""


class Lifecycle(Enum):
    NEW = auto()
    RUNNING = auto()
    CLOSING = auto()
    CLOSED = auto()


class Turn:
    """The turn of one hand-out; at most one is under way.

    It is over when the hand-out says so, when a reset or a close ends it, or when nobody holds it any more: a
    hand-out whose loop was closed under it does not keep the next from its turn.

    Attributes:
        audience: who listens for its burst.
        asked: when it began, in `time.monotonic` seconds, where somebody listens.
        over: set by the hand-out when it leaves.
        closed: a close ended it.
    """

    __slots__ = ("__weakref__", "asked", "audience", "closed", "over")

    def __init__(self, audience: tuple[Listening, ...]) -> None:
        self.audience = audience
        self.asked = time.monotonic() if audience else 0.0
        self.over = False
        self.closed = False


class TransferProtocol:
    """Queued ops, slots, bursts in flight and acks.

    Attributes:
        pool_names: the anchor's name first.
        num_layers: transfer layers of a burst.
        lost: set once every device call fails.
        last_error: the newest failure.
        unlaunched: the burst that a hand-out has claimed and not launched; see `take_unlaunched`.
    """

    def __init__(self, pool_names: Sequence[str], num_layers: int, poll_acks: bool) -> None:
        self.pool_names = tuple(pool_names)
        self.num_layers = num_layers
        self.lost: DeviceLostError | None = None
        self.last_error: BaseException | None = None
        self._poll_acks = poll_acks
        # Reentrant, as a coroutine that the garbage collector ends cleans up in the middle of anything.
        self._lock = threading.RLock()
        self._lifecycle = Lifecycle.NEW
        self._new_progress: Callable[[bool], AnyProgress] = Progress
        self._new_indices: Callable[[], IndexList | None] = _no_indices
        self._queue: OpQueue | None = None  # made with the first op, so that a hand-out need not make the next one
        self._slots: SlotRing | None = None
        self._turn: weakref.ref[Turn] | None = None
        self._resetting = False
        self._bursts_handed_out = 0
        self.unlaunched: Burst | None = None
        self._alive: deque[Burst] = deque()
        self._undelivered = 0  # so many of the first in `_alive` have ended
        self._leaving: Burst | None = None  # it has ended with nothing to deliver, and its waiters are being woken
        self._acks: deque[LoadAck] = deque()
        self._totals = dict.fromkeys(AckStatus, 0)
        self._loaded_tokens = 0
        self._loaded_bytes = 0
        self._waiters: set[Waiter] = set()

    # -- lifecycle ------------------------------------------------------------------------------------------------

    @property
    def lifecycle(self) -> Lifecycle:
        return self._lifecycle

    def start(
        self,
        slots: SlotRing,
        new_progress: Callable[[bool], AnyProgress] = Progress,
        new_indices: Callable[[], IndexList | None] | None = None,
    ) -> None:
        """
        :param new_progress: makes what bursts keep their progress in, with its times or without.
        :param new_indices: makes what keeps the indices of load ops.
        """
        with self._lock:
            self._slots = slots
            self._new_progress, self._new_indices = new_progress, new_indices or _no_indices
            loaded, self._queue = self._ops, None
            for op in loaded:
                self._append(op)
            self._lifecycle = Lifecycle.RUNNING

    def begin_close(self) -> bool:
        """From here on nothing is loaded or handed out, until the close succeeds; False if nothing is open."""
        with self._lock:
            if self._lifecycle in (Lifecycle.NEW, Lifecycle.CLOSED):
                return False
            self._lifecycle = Lifecycle.CLOSING
            if (turn := self._current_turn) is not None:
                turn.closed = True
            self._turn = None
        self.wake()
        return True

    def finish_close(self) -> bool:
        """False if another close has finished it."""
        with self._lock:
            first = self._lifecycle is not Lifecycle.CLOSED
            self._new_progress, self._new_indices = Progress, _no_indices
            self._lifecycle = Lifecycle.CLOSED
        self.wake()
        return first

    # -- engine scheduler -------------------------------------------------------------------------------------------

    def load(self, op: LoadOp) -> None:
        with self._lock:
            self._check_not_closing()
            if self._resetting:
                raise HiCacheSchedError("load() during reset(): wait until reset() has returned, then load")
            self._append(op)

    def begin_hand_out(self, turn: Turn) -> bool:
        """Enter a hand-out; setting `turn.over` leaves it.

        :return: whether it finds something to hand out.
        """
        with self._lock:
            if self._lifecycle is Lifecycle.NEW:
                raise SchedulerClosedError(
                    "hand-out before start(): call start() first, or use the scheduler in `with`"
                )
            self._check_not_closing()
            self.check_not_lost()
            if self._current_turn is not None:
                raise HiCacheSchedError(
                    "a second hand-out while one is under way: one engine thread or loop drives a scheduler; "
                    "await the first start_loading() before the next"
                )
            if self._resetting:
                raise HiCacheSchedError("hand-out during reset(): wait until reset() has returned")
            self._turn = weakref.ref(turn)
            return bool(self._ops)

    def look_for_slot(self, turn: Turn, waits: Waits, waiter: Waiter | None) -> Burst | Pending | None:
        """Claim the next slot for all queued ops, if it is free.

        None if there is nothing to hand out (any more, after a reset). It raises where a close has begun, also where
        that has ended since: the hand-out would go on in the wrong mode.
        """
        with self._lock:
            if turn.closed:
                raise SchedulerClosedError("the scheduler was closed during the hand-out; its load ops are queued")
            queue = self._queue
            if self._current_turn is not turn or queue is None or not queue.ops:
                return None
            self.check_not_lost()
            assert self._slots is not None
            slot = self._slots.next
            if self._resetting or not slot.is_free:
                return self._register(waiter)
            number, generation = self._bursts_handed_out + 1, slot.generation + 1
            clock = BurstClock(turn.audience, turn.asked) if turn.audience else None
            progress = self._new_progress(clock is not None)
            burst = Burst(number, slot, generation, queue, self.num_layers, waits, progress, clock)
            after_next = self._slots.after_next
            # Ctrl-C interrupts CPython after a call, so all of these or none.
            self._bursts_handed_out, slot.generation, slot.burst = number, generation, burst
            self._slots.next_index, self._queue, self.unlaunched = after_next, None, burst
            self._alive.append(burst)
            return burst

    def launched(self) -> None:
        """The burst of the last hand-out is on its way."""
        self.unlaunched = None

    def take_unlaunched(self) -> Burst | None:
        """The burst that a hand-out claimed but was interrupted before it launched it; None while one may yet."""
        with self._lock:
            if self._current_turn is not None:
                return None
            unlaunched, self.unlaunched = self.unlaunched, None
            return unlaunched

    def pop_acks(self) -> list[LoadAck]:
        with self._lock:
            acks = list(self._acks)
            self._acks.clear()
            return acks

    def burst_in(self, slot: int, generation: int | None) -> Burst | None:
        """The burst that (slot, generation) names, None if that is not the slot's last one."""
        if type(slot) is not int:
            raise TypeError(f"slot must be an int, not {slot!r}")
        with self._lock:
            if self._slots is None:  # not started: nothing has been handed out
                return None
            slots = self._slots.slots
            if not 0 <= slot < len(slots):
                raise IndexError(f"slot {slot} is out of range: this scheduler has slots 0 to {len(slots) - 1}")
            burst = slots[slot].burst
            return burst if burst is not None and generation in (None, burst.generation) else None

    # -- reset ------------------------------------------------------------------------------------------------------

    def begin_reset(self) -> None:
        with self._lock:
            self._check_not_closing()
            if self._resetting:
                raise HiCacheSchedError("a second reset() while one is under way")
            self._resetting = True

    def look_drained(self, waiter: Waiter | None) -> bool | Pending:
        """True once every burst that was handed out has ended and its callbacks have run."""
        return self.look_until(lambda: self._is_drained, waiter)

    def look_until(self, predicate: Callable[[], bool], waiter: Waiter | None) -> bool | Pending:
        """True once `predicate` holds, for which whoever makes it true calls `wake` afterwards."""
        with self._lock:
            return True if predicate() else self._register(waiter)

    def look_reset(self, waiter: Waiter | None) -> bool | Pending:
        """Finish the reset, once drained: after this no ack of an earlier burst is published."""
        with self._lock:
            if not self._is_drained:
                return self._register(waiter)
            self._queue = None
            self._acks.clear()
            if self._slots is not None:
                self._slots.restart()
            self._turn = None
            self._resetting = False
        self.wake()
        return True

    def abandon_reset(self) -> None:
        """Undo `begin_reset`; a hand-out that waits goes on waiting."""
        with self._lock:
            self._resetting = False
        self.wake()

    # -- data plane and landing observer --------------------------------------------------------------------------

    def oldest_in_flight(self) -> Burst | None:
        with self._lock:
            return self._alive[self._undelivered] if len(self._alive) > self._undelivered else None

    def bursts_alive(self) -> list[Burst]:
        """Bursts that have not ended, or whose waiters have not been woken or callbacks not run, oldest first."""
        with self._lock:
            return [*self._alive] if (leaving := self._leaving) is None else [leaving, *self._alive]

    def publish(self, burst: Burst, ack: LoadAck, *, has_news: bool = True) -> tuple[EventSet | None, bool]:
        """End the oldest burst in flight with `ack`.

        :param has_news: whether something follows that has to be delivered; False if nothing but callbacks could.
        :return: events to be used again; whether the backlog of acks has just passed `ACK_BACKLOG`.
        """
        with self._lock:
            assert self._alive[self._undelivered] is burst
            events, waiters = burst.end(ack)
            waiters += self._waiters
            self._totals[ack.status] += 1
            self._loaded_tokens += ack.num_tokens
            self._loaded_bytes += ack.num_bytes
            # One interrupted before here publishes it again; after here it is published. CPython interrupts a thread
            # after a call, so not between these two.
            self._undelivered += 1
            if self._poll_acks:
                self._acks.append(ack)
            if not has_news and self._undelivered == 1 and burst.close_callbacks():
                waiters = [waiter for waiter in waiters if waiter is not burst.job_call]
                burst.job_call, self._leaving = None, burst
                self._undelivered -= 1
                self._alive.popleft()
            backlog = len(self._acks) == ACK_BACKLOG + 1
        wake_all(waiters)
        self._leaving = None
        return events, backlog

    def next_undelivered(self) -> Burst | None:
        with self._lock:
            return self._alive[0] if self._undelivered else None

    def delivered(self, burst: Burst) -> None:
        """The callbacks of the oldest undelivered burst have run."""
        with self._lock:
            assert self._alive[0] is burst
            self._undelivered -= 1
            self._alive.popleft()
        self.wake()

    def lose(self, error: DeviceLostError) -> bool:
        """Latch that the device is lost; False if it was known."""
        with self._lock:
            if self.lost is not None:
                return False
            self.lost = self.last_error = error
        self.wake()
        return True

    def check_not_lost(self) -> None:
        """:raises DeviceLostError: a fresh one, for each who asks, once the device is lost."""
        if self.lost is not None:
            raise DeviceLostError(*self.lost.args) from self.lost.__cause__

    def wake(self) -> None:
        """Make whoever waits for a slot, a reset or a close look again."""
        with self._lock:
            waiters = list(self._waiters)
        wake_all(waiters)

    def forget(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.discard(waiter)

    # -- what can be seen -------------------------------------------------------------------------------------------

    @property
    def queue_depth(self) -> int:
        """Bursts that the data plane has not begun."""
        with self._lock:
            return self._num_queued

    @property
    def idle(self) -> bool:
        with self._lock:
            return not (self._ops or self._num_in_flight or self._acks)

    def counts(self, *, asks_device: bool = True) -> dict[str, int]:
        """The numbers of `SchedulerStats`.

        :param asks_device: False to take a slot for free only once its burst has ended.
        """
        with self._lock:
            num_queued = self._num_queued
            slots = [] if self._slots is None else self._slots.slots
            num_free = sum(slot.is_free if asks_device else slot.is_over for slot in slots)
            return {
                "queued_ops": len(self._ops),
                "bursts_queued": num_queued,
                "bursts_in_flight": self._num_in_flight - num_queued,
                "free_slots": num_free,
                "acks_unpopped": len(self._acks),
                "landed_bursts": self._totals[AckStatus.OK],
                "failed_bursts": self._totals[AckStatus.FAILED],
                "cancelled_bursts": self._totals[AckStatus.CANCELLED],
                "loaded_tokens": self._loaded_tokens,
                "loaded_bytes": self._loaded_bytes,
            }

    def next_slot(self) -> tuple[int, Burst | None]:
        """The slot whose turn it is, and the last burst in it."""
        with self._lock:
            assert self._slots is not None
            return self._slots.next.index, self._slots.next.burst

    # -- inside; the lock is held -----------------------------------------------------------------------------------

    @property
    def _current_turn(self) -> Turn | None:
        turn = None if self._turn is None else self._turn()
        return None if turn is None or turn.over else turn

    @property
    def _ops(self) -> Sequence[LoadOp]:
        return () if self._queue is None else self._queue.ops

    def _append(self, op: LoadOp) -> None:
        if self._queue is None:
            self._queue = OpQueue(self.pool_names, self._new_indices())
        self._queue.append(op, self.pool_names[0])

    @property
    def _is_drained(self) -> bool:
        return not self._alive

    @property
    def _num_in_flight(self) -> int:
        return len(self._alive) - self._undelivered

    @property
    def _num_queued(self) -> int:
        return sum(not burst.progress.begun for burst in self._alive if not burst.ended)

    def _register(self, waiter: Waiter | None) -> Pending:
        if waiter is not None:
            self._waiters.add(waiter)
            waiter.forget = self.forget
        return PENDING

    def _check_not_closing(self) -> None:
        if self._lifecycle is Lifecycle.CLOSING:
            raise SchedulerClosedError(
                "the scheduler is closing: a burst may still be under way on its h2d stream; "
                "load again once close() has returned"
            )


def _no_indices() -> None:
    return None

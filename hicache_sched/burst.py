"""Bursts: one submission on the h2d stream, and whoever waits for it.

Progress is two watermarks. Layers go in order, so "layer i is enqueued" is `enqueued > i` and "layer i has landed"
is `landed > i`. Fields are written under `lock`; watermarks and flags only ever move one way, so that reading one
without the lock gives an answer that was true and, where it says yes, still is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch

from hicache_sched.ack import LoadAck
from hicache_sched.device.runtime import Event
from hicache_sched.errors import LoadCancelledError, LoadFailedError
from hicache_sched.event_set import EventSet
from hicache_sched.listeners import BurstClock
from hicache_sched.op_queue import OpQueue
from hicache_sched.progress import AnyProgress, Progress
from hicache_sched.slots import Slot
from hicache_sched.waiting import (
    PENDING,
    BlockedWaiter,
    NativeWaiter,
    Pending,
    ThreadWaiter,
    Waiter,
    Waits,
    wake_all,
)

Stage = Literal["queued", "preparing", "enqueuing", "device"]

Watch = tuple[Literal["enqueued", "landed", "submitted", "ended"], int]
"""What a waiter waits for; the number is a layer, or 0."""

SUBMITTED: Final[Watch] = ("submitted", 0)
ENDED: Final[Watch] = ("ended", 0)


class Burst:
    """The load ops of one hand-out, merged.

    Attributes:
        id: number of the burst, from 1.
        slot: index of the slot it was handed out in.
        generation: that slot's generation.
        num_layers: transfer layers.
        queue: its load ops and their sums; the ops are dropped when it ends.
        waits: how to wait for its progress.
        progress: how far it has got.
        clock: who wants to know when it got where; None where nobody does.
        start_event, fence_event: recorded at hand-out; None where there is nothing to wait for.
        cancelled: it was cancelled before it was begun.
        job_call: has its job begun on the loop; woken as one who waits for everything, until that has begun.
        events: its events, from shortly before it is begun until it has ended and nobody waits for them.
        error: why it failed.
        ack: how it ended; None while it lives.
    """

    def __init__(
        self,
        burst_id: int,
        slot: Slot,
        generation: int,
        queue: OpQueue,
        num_layers: int,
        waits: Waits,
        progress: AnyProgress,
        clock: BurstClock | None,
    ) -> None:
        self.id = burst_id
        self.slot = slot.index
        self.generation = generation
        self.num_layers = num_layers
        self.queue = queue
        self.waits = waits
        self.progress = progress
        self.clock = clock
        self.start_event: Event | None = slot.start_event
        self.fence_event: Event | None = slot.fence_event
        self.inference_mode = torch.is_inference_mode_enabled()
        self.grad_enabled = torch.is_grad_enabled()

        # Reentrant, as a coroutine that the garbage collector ends cleans up in the middle of anything.
        self.lock = threading.RLock()
        self.cancelled = False
        self.error: BaseException | None = None
        self.failed_stage: str | None = None
        self.failed_layer: int | None = None
        self.outcome_logged = False
        self.ack: LoadAck | None = None
        self.events: EventSet | None = None
        self.prepared: Any = None
        self.needs_finish = False
        self.job_call: Waiter | None = None
        self._holders = 0
        self._waiters: dict[Watch, set[Waiter]] = {}
        self._callbacks: list[Callable[[], object]] | None = []

    # -- what everybody may read --------------------------------------------------------------------------------

    @property
    def enqueued(self) -> int:
        """How many layers have been submitted, and their events recorded."""
        enqueued: int = self.progress.enqueued
        return enqueued

    @property
    def landed(self) -> int:
        """How many layers are known to have landed."""
        landed: int = self.progress.landed
        return landed

    @property
    def progress_at(self) -> float:
        """When a layer last landed, in `time.monotonic` seconds; before that, when it was handed out."""
        progress_at: float = self.progress.progress_at
        return progress_at

    @property
    def plane_stage(self) -> Stage:
        """What the data plane is doing with it."""
        progress = self.progress
        return "enqueuing" if progress.planned else "preparing" if progress.begun else "queued"

    @property
    def stale(self) -> bool:
        return self.error is not None or self.cancelled

    @property
    def ended(self) -> bool:
        return self.ack is not None

    @property
    def stage(self) -> Stage:
        """Where its next layer to land is."""
        progress = self.progress
        return "device" if progress.enqueued > progress.landed or progress.submitted else self.plane_stage

    @property
    def slot_is_free(self) -> bool:
        """Whether its slot may be handed out again, read from its own state and finish event.

        The finish event alone would not do: until it has been recorded for this burst it says that an earlier
        one is complete.
        """
        if self.ended:
            return True
        if not (self.progress.submitted and self.progress.finish_recorded):
            return False
        events = self.events
        if events is None:  # the observer took them back: ended a moment ago
            return True
        try:
            return events.ack_finish.query()
        except Exception:
            return False  # the observer meets the same error, ends the burst and wakes whoever waits for the slot

    def failure(self) -> LoadFailedError | LoadCancelledError | None:
        """A fresh exception for one who asks how it went wrong, None if it did not."""
        with self.lock:
            if self.error is not None:
                return LoadFailedError(self.queue.node_ids, self.failed_layer, self.error)
            if self.cancelled:
                return LoadCancelledError(self.queue.node_ids)
            return None

    @contextmanager
    def thread_modes(self) -> Iterator[None]:
        """Inference and grad mode of the thread that handed the burst out; both are thread-local in torch, and
        in-place copies into inference tensors fail outside inference mode."""
        with torch.inference_mode(self.inference_mode), torch.set_grad_enabled(self.grad_enabled):
            yield

    # -- steps of the data plane ----------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Take the burst up; False if it has failed or was cancelled."""
        with self.lock:
            begun: bool = self.progress.begin()
            return begun

    def enter_enqueuing(self, prepared: Any) -> None:
        with self.lock:
            self.prepared = prepared
            self.needs_finish = True
            self.progress.mark_planned()

    def advance_enqueued(self, watermark: int) -> bool:
        """
        :return: whether somebody of the engine's waited for that.
        """
        with self.lock:
            self.progress.advance_enqueued(watermark)
            waiters = self._waiting_for(("enqueued", watermark - 1))
        wake_all(waiters)
        return any(waiter.name for waiter in waiters)

    def fail(self, stage: str, layer: int | None, error: BaseException) -> bool:
        """Mark it failed; waiters on what will not come are released. False if it is past failing."""
        with self.lock:
            if self.stale or self.ended:
                return False
            self.error, self.failed_stage, self.failed_layer = error, stage, layer
            self.progress.give_up(False)
            waiters = self._all_waiters()
        wake_all(waiters)
        return True

    def mark_submitted(self) -> None:
        with self.lock:
            self.progress.mark_submitted()
            waiters = self._waiting_for(SUBMITTED)
        wake_all(waiters)

    # -- steps of the landing observer -----------------------------------------------------------------------------

    def advance_landed(self, watermark: int) -> None:
        with self.lock:
            if watermark <= self.landed:
                return
            reached = range(self.landed, watermark)
            self.progress.advance_landed(watermark)
            waiters = self._waiting_for(*(("landed", layer) for layer in reached))
        wake_all(waiters)

    def wake_reached(self) -> None:
        """Wake whoever waits for a layer that has got there; for a data plane that wakes nobody itself."""
        with self.lock:
            waiters: list[Waiter] = []
            for watch, registered in self._waiters.items():
                if self._want(watch):
                    waiters.extend(registered)
        wake_all(waiters)

    def take_prepared(self) -> tuple[bool, Any]:
        """Whether `prepared` is there to be finished, and it; only the first call gets it."""
        with self.lock:
            needs_finish, self.needs_finish = self.needs_finish, False
            prepared, self.prepared = self.prepared, None
        return needs_finish, prepared

    def end(self, ack: LoadAck) -> tuple[EventSet | None, list[Waiter]]:
        """End with `ack`.

        :return: the events to be used again, None while a waiter still holds them; and whom to wake.
        """
        with self.lock:
            self.ack = ack
            self.progress.mark_submitted()
            self.progress.mark_ended()
            if self.clock is not None:
                self.clock.end()
            self.queue.ops = []
            self.start_event = self.fence_event = None
            return self._release_events(), self._all_waiters()

    def take_callback(self) -> Callable[[], object] | None:
        """The next callback to run now that it has ended; None after the last, those added later run at once."""
        with self.lock:
            if self._callbacks:
                return self._callbacks.pop(0)
            self._callbacks = None
            return None

    def close_callbacks(self) -> bool:
        """Have those that are added from now on run at once; False if there are some to run before."""
        with self.lock:
            if self._callbacks:
                return False
            self._callbacks = None
            return True

    # -- steps of waiters -------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        with self.lock:
            if self.cancelled:
                return True
            if self.progress.submitted or self.error is not None or not self.progress.give_up(True):
                return False
            self.cancelled = True
            waiters = self._all_waiters()
        wake_all(waiters)
        return True

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Keep `callback` for the end; False if that is past and it is the caller's to run."""
        with self.lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def hold_events(self) -> bool:
        """Keep the burst's events from being recorded for another burst; False if it has ended."""
        with self.lock:
            if self.ended:
                return False
            self._holders += 1
            return True

    def drop_events(self) -> EventSet | None:
        """Undo `hold_events`; give back the events to be used again if this was what kept them."""
        with self.lock:
            self._holders -= 1
            return self._release_events() if self.ended else None

    def look_enqueued(self, layer: int, waiter: Waiter | None) -> bool | Pending:
        """Whether `layer` was enqueued: True, False if it never will be, or pending."""
        with self.lock:
            if self.enqueued > layer:
                return True
            if self.stale or self.ended:
                return False
            return self._wait_for(("enqueued", layer), waiter)

    def look_landed(self, layer: int, waiter: Waiter | None) -> bool | Pending:
        """Whether `layer` has landed: True, False if it never will, or pending."""
        with self.lock:
            if self.landed > layer:
                return True
            if self.ended or (self.stale and self.enqueued <= layer):
                return False
            return self._wait_for(("landed", layer), waiter)

    def look_submitted(self, layer: int, waiter: Waiter | None) -> bool | Pending:
        """Whether `layer` is enqueued, or whether the data plane is done with the burst before it came to that."""
        with self.lock:
            if self.enqueued > layer:
                return True
            if self.progress.submitted or self.cancelled:
                return False
            self._register(SUBMITTED, waiter)
            return self._register(("enqueued", layer), waiter)

    def look_ended(self, waiter: Waiter | None) -> LoadAck | Pending | None:
        """The ack; None at once for a cancelled burst, whose ack comes in its turn."""
        with self.lock:
            if self.ack is not None or self.cancelled:
                return self.ack
            return self._register(ENDED, waiter)

    def register_for(self, watches: tuple[Watch, ...], waiter: Waiter) -> None:
        """Register without looking, for one who looks for himself afterwards."""
        with self.lock:
            for watch in watches:
                self._wait_for(watch, waiter)

    def wake(self) -> None:
        """Make whoever waits for it look again."""
        with self.lock:
            waiters = self._all_waiters()
        wake_all(waiters)

    def forget(self, waiter: Waiter) -> None:
        with self.lock:
            for watch in [watch for watch, waiters in list(self._waiters.items()) if waiter in waiters]:
                self._waiters[watch].discard(waiter)
                if not self._waiters[watch]:
                    del self._waiters[watch]

    def thread_waiter(self, watch: Watch) -> Callable[[], BlockedWaiter]:
        """Makes waiters for threads that look for `watch`, a layer."""
        if isinstance(self.progress, Progress):
            return ThreadWaiter
        what, layer = watch
        return lambda: NativeWaiter(self.progress, what == "landed", layer)

    def waiter_names(self) -> list[str]:
        """Who waits for it now, sorted."""
        with self.lock:
            return sorted({waiter.name for waiters in self._waiters.values() for waiter in waiters if waiter.name})

    # -- inside; the lock is held ---------------------------------------------------------------------------------

    def _register(self, watch: Watch, waiter: Waiter | None) -> Pending:
        if waiter is not None:
            self._waiters.setdefault(watch, set()).add(waiter)
            waiter.forget = self.forget
        return PENDING

    def _wait_for(self, watch: Watch, waiter: Waiter | None) -> bool | Pending:
        """Register; True if what is waited for is there all the same."""
        self._register(watch, waiter)
        # A native waiter sees to that itself.
        return True if waiter is not None and not isinstance(waiter, NativeWaiter) and self._want(watch) else PENDING

    def _want(self, watch: Watch) -> bool:
        what, layer = watch
        reached = False
        if what == "enqueued":
            reached = self.progress.want_enqueued(layer)
        elif what == "landed":
            reached = self.progress.want_landed(layer)
        return reached

    def _all_waiters(self) -> list[Waiter]:
        waiters = self._waiting_for(*self._waiters)
        return waiters if (job_call := self.job_call) is None else [*waiters, job_call]

    def _waiting_for(self, *watches: Watch) -> list[Waiter]:
        """Whom to wake. They stay registered until they forget themselves: where a thread of ours is interrupted
        between a step and its wake-ups, the next step or `wake` makes up for those."""
        return [waiter for watch in watches for waiter in self._waiters.get(watch, ())]

    def _release_events(self) -> EventSet | None:
        if self._holders:
            return None
        events, self.events = self.events, None
        return events

"""Landing: noticing that layers have landed, and ending bursts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_sched.ack import AckStatus, LoadAck
from hicache_sched.burst import Burst
from hicache_sched.copy.backend import BurstBackend
from hicache_sched.delivery import Delivery
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.runtime import Event, Stream
from hicache_sched.errors import LoadFailedError
from hicache_sched.event_set import EventSetPool
from hicache_sched.failure import FailureDesk
from hicache_sched.log import is_ctrl_c, say
from hicache_sched.own_thread import ParkedThread
from hicache_sched.protocol import ACK_BACKLOG, TransferProtocol
from hicache_sched.waiting import PENDING, ThreadWaiter


class BurstEnd:
    """Ends bursts once what was submitted of them has landed; on the thread that observed the landing."""

    def __init__(
        self,
        protocol: TransferProtocol,
        backend: BurstBackend,
        h2d_stream: Stream,
        event_sets: EventSetPool,
        failures: FailureDesk,
        delivery: Delivery,
    ) -> None:
        self._protocol = protocol
        self._delivery = delivery
        self._backend = backend
        self._h2d_stream = h2d_stream
        self._event_sets = event_sets
        self._failures = failures

    def synchronize(self, burst: Burst, layer: int | None, what: Event | Stream) -> bool:
        """Block until the device gets there; False where it says that it will not, which fails the burst."""
        try:
            what.synchronize()
        except Exception as exc:
            self._failures.burst_failed(burst, "device", layer, exc)
            return False
        return True

    def wait_finished(self, burst: Burst) -> None:
        """Block until all that was submitted of a burst has landed; the data plane is done with it."""
        events = burst.events
        if self._protocol.lost is not None or events is None:
            return
        if burst.progress.finish_recorded and self.synchronize(burst, None, events.ack_finish):
            return
        # Without a finish event the later bursts are waited for too, which is late but not wrong.
        if self._protocol.lost is None:
            self.synchronize(burst, None, self._h2d_stream)

    def end_once_landed(self, burst: Burst, *, has_landed: bool = False) -> None:
        """End the oldest burst in flight when what was submitted of it has landed; the data plane is done with it.

        :param has_landed: whether it is known to have landed; else this may block.
        """
        if burst.progress.begun and not has_landed:
            self.wait_finished(burst)
        self._protocol.wake()  # the slot is free from here on, however long `finish` takes
        self.end(burst)

    def end(self, burst: Burst) -> None:
        """Finish and publish the oldest burst in flight."""
        num_bytes = burst.progress.num_bytes
        interrupt: BaseException | None = None
        needs_finish, prepared = burst.take_prepared()
        if needs_finish:
            try:
                num_bytes = getattr(prepared, "num_bytes", 0)  # optional in the backend protocol
                with burst.thread_modes():
                    self._backend.finish(prepared)
            except BaseException as exc:
                self._failures.burst_failed(burst, "finish", None, exc)
                interrupt = exc if is_ctrl_c(exc) else None
        ack = burst.ack or self._ack(burst, num_bytes)  # there is one where the publishing was interrupted
        has_news = self._delivery.has_news(burst, ack)
        events, backlog = self._protocol.publish(burst, ack, has_news=has_news)
        if events is not None:
            self._event_sets.give_back(events)
        if backlog:
            say(
                "warning",
                "ack_backlog",
                acks_unpopped=ACK_BACKLOG + 1,
                way_out="call pop_acks() regularly, or set poll_acks=False and use handles or on_ack",
            )
        if interrupt is not None:  # inline mode: it is the caller's
            raise interrupt

    def _ack(self, burst: Burst, num_bytes: int) -> LoadAck:
        failure = burst.failure()
        tokens_by_pool = burst.queue.tokens_by_pool
        if failure is None:
            status = AckStatus.OK
        else:
            status = AckStatus.FAILED if isinstance(failure, LoadFailedError) else AckStatus.CANCELLED
            tokens_by_pool, num_bytes = dict.fromkeys(tokens_by_pool, 0), 0
        return LoadAck(
            burst_id=burst.id,
            slot=burst.slot,
            generation=burst.generation,
            status=status,
            node_ids=tuple(burst.queue.node_ids),
            num_tokens=tokens_by_pool[self._protocol.pool_names[0]],
            num_tokens_by_pool=dict(tokens_by_pool),
            num_bytes=num_bytes,
            duration_ms=_duration_ms(burst) if failure is None else None,
            error=failure if isinstance(failure, LoadFailedError) else None,
        )


def _duration_ms(burst: Burst) -> float | None:
    if burst.events is None:  # its end was interrupted
        return None
    try:
        return burst.events.ack_start.elapsed_time(burst.events.ack_finish)
    except Exception:
        return None  # a runtime whose events have no timing


class LandingObserver(ParkedThread):
    """Follows the oldest burst in flight, blocked in its next layer's event without the GIL."""

    def __init__(
        self,
        thread_name: str,
        device: DeviceBinding,
        failures: FailureDesk,
        on_end: Callable[[], None],
        protocol: TransferProtocol,
        burst_end: BurstEnd,
    ) -> None:
        super().__init__(thread_name, device, failures, on_end)
        self._protocol = protocol
        self._burst_end = burst_end
        self._waiter: ThreadWaiter | None = None
        self._abandoned = False

    def observe(self) -> None:
        """Nobody can do it for this thread, which follows bursts in Python."""

    def abandon(self) -> None:
        """Stop following what is in flight, for the end of the process; must not block."""
        self._abandoned = True
        if (waiter := self._waiter) is not None:
            waiter.wake()
        self.stop()

    def _serve(self) -> None:
        while not self._abandoned and (burst := self._protocol.oldest_in_flight()) is not None:
            self._follow(burst)
            del burst  # a parked thread keeps nothing alive

    def _follow(self, burst: Burst) -> None:
        for layer in range(burst.landed, burst.num_layers):
            if not self._wait_enqueued(burst, layer):
                break
            assert burst.events is not None, "an enqueued layer has an event"
            if not self._burst_end.synchronize(burst, layer, burst.events.layers[layer]):
                break
            burst.advance_landed(layer + 1)
        self._wait_enqueued(burst, burst.num_layers)  # no such layer: this waits until the data plane is done
        if self._abandoned:
            return
        self._burst_end.end_once_landed(burst)

    def _wait_enqueued(self, burst: Burst, layer: int) -> bool:
        """Wait until `layer` is enqueued; False if that will not be."""
        while True:
            # Published before the flag is read: who sets the flag wakes the waiter that it finds.
            waiter = self._waiter = ThreadWaiter(name="")
            if self._abandoned:
                return False
            try:
                found = burst.look_submitted(layer, waiter)
                if found is not PENDING:
                    return found
                waiter.sleep(None)
            finally:
                burst.forget(waiter)


class InlineObserver:
    """Notices landings for inline mode, where no thread of ours does: whoever asks, asks the device."""

    def __init__(
        self,
        failures: FailureDesk,
        protocol: TransferProtocol,
        h2d_stream: Stream,
        burst_end: BurstEnd,
        deliver: Callable[[], None],
    ) -> None:
        self._failures = failures
        self._protocol = protocol
        self._h2d_stream = h2d_stream
        self._burst_end = burst_end
        self._deliver = deliver
        self._lock = threading.Lock()
        self._thread: int | None = None

    @property
    def is_running_here(self) -> bool:
        """Whether the calling thread is inside `finish` or a callback."""
        return self._thread == threading.get_ident()

    def observe(self) -> None:
        """Advance the watermarks as far as the device has got, end what has landed, run its callbacks.

        Returns at once where another thread, or a callback's caller, is at it.
        """
        thread = threading.get_ident()
        if self._thread == thread:
            return
        try:
            with self._lock:
                if self._thread is None:
                    self._thread = thread
            if self._thread != thread:
                return
            while (burst := self._protocol.oldest_in_flight()) is not None and self._has_landed(burst):
                self._burst_end.end(burst)
            self._deliver()
        finally:  # no call in here: Ctrl-C interrupts CPython after calls, and this has to be done
            if self._thread == thread:
                self._thread = None

    def _has_landed(self, burst: Burst) -> bool:
        """Advance the burst's watermark; whether all that was submitted has landed."""
        events, progress = burst.events, burst.progress
        if burst.ended or not progress.begun or events is None:  # its end was interrupted, or it was not begun
            return burst.ended or bool(progress.submitted)
        try:
            if burst.failed_stage != "device":
                while burst.landed < burst.enqueued and events.layers[burst.landed].query():
                    burst.advance_landed(burst.landed + 1)
            if not progress.submitted:
                return False
            if not (events.ack_finish.query() if progress.finish_recorded else self._h2d_stream.query()):
                return False
            if burst.failed_stage != "device":  # the rest of its layers may have landed since they were asked
                burst.advance_landed(burst.enqueued)
            return True
        except Exception as exc:
            self._failures.burst_failed(burst, "device", burst.landed, exc)
            progress.finish_recorded = False  # its events cannot be trusted: the stream has to be asked from now on
            return self._protocol.lost is not None and bool(progress.submitted)

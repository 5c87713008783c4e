"""The device calls of a burst, in their order: on the data plane's thread, or on the caller's in inline mode."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any, Protocol

from hicache_sched.burst import Burst
from hicache_sched.copy.backend import BurstBackend, SubmitsBursts
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.runtime import Stream
from hicache_sched.errors import SchedulerClosedError
from hicache_sched.event_set import EventSet, EventSetPool
from hicache_sched.failure import FailureDesk
from hicache_sched.in_flight import InFlight
from hicache_sched.waiting import give_way


class PlanExecutor(Protocol):
    """Submits planned bursts without Python."""

    def execute(self, burst: Burst, prepared: Any) -> bool:
        """Make every device call of a burst from the wait for its start event on; on the data plane's thread.

        :return: False, having done nothing, where there is no plan.
        :raises Exception: why it failed; its progress says how far it got.
        """


class Submission:
    """Submits bursts to the h2d stream, one at a time.

    Attributes:
        stopped: set when the process ends; the next device call is then not made.
    """

    def __init__(
        self,
        device: DeviceBinding,
        backend: BurstBackend,
        h2d_stream: Stream,
        index_stream: Stream,
        event_sets: EventSetPool,
        failures: FailureDesk,
        in_flight: InFlight,
        executor: PlanExecutor | None = None,
    ) -> None:
        """
        :param executor: who makes the copies of plans, where that is not Python.
        """
        self._device = device
        self._backend = backend
        self._whole_bursts = backend if isinstance(backend, SubmitsBursts) else None
        self._h2d_stream = h2d_stream
        self._index_stream = index_stream
        self._event_sets = event_sets
        self._failures = failures
        self._in_flight = in_flight
        self._executor = executor
        self.stopped = False
        self._woke_somebody = False  # who may not have run since
        self._gave_way_at = 0.0  # in `time.monotonic` seconds
        self._inline_thread: int | None = None

    @property
    def is_running_here(self) -> bool:
        """Whether the calling thread is inside `submit_inline`."""
        return self._inline_thread == threading.get_ident()

    def record_hand_out(self, burst: Burst, fence_stream: Stream | None) -> None:
        """On the caller's thread: what the device has to reach before the burst may read and write.

        Work that either stream gets afterwards does not delay the burst.
        """
        assert burst.start_event is not None
        assert burst.fence_event is not None
        burst.start_event.record(self._device.current_stream())
        if fence_stream is None:
            burst.fence_event = None
        else:
            burst.fence_event.record(fence_stream)

    def submit(self, burst: Burst) -> None:
        """On the data plane's thread: everything between the hand-out and the landing."""
        events = self._begin(burst)
        if events is None:
            return
        try:
            with burst.thread_modes():
                prepared = self._prepare_behind_start(burst)
                burst.enter_enqueuing(prepared)
                if self._executor is None or not self._executor.execute(burst, prepared):
                    self._submit_in_python(burst, prepared, events)
        except BaseException as exc:
            self._fail(burst, events, exc, self._in_flight)
        burst.mark_submitted()  # not in a `finally`: where `_fail` is interrupted the burst is to be abandoned

    def submit_inline(self, burst: Burst, fence_stream: Stream | None) -> None:
        """On the caller's thread: the same device calls, in the same order, as an engine that submits inline."""
        events = self._begin(burst)
        if events is None:
            return
        self._inline_thread = threading.get_ident()
        try:
            prepared = self._backend.prepare(burst.queue.ops)
            burst.enter_enqueuing(prepared)
            assert burst.start_event is not None
            burst.start_event.record(self._device.current_stream())
            if fence_stream is not None:
                self._h2d_stream.wait_stream(fence_stream)
            with self._device.use_stream(self._h2d_stream):
                self._h2d_stream.wait_event(burst.start_event)
                self._submit_layers(burst, prepared, events, None)
        except BaseException as exc:
            self._fail(burst, events, exc, None)
            if not isinstance(exc, Exception):  # Ctrl-C is the caller's; the burst has failed all the same
                raise
        finally:
            self._inline_thread = None
            burst.mark_submitted()

    def abandon(self, burst: Burst) -> None:
        """Fail a burst whose submission was interrupted at a point that nothing is known about."""
        interrupted = RuntimeError("the data plane's thread was interrupted while it submitted the burst")
        if not burst.progress.begun:
            self._failures.burst_failed(burst, burst.plane_stage, None, interrupted)
        elif burst.error is None:
            self._fail(burst, _events(burst), interrupted, self._in_flight)
        burst.mark_submitted()

    def fail(self, burst: Burst, error: BaseException) -> None:
        """Fail a burst that has begun and that is not submitted any further; on the data plane's thread."""
        self._fail(burst, _events(burst), error, self._in_flight)
        burst.mark_submitted()

    def take_events(self, burst: Burst) -> None:
        """Give the burst its events, if it has none yet."""
        if burst.events is None:
            burst.events = self._event_sets.take()

    def _begin(self, burst: Burst) -> EventSet | None:
        try:
            self.take_events(burst)
        except BaseException as exc:
            self._failures.burst_failed(burst, "queued", None, exc)
            burst.mark_submitted()
            if not isinstance(exc, Exception):
                raise
            return None
        if burst.begin():
            return burst.events
        burst.mark_submitted()
        return None

    def _prepare_behind_start(self, burst: Burst) -> Any:
        """Read the indices behind the start event, on the index stream.

        The h2d stream would do for the order, but a read there waits for every earlier burst to land. The thread
        waits for the event rather than for the read: on CUDA a blocking event sleeps where `Tensor.cpu` spins.
        """
        assert burst.start_event is not None
        ops = burst.queue.ops
        if any(self._device.holds(indices) for op in ops for indices in op.all_device_indices):
            burst.start_event.synchronize()
        self._index_stream.wait_event(burst.start_event)
        with self._device.use_stream(self._index_stream):
            return self._backend.prepare(ops)

    def _submit_in_python(self, burst: Burst, prepared: Any, events: EventSet) -> None:
        assert burst.start_event is not None
        with self._device.use_stream(self._h2d_stream):
            self._h2d_stream.wait_event(burst.start_event)
            if burst.fence_event is not None:
                self._h2d_stream.wait_event(burst.fence_event)
            self._submit_layers(burst, prepared, events, self._in_flight)

    def _submit_layers(self, burst: Burst, prepared: Any, events: EventSet, in_flight: InFlight | None) -> None:
        """The h2d stream is current and behind start and fence.

        :param in_flight: what to keep within bounds; None where the thread has nothing better to do than to wait in
            the driver.
        """
        events.ack_start.record(self._h2d_stream)
        self._make_ready(burst, in_flight)
        if self._whole_bursts is not None:

            def on_layer_done(layer: int) -> None:
                if layer != burst.enqueued:
                    raise RuntimeError(f"layer {layer} was submitted, and layer {burst.enqueued} is the next")
                self._layer_done(burst, events, layer, in_flight)
                if burst.enqueued < burst.num_layers:
                    self._make_ready(burst, in_flight)

            self._whole_bursts.submit_burst(prepared, on_layer_done)
            if burst.enqueued < burst.num_layers:
                raise RuntimeError(f"submit_burst() returned after {burst.enqueued} of {burst.num_layers} layers")
        else:
            for layer in range(burst.num_layers):
                if layer > 0:
                    self._make_ready(burst, in_flight)
                self._backend.enqueue_layer(prepared, layer)
                self._layer_done(burst, events, layer, in_flight)
        events.ack_finish.record(self._h2d_stream)
        burst.progress.mark_finish_recorded()

    def _make_ready(self, burst: Burst, in_flight: InFlight | None) -> None:
        """Before a layer: whether it is still wanted, and room for it."""
        if self.stopped:
            raise SchedulerClosedError("the process is ending")
        if burst.error is not None:  # the landing observer saw it fail: its waiters have been released
            raise burst.error
        if in_flight is not None:
            in_flight.make_room()

    def _layer_done(self, burst: Burst, events: EventSet, layer: int, in_flight: InFlight | None) -> None:
        """After a layer's copies."""
        events.layers[layer].record(self._h2d_stream)
        is_awaited = burst.advance_enqueued(layer + 1)
        if in_flight is not None:
            in_flight.add(burst, layer)
            self._woke_somebody |= is_awaited
            self._let_woken_run()

    def _let_woken_run(self) -> None:
        """Whoever was woken needs the GIL to go on, and would not get it before this thread has had it for the switch
        interval, or for many times that where others want it, too. After half of one it is given up."""
        if self._woke_somebody and time.monotonic() - self._gave_way_at >= sys.getswitchinterval() / 2:
            give_way()
            self._gave_way_at, self._woke_somebody = time.monotonic(), False

    def _fail(self, burst: Burst, events: EventSet, error: BaseException, in_flight: InFlight | None) -> None:
        """Fail the burst at the layer that is not enqueued.

        An engine may wait on the raw events of layers that were not submitted: those are recorded behind what was,
        so that it waits for that and no longer. The same goes for the finish event, behind which the pages of the
        burst can be used again. Where the stream has no room for them, waiters are released before.
        """
        stage, layer = burst.plane_stage, None
        if stage == "enqueuing" and burst.enqueued < burst.num_layers:
            layer = burst.enqueued
        missing = range(burst.enqueued, burst.num_layers)
        if in_flight is not None and not in_flight.has_room_for(len(missing)):
            self._failures.burst_failed(burst, stage, layer, error)
        try:
            for number in missing:
                with suppress(Exception):  # where the device is lost none of these works, and none is needed
                    if in_flight is not None:
                        in_flight.make_room()
                    events.layers[number].record(self._h2d_stream)
                    if in_flight is not None:  # not before: an event that is not recorded holds nobody up
                        in_flight.add(burst, number)
            with suppress(Exception):
                events.ack_finish.record(self._h2d_stream)
                burst.progress.mark_finish_recorded()
        finally:
            self._failures.burst_failed(burst, stage, layer, error)


def _events(burst: Burst) -> EventSet:
    assert burst.events is not None, "a burst that has begun has events"
    return burst.events

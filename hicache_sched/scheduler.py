"""The transfer scheduler: what an engine makes, starts and drives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from hicache_sched.ack import LoadAck
from hicache_sched.burst import Burst
from hicache_sched.config import SchedulerConfig
from hicache_sched.copy.backend import BurstBackend
from hicache_sched.copy.planned import planned
from hicache_sched.delivery import Delivery, OnAck
from hicache_sched.device.at_exit import stop_at_exit
from hicache_sched.device.binding import DeviceBinding, default_runtime
from hicache_sched.device.runtime import Stream
from hicache_sched.errors import DeviceLostError, HiCacheSchedError
from hicache_sched.event_set import EventSetPool
from hicache_sched.failure import FailureDesk
from hicache_sched.hand_out import HandOut, SlotWait, slot_wait
from hicache_sched.handle import LoadHandle
from hicache_sched.in_flight import InFlight, LayersInFlight, max_layers_in_flight
from hicache_sched.job import LATEST_BEGIN, Jobs
from hicache_sched.landing import BurstEnd, InlineObserver
from hicache_sched.listeners import BurstListener, Listeners
from hicache_sched.load_op import LoadOp
from hicache_sched.log import say
from hicache_sched.loop_thread import loop_factory
from hicache_sched.native_plane import NativeLayersInFlight, NativePlane, native_plane_for
from hicache_sched.op_queue import check_op
from hicache_sched.protocol import Lifecycle, TransferProtocol, Turn
from hicache_sched.slots import SlotRing
from hicache_sched.stats import SchedulerStats
from hicache_sched.submission import Submission
from hicache_sched.threads import Threads, make_threads, native_thread_names
from hicache_sched.waiting import PENDING, ForkGuard, NotifiedWaits, Pending, PolledWaits, Waiter, Waits, check_timeout


class TransferScheduler:
    """Loads bursts of pages from host to device pools, in order, off the engine scheduler's thread.

    One engine thread (or loop) at a time drives `load`, `start_loading` and `reset`; everything else may be called
    from any thread. A scheduler belongs to the device that is current where it is made.

    Attributes:
        fence_stream: the stream whose earlier work may still write the pages being reloaded, or None; may be set
            at any time, later hand-outs use it.
        device, runtime: where transfers run.
        h2d_stream: the stream that layers are submitted on, once started.
        index_stream: the stream that device indices are read on, once started; None in inline mode.
        plane_reason: once started, why the data plane is not the native one; None where it is, and in inline mode.
    """

    h2d_stream: Any
    index_stream: Any

    def __init__(
        self,
        backend: BurstBackend,
        *,
        runtime: Any = None,
        config: SchedulerConfig | None = None,
        fence_stream: Any = None,
        h2d_stream: Any = None,
        on_ack: OnAck | None = None,
    ) -> None:
        """
        :param backend: how copies are made.
        :param runtime: the device API; None for `torch.cuda` where there is one, else one emulated device.
        :param config: settings, by default `SchedulerConfig()`.
        :param fence_stream: see the attribute.
        :param h2d_stream: the engine's own stream to submit on; None for one of the scheduler's.
        :param on_ack: called with each ack, in order, on the loop thread (inline: on the thread that observes the
            landing), after `pop_acks` has the ack and the handle has resolved. If it raises, that is logged and
            changes nothing. It must not close or reset the scheduler.
        :raises TypeError: `config` is no `SchedulerConfig`, or `on_ack` cannot be called.
        :raises HiCacheSchedError: the backend's `num_layers` or `pool_names` make no sense.
        """
        if config is not None and not isinstance(config, SchedulerConfig):
            raise TypeError(f"config must be a SchedulerConfig or None, not {config!r}")
        if on_ack is not None and not callable(on_ack):
            raise TypeError(f"on_ack must be a function that takes a LoadAck, or None, not {on_ack!r}")
        _check_backend(backend)
        self._backend_name = type(backend).__name__
        self._backend = planned(backend)
        self._config = config or SchedulerConfig()
        self._guard = ForkGuard()
        self.device = DeviceBinding(default_runtime() if runtime is None else runtime)
        self.runtime = self.device.runtime
        self.fence_stream = fence_stream
        self.h2d_stream = h2d_stream
        self.index_stream = None
        self._protocol = TransferProtocol(backend.pool_names, backend.num_layers, self._config.poll_acks)
        self._listeners = Listeners()
        self._delivery = Delivery(self._protocol, on_ack, self._listeners)
        self._notified = NotifiedWaits(self._guard)
        self._threads: Threads | None = None
        self._downgrade_said = False
        self.plane_reason: str | None = None

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the backend, make streams and events, and in async mode the threads. Does nothing while started.

        From here on close it: its threads keep a scheduler that is dropped without `close` until the process ends.

        :raises HiCacheSchedError: it was closed; a closed scheduler works inline as it is.
        """
        self._guard.check()
        if self._protocol.lifecycle is Lifecycle.RUNNING:
            return
        if self._protocol.lifecycle is not Lifecycle.NEW:
            raise HiCacheSchedError("a closed scheduler works inline and is not started again; make a new one")
        config, device, protocol = self._config, self.device, self._protocol
        runs_async = config.mode == "async"
        if self.h2d_stream is None:
            self.h2d_stream = device.new_stream()
        if runs_async:
            self.index_stream = device.new_stream()
        self._backend.bind(self)
        max_layers = max_layers_in_flight(
            config.h2d_queue_ops, config.num_slots, ops_per_layer=getattr(self._backend, "ops_per_layer", 1)
        )
        native_plane, self.plane_reason = self._choose_plane(max_layers)
        event_sets = EventSetPool(device, protocol.num_layers, None if native_plane is None else self.index_stream)
        in_flight: InFlight
        if native_plane is None:
            in_flight = LayersInFlight(max_layers)
        else:
            in_flight = NativeLayersInFlight(native_plane)
            event_sets.stock(config.num_slots)
        self._event_sets = event_sets
        failures = self._failures = FailureDesk(protocol, device, self.h2d_stream)
        self._submission = Submission(
            device, self._backend, self.h2d_stream, self.index_stream, event_sets, failures, in_flight, native_plane
        )
        burst_end = BurstEnd(protocol, self._backend, self.h2d_stream, event_sets, failures, self._delivery)
        self._inline_observer = InlineObserver(failures, protocol, self.h2d_stream, burst_end, self._delivery.run)
        self._polled = PolledWaits(self._guard, self._inline_observer)
        event_loop: str | None = None
        if runs_async:
            make_loop, event_loop = loop_factory(config.event_loop)
            self._threads = make_threads(
                config.thread_name,
                make_loop,
                Jobs(protocol, self._delivery, config.stall_log_interval),
                device,
                failures,
                self._thread_ended,
                protocol,
                self._submission,
                burst_end,
                native_plane,
            )
        slots = SlotRing(config.num_slots, device)
        if native_plane is None:
            protocol.start(slots)
        else:
            protocol.start(slots, native_plane.new_progress, native_plane.new_indices)
        if self._threads is not None:
            self._threads.start()
            stop_at_exit(self)
        say(
            "info",
            "scheduler_started",
            mode=config.mode,
            plane=self._plane_name,
            plane_reason=self.plane_reason,
            event_loop=event_loop,
            num_slots=config.num_slots,
            device=device.name,
            backend=self._backend_name,
            copy_method=getattr(self._backend, "copy_method", "the backend's own"),
        )

    def close(self, timeout: float | None = None) -> None:
        """Drain what was handed out, run its callbacks, end the threads; the scheduler then works inline.

        Load ops that no hand-out has taken stay queued. A hand-out that waits for a slot raises
        `SchedulerClosedError`. Idempotent, from any thread but the scheduler's own. Before `start` it does nothing.
        Where Ctrl-C interrupts it, the scheduler goes on closing: close again.

        :param timeout: seconds to wait at most, None for no limit.
        :raises TransferTimeoutError: `timeout` ran out, as a driver call is stuck. Until a later `close` succeeds
            `load` and hand-outs raise `SchedulerClosedError`: two threads must not submit on one stream.
        :raises HiCacheSchedError: called from inside a callback, which the close would wait for.
        """
        check_timeout(timeout)
        if not self._begin_close():
            return
        self._waits.block(self._look_closed, timeout, "the bursts in flight and the threads, to close")
        self._finish_close()

    async def aclose(self, timeout: float | None = None) -> None:
        """`close` without blocking the calling event loop. A task cancelled meanwhile leaves the scheduler closing;
        close again."""
        check_timeout(timeout)
        if not self._begin_close():
            return
        await self._waits.wait(self._look_closed, timeout, "the bursts in flight and the threads, to close")
        self._finish_close()

    def reset(self, timeout: float | None = None) -> None:
        """Drop queued load ops, drain what was handed out and rotate from slot 0 again; generations go on.

        No ack of an earlier burst reaches `pop_acks` or `on_ack` after this returns; handles still resolve. A
        hand-out that waits for a slot returns None.

        :param timeout: seconds to wait at most, None for no limit.
        :raises TransferTimeoutError: `timeout` ran out; nothing was dropped, and a hand-out goes on waiting.
        :raises HiCacheSchedError: another reset is under way, or called from inside a callback.
        """
        check_timeout(timeout)
        self._begin_reset()
        try:
            self._waits.block(self._protocol.look_reset, timeout, "the bursts in flight, to reset")
        except BaseException:
            self._protocol.abandon_reset()
            raise

    async def areset(self, timeout: float | None = None) -> None:
        """`reset` without blocking the calling event loop. A task cancelled meanwhile has dropped nothing."""
        check_timeout(timeout)
        self._begin_reset()
        try:
            await self._waits.wait(self._protocol.look_reset, timeout, "the bursts in flight, to reset")
        except BaseException:
            self._protocol.abandon_reset()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- engine scheduler side --------------------------------------------------------------------------------------

    def load(self, op: LoadOp) -> None:
        """Queue a load op for the next hand-out.

        No index is read, and the cost is the same for one token and for a million.

        :raises InvalidLoadError: the op is malformed; nothing has changed.
        :raises SchedulerClosedError: the scheduler is closing, or this is a forked child.
        :raises HiCacheSchedError: a reset is under way, which would drop the op.
        """
        self._guard.check()
        check_op(op, self._protocol.pool_names)
        self._protocol.load(op)

    async def start_loading(self, *, fence: Any = None, timeout: float | None = None) -> LoadHandle | None:
        """Hand out everything queued as one burst; None if nothing is.

        With a free slot this completes without suspending. Otherwise it waits until the oldest burst has landed; ops
        loaded meanwhile join. The hand-out itself (slot, start event, fence event, queueing) is one step after the
        wait, so a task cancelled while it waits leaves its ops queued.

        :param fence: fence stream for this burst, instead of `fence_stream`.
        :param timeout: seconds to wait for a slot at most, None for no limit.
        :return: the burst's handle; a failed one if the events could not be recorded. None also where a reset came
            during the wait.
        :raises TransferTimeoutError: `timeout` ran out; the ops stay queued.
        :raises SchedulerClosedError: not started, closing, or this is a forked child.
        :raises DeviceLostError: the device is lost.
        :raises HiCacheSchedError: another hand-out is under way, or the current stream is being captured.
        """
        self._guard.check()  # before the `try`: its end takes a lock, which in a forked child may be held for ever
        check_timeout(timeout)
        turn = Turn(self._listeners.present)
        try:
            hand_out = self._begin_hand_out(turn, fence)
            found = hand_out.look(None)
            if found is PENDING:
                task = asyncio.current_task()
                with self._reported_slot_wait(turn, None if task is None else task.get_name()):
                    found = await hand_out.waits.wait(hand_out.look, timeout, hand_out.what)
            return self._handed_out(found)
        finally:
            turn.over = True  # no call: Ctrl-C interrupts CPython after calls, and this has to be done
            self._fail_unlaunched()

    def start_loading_sync(self, timeout: float | None = None, *, fence: Any = None) -> LoadHandle | None:
        """`start_loading` for an engine scheduler that is a thread: where it would wait, this blocks."""
        self._guard.check()  # before the `try`: its end takes a lock, which in a forked child may be held for ever
        check_timeout(timeout)
        turn = Turn(self._listeners.present)
        try:
            hand_out = self._begin_hand_out(turn, fence)
            found = hand_out.look(None)
            if found is PENDING:
                with self._reported_slot_wait(turn, None):
                    found = hand_out.waits.block(hand_out.look, timeout, hand_out.what)
            return self._handed_out(found)
        finally:
            turn.over = True  # no call: Ctrl-C interrupts CPython after calls, and this has to be done
            self._fail_unlaunched()

    def pop_acks(self) -> list[LoadAck]:
        """Acks published since the last call, in order; each is given once. Empty with `poll_acks=False`."""
        self._observe()
        return self._protocol.pop_acks()

    def handle_for(self, slot: int, generation: int | None = None) -> LoadHandle | None:
        """The handle of the burst that (slot, generation) names, for engines that carry an int.

        :param generation: None for the slot's last burst.
        :return: None if the slot has moved on (that burst has landed, nothing is left to wait for), has not been
            handed out, or was reset since.
        :raises IndexError: there is no such slot.
        """
        self._guard.check()
        burst = self._protocol.burst_in(slot, generation)
        return None if burst is None else self._handle(burst)

    def listen(self, listener: BurstListener) -> None:
        """Have a listener told of each burst that is handed out from now on, when that has ended, and of stalls.

        It is called on the loop thread (inline: on the thread that observes the landing), after `on_ack`. If it raises,
        that is logged and changes nothing. It must not close or reset the scheduler. From any thread, at any time; a
        hand-out that is under way is not told of. While nobody listens nothing is timed.

        :raises TypeError: it is no listener.
        :raises HiCacheSchedError: it listens already.
        """
        self._guard.check()
        self._listeners.add(listener)

    def unlisten(self, listener: BurstListener) -> None:
        """Undo `listen`, also for bursts that have not ended; from any thread.

        It does nothing where the listener does not listen. A call of the listener that has begun goes on.
        """
        self._guard.check()
        self._listeners.remove(listener)

    def stats(self, *, observe: bool = True) -> SchedulerStats:
        """What the scheduler is doing and has done; from any thread.

        :param observe: False for what has been noticed so far: this thread then asks the device nothing, ends no burst
            and, in inline mode, runs no callback. A slot is free then once its burst has ended.
        """
        if observe:
            self._observe()
        else:
            self._guard.check()
        mode = "inline" if self._is_inline else self._config.mode
        return SchedulerStats(mode=mode, plane=self._plane_name, **self._protocol.counts(asks_device=observe))

    @property
    def idle(self) -> bool:
        """True only when nothing is queued, handed out, or acknowledged but not popped yet."""
        self._observe()
        return self._protocol.idle

    @property
    def last_error(self) -> BaseException | None:
        """The newest failure of a burst, a thread of ours or the device; None if there was none."""
        return self._protocol.last_error

    # -- at the end of the process --------------------------------------------------------------------------------

    def stop_at_exit(self) -> None:
        """Stop between two operations, without draining; called by the interpreter's exit."""
        if self._threads is not None:
            self._failures.muted = True
            self._submission.stopped = True
            self._threads.abandon()

    def join_at_exit(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (`time.monotonic` seconds); called by the interpreter's exit."""
        if self._threads is not None:
            self._threads.join(deadline)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _is_inline(self) -> bool:
        return self._threads is None and self._protocol.lifecycle is not Lifecycle.NEW

    @property
    def _plane_name(self) -> str:
        if self._config.mode == "inline" or self._is_inline:
            return "inline"
        return "none" if self._threads is None else self._threads.plane.name

    def _choose_plane(self, max_layers: int) -> tuple[NativePlane | None, str | None]:
        """The native data plane, or why there is none; neither where nobody asks."""
        config = self._config
        if config.mode == "inline":
            return None, None
        if config.plane == "python":
            return None, 'plane="python"'
        plane = native_plane_for(
            self.device,
            self._backend,
            self.h2d_stream,
            self.index_stream,
            max_layers,
            native_thread_names(config.thread_name),
            min(LATEST_BEGIN, config.stall_log_interval),
            plans=config.plane == "auto",
        )
        if isinstance(plane, NativePlane):
            return plane, None
        if config.plane == "native":
            raise HiCacheSchedError(f'plane="native" cannot be had: {plane.reason}; set plane="auto"')
        return None, plane.reason

    @property
    def _waits(self) -> Waits:
        return self._polled if self._is_inline else self._notified

    def _observe(self) -> None:
        """End what has landed: in inline mode nobody else does, else somebody may be late.

        A forked child has nothing to see.
        """
        self._guard.check()
        if (threads := self._threads) is not None:
            threads.observer.observe()
        elif self._is_inline:
            self._inline_observer.observe()

    def _handle(self, burst: Burst) -> LoadHandle:
        return LoadHandle(burst, self.device, self._event_sets, self._guard, self._observe)

    def _begin_hand_out(self, turn: Turn, fence: Any) -> HandOut:
        self._fail_unlaunched()
        has_ops, runs_inline = self._protocol.begin_hand_out(turn), self._is_inline
        if has_ops:
            if self.device.is_capturing():
                raise HiCacheSchedError(
                    "hand-out on a stream that is being captured: the start event would belong to the graph; "
                    "call start_loading() before or after the capture"
                )
            if runs_inline:
                self._inline_observer.observe()
        waits, launch = (self._polled, self._launch_inline) if runs_inline else (self._notified, self._launch)
        return HandOut(self._protocol, turn, fence or self.fence_stream, waits, launch)

    def _fail_unlaunched(self) -> None:
        """A hand-out that Ctrl-C interrupted between its claim and its launch leaves a burst, which owes an ack."""
        if self._protocol.unlaunched is None:  # nearly always; a hand-out that is claiming one sees to it itself
            return
        if (burst := self._protocol.take_unlaunched()) is not None:
            self._failures.burst_failed(burst, "hand-out", None, HiCacheSchedError("the hand-out was interrupted"))
            self._give_over(burst)

    def _launch(self, burst: Burst, fence_stream: Stream | None) -> None:
        """Record the events and queue the burst; it is queued whatever happens, as it has a slot and owes an ack."""
        try:
            self._submission.record_hand_out(burst, fence_stream)
        except BaseException as exc:
            self._failures.burst_failed(burst, "hand-out", None, exc)
            if not isinstance(exc, Exception):
                raise
        finally:
            self._give_over(burst)

    def _give_over(self, burst: Burst) -> None:
        """Leave a burst to the threads; where there are none it has been submitted, or never will be."""
        if self._threads is None:
            burst.mark_submitted()
        else:
            self._threads.hand_over(burst)
        self._protocol.launched()

    def _launch_inline(self, burst: Burst, fence_stream: Stream | None) -> None:
        if self._config.mode == "async" and not self._downgrade_said:
            self._downgrade_said = True
            say("warning", "scheduler_downgraded", mode="inline", why="loading goes on after close()")
        try:
            self._submission.submit_inline(burst, fence_stream)
        except BaseException:
            self._submission.abandon(burst)  # Ctrl-C where `submit_inline` does not see to it
            raise
        finally:
            self._give_over(burst)

    def _handed_out(self, burst: Burst | None) -> LoadHandle | None:
        if burst is None:
            return None
        if isinstance(burst.error, DeviceLostError):
            self._protocol.check_not_lost()
        return self._handle(burst)

    @contextmanager
    def _reported_slot_wait(self, turn: Turn, waiter: str | None) -> Iterator[None]:
        threads = self._threads
        if threads is None:  # inline mode has no stall timers
            yield
            return

        def report(wait: SlotWait) -> None:
            threads.loop.call(threads.jobs.watch_slot, wait)

        with slot_wait(self._protocol, turn, report, waiter):
            yield

    def _begin_reset(self) -> None:
        self._guard.check()
        self._check_not_inside("reset")
        self._fail_unlaunched()
        self._protocol.begin_reset()

    def _begin_close(self) -> bool:
        """False where there is nothing to close."""
        self._guard.check()
        self._check_not_inside("close")
        self._fail_unlaunched()
        return self._protocol.begin_close()

    def _look_closed(self, waiter: Waiter | None) -> bool | Pending:
        """True once everything is drained and the threads, told to end then, have ended."""
        if self._protocol.look_drained(waiter) is PENDING:
            return PENDING
        if (threads := self._threads) is None:
            return True
        threads.stop()
        return self._protocol.look_until(lambda: threads.ended, waiter)

    def _thread_ended(self) -> None:
        """The last call of each of our threads; that they hold it keeps a running scheduler alive for `at_exit`."""
        self._protocol.wake()

    def _finish_close(self) -> None:
        if (threads := self._threads) is not None:
            threads.join()
        self._threads = None
        if self._protocol.finish_close():
            say("info", "scheduler_stopped", device=self.device.name)

    def _check_not_inside(self, what: str) -> None:
        if self._is_inline:
            inside = self._inline_observer.is_running_here or self._submission.is_running_here
        else:
            inside = (threads := self._threads) is not None and threads.is_current
        if inside:
            raise HiCacheSchedError(
                f"{what}() from inside a callback or backend of the scheduler would wait for itself; "
                f"call it from the engine's thread"
            )


def _check_backend(backend: BurstBackend) -> None:
    name = type(backend).__name__
    if type(backend.num_layers) is not int or backend.num_layers < 1:
        raise HiCacheSchedError(f"{name}.num_layers must be an int of at least 1, not {backend.num_layers!r}")
    names = backend.pool_names
    # A string is a sequence of strings, too.
    if isinstance(names, str) or not names or not all(isinstance(pool, str) for pool in names):
        raise HiCacheSchedError(f"{name}.pool_names must be names, the anchor's first, as in ('kv',), not {names!r}")
    if len(set(names)) < len(names):
        raise HiCacheSchedError(f"{name}.pool_names names a pool twice: {names!r}")

"""The threads that live in the native data plane.

They are threads of Python's, in native code where they need no Python: one submits, one waits for landings, one is
told. They come out of it for what is Python's to do: to submit what only Python can, to report what went wrong, to end
bursts. The one that waits for landings never does: what it is told of must not depend on who has the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hicache_sched.burst import Burst
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.failure import FailureDesk
from hicache_sched.landing import BurstEnd
from hicache_sched.native_plane import NativePlane
from hicache_sched.own_thread import DeviceThread
from hicache_sched.protocol import TransferProtocol
from hicache_sched.submission import Submission


class _NativeThread(DeviceThread):
    """A thread that lives in the native data plane, until that is told to stop."""

    def __init__(
        self,
        thread_name: str,
        device: DeviceBinding,
        failures: FailureDesk,
        on_end: Callable[[], None],
        plane: NativePlane,
    ) -> None:
        super().__init__(thread_name, device, failures, on_end)
        self._plane = plane

    def stop(self) -> None:
        self._plane.native.stop()


class NativeDataPlane(_NativeThread):
    """The thread that submits."""

    name = "native"
    sets_alarm = True

    def __init__(
        self,
        thread_name: str,
        device: DeviceBinding,
        failures: FailureDesk,
        on_end: Callable[[], None],
        submission: Submission,
        plane: NativePlane,
    ) -> None:
        super().__init__(thread_name, device, failures, on_end, plane)
        self._submission = submission

    def hand_over(self, burst: Burst) -> None:
        """Queue a burst; on the caller's thread, never blocking."""
        try:
            if not burst.stale:
                self._submission.take_events(burst)
                self._plane.set_up(burst)
        except BaseException as exc:
            self._failures.burst_failed(burst, "hand-out", None, exc)
            if not isinstance(exc, Exception):
                raise
        finally:
            self._plane.hand_over(burst)

    def join(self, deadline: float | None) -> None:
        super().join(deadline)
        if self.ended:
            # The garbage collector does not see what native code refers to, so that a backend which refers to its
            # scheduler would keep both for ever.
            self._plane.native.let_go()

    def _live(self) -> None:
        while (stop := self._plane.native.submit()) is not None:
            why, burst_id, status = stop
            burst = self._plane.burst(burst_id)
            assert burst is not None, "it has not ended"
            if why == "needs owner":
                self._submission.submit(burst)
            elif why == "interrupted":
                self._submission.abandon(burst)
            else:
                self._submission.fail(burst, self._plane.error(burst, status))
            del burst  # a parked thread keeps nothing alive


class NativeLandings(_NativeThread):
    """The thread that waits for landings."""

    def _live(self) -> None:
        self._plane.native.observe()


class NativeLandingObserver(_NativeThread):
    """The thread that is told of landings and ends bursts, where nobody has looked before it has the GIL."""

    def __init__(
        self,
        thread_name: str,
        device: DeviceBinding,
        failures: FailureDesk,
        on_end: Callable[[], None],
        protocol: TransferProtocol,
        plane: NativePlane,
        burst_end: BurstEnd,
    ) -> None:
        super().__init__(thread_name, device, failures, on_end, plane)
        self._protocol = protocol
        self._report = plane.native.report  # which whoever looks asks first
        self._burst_end = burst_end
        self._lock = threading.Lock()
        self._served_by: int | None = None  # the thread that is at a report

    def hint(self) -> None:
        """It knows: bursts are handed over to the plane."""

    def abandon(self) -> None:
        """Stop following what is in flight, for the end of the process; must not block."""
        self._plane.native.abandon()

    def observe(self) -> None:
        """End what has landed, as far as nothing of it can block; on any thread.

        This thread may wait for the GIL as long as the thread that asks keeps it.
        """
        if self._report() is None or self._served_by is not None:
            return
        thread = threading.get_ident()
        try:
            with self._lock:
                if self._served_by is None:
                    self._served_by = thread
                    while (report := self._report()) is not None:
                        if not self._serve(report, may_block=False):
                            self._plane.native.leave_report()
                            break
        finally:  # no call in here: Ctrl-C interrupts CPython after calls, and this has to be done
            if self._served_by == thread:
                self._served_by = None

    def _live(self) -> None:
        thread = threading.get_ident()
        while self._plane.native.next_report() is not None:
            try:
                with self._lock:  # one who looks keeps it for as long as that takes
                    self._served_by = thread
                if (report := self._report()) is not None:
                    self._serve(report, may_block=True)
            finally:
                if self._served_by == thread:
                    self._served_by = None

    def _serve(self, report: tuple[Any, ...], *, may_block: bool) -> bool:
        """Deal with a report; False where that could block and may not."""
        why, burst_id, status = report
        is_last = why == "over"
        burst = self._plane.burst(burst_id)
        if burst is None:  # it was handed over twice
            pass
        elif burst is not self._protocol.oldest_in_flight():  # its end was interrupted once it had been published
            burst.wake()
            self._protocol.wake()
        else:
            has_landed = status is None and (burst.progress.finish_recorded or not burst.progress.begun)
            if not may_block and not (is_last and has_landed and not burst.needs_finish):
                return False
            if is_last:
                self._burst_end.end_once_landed(burst, has_landed=has_landed)
            else:
                self._failures.burst_failed(burst, "device", burst.landed, self._plane.error(burst, status))
        self._plane.pop_report(burst_id, is_last=is_last)
        return True

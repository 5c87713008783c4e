"""The threads that live in the native data plane.

They are threads of Python's, in native code where they need no Python: one submits, one observes. They come out of it
for what is Python's to do: to report what went wrong, to end bursts, to submit what only Python can.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache_sched.burst import Burst
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.failure import FailureDesk
from hicache_sched.landing import BurstEnd
from hicache_sched.native_plane import NativePlane
from hicache_sched.own_thread import DeviceThread
from hicache_sched.protocol import TransferProtocol
from hicache_sched.submission import Submission


class NativeDataPlane(DeviceThread):
    """The thread that submits."""

    name = "native"

    def __init__(
        self,
        thread_name: str,
        device: DeviceBinding,
        failures: FailureDesk,
        on_end: Callable[[], None],
        submission: Submission,
        protocol: TransferProtocol,
        plane: NativePlane,
    ) -> None:
        super().__init__(thread_name, device, failures, on_end)
        self._submission = submission
        self._protocol = protocol
        self._plane = plane

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

    def stop(self) -> None:
        self._plane.native.stop()

    def join(self, deadline: float | None) -> None:
        super().join(deadline)
        if self.ended:
            # The garbage collector does not see what native code refers to, so that a backend which refers to its
            # scheduler would keep both for ever.
            self._plane.native.let_go()

    def _live(self) -> None:
        while (stop := self._plane.native.submit()) is not None:
            why, burst_id, status = stop
            burst = next(burst for burst in self._protocol.bursts_alive() if burst.id == burst_id)
            if why == "needs owner":
                self._submission.submit(burst)
            elif why == "interrupted":
                self._submission.abandon(burst)
            else:
                self._submission.fail(burst, self._plane.error(burst, status))
            del burst  # a parked thread keeps nothing alive


class NativeLandingObserver(DeviceThread):
    """The thread that observes landings, and ends bursts."""

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
        super().__init__(thread_name, device, failures, on_end)
        self._protocol = protocol
        self._plane = plane
        self._burst_end = burst_end

    def hint(self) -> None:
        """It knows: bursts are handed over to the plane."""

    def stop(self) -> None:
        self._plane.native.stop()

    def abandon(self) -> None:
        """Stop following what is in flight, for the end of the process; must not block."""
        self._plane.native.abandon()

    def _live(self) -> None:
        while (stop := self._plane.native.observe()) is not None:
            why, burst_id, status = stop
            burst = self._protocol.oldest_in_flight()
            if burst is not None and burst.id == burst_id:  # else this thread was interrupted after it had ended it
                if why == "failed":
                    self._failures.burst_failed(burst, "device", burst.landed, self._plane.error(burst, status))
                    burst.progress.fail_on_device()
                    continue
                self._burst_end.end_once_landed(burst, has_landed=burst.progress.finish_recorded and status is None)
            self._plane.native.pop_observed(burst_id)
            del burst  # a parked thread keeps nothing alive

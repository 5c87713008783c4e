"""The Python data plane: one worker thread that submits bursts in hand-out order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hicache_sched.burst import Burst
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.failure import FailureDesk
from hicache_sched.own_thread import ParkedThread
from hicache_sched.submission import Submission


class PythonDataPlane(ParkedThread):
    """Submits bursts on a worker thread of its own.

    Attributes:
        sets_alarm: whether the loop learns from it that a burst has not ended for a while.
    """

    name = "python"
    sets_alarm = False

    def __init__(
        self,
        thread_name: str,
        device: DeviceBinding,
        failures: FailureDesk,
        on_end: Callable[[], None],
        submission: Submission,
    ) -> None:
        super().__init__(thread_name, device, failures, on_end)
        self._submission = submission
        self._queue: deque[Burst] = deque()

    def hand_over(self, burst: Burst) -> None:
        """Queue a burst; on the caller's thread, never blocking."""
        self._queue.append(burst)
        self.hint()

    def _serve(self) -> None:
        while self._queue:
            burst = self._queue[0]
            if burst.progress.begun and not burst.progress.submitted:
                self._submission.abandon(burst)
            if not burst.progress.submitted:
                self._submission.submit(burst)
            self._queue.popleft()
            del burst  # a parked thread keeps nothing alive

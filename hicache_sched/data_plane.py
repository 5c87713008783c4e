"""The Python data plane: one worker thread that submits bursts in hand-out order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from hicache_sched.burst import Burst
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.failure import FailureDesk
from hicache_sched.submission import Submission


class OwnThread:
    """A thread of ours that serves until it is told to stop, parked without a timer while there is nothing to do.

    `hint` wakes it; what there is to do it reads from state that it shares, so a hint may come late, twice or for
    nothing. Whatever `_serve` raises is reported and served on: what it was at is still in the shared state.

    Attributes:
        ended: it has nothing more to do than to return; `on_end` is called on it after that.
    """

    def __init__(self, name: str, device: DeviceBinding, failures: FailureDesk, on_end: Callable[[], None]) -> None:
        self._device = device
        self._failures = failures
        self._on_end = on_end
        self.ended = False
        self._hints: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def hint(self) -> None:
        self._hints.put(None)

    def stop(self) -> None:
        """Serve what is there, then end; must not block."""
        self._stopping = True
        self.hint()

    def join(self, deadline: float | None) -> None:
        """Wait until it has ended, or until `deadline` (`time.monotonic` seconds)."""
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with suppress(BaseException):  # interrupted while it reported that it had been
                self._serve_until_stopped()
                self.ended = True
                self._on_end()
                return

    def _serve_until_stopped(self) -> None:
        bound = False
        while True:
            try:
                if not bound:
                    bound = True
                    self._device.bind_thread()
                self._serve()
                if self._stopping:
                    return
                self._hints.get()
            except BaseException as exc:
                self._failures.thread_failed(self._thread.name, exc)

    def _serve(self) -> None:
        """Do what there is to do and return."""
        raise NotImplementedError


class PythonDataPlane(OwnThread):
    """Submits bursts on a worker thread of its own."""

    name = "python"

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
            if burst.begun and not burst.submitted:
                self._submission.abandon(burst)
            if not burst.submitted:
                self._submission.submit(burst)
            self._queue.popleft()
            del burst  # a parked thread keeps nothing alive

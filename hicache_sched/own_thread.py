"""Threads of ours: how they start, go on after whatever they catch, and end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.failure import FailureDesk


class OwnThread:
    """A daemon thread that runs until it is told to stop, whatever is raised in it.

    Attributes:
        ended: it has nothing more to do than to return; `on_end` is called on it after that.
    """

    def __init__(self, name: str, failures: FailureDesk, on_end: Callable[[], None]) -> None:
        self._name = name
        self._failures = failures
        self._on_end = on_end
        self._stopping = False
        self.ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Do what there is to do, then end; must not block."""
        raise NotImplementedError

    def join(self, deadline: float | None) -> None:
        """Wait until it has ended, or until `deadline` (`time.monotonic` seconds)."""
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with suppress(BaseException):  # interrupted while it reported that it had been
                self._run_until_stopped()
                self.ended = True
                self._on_end()
                return

    def _run_until_stopped(self) -> None:
        """Run; report what is raised and go on. Called again where something gets out of it all the same."""
        raise NotImplementedError


_NOT_OURS = signal.valid_signals() - {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
}
"""Signals but those by which a thread is told of its own fault."""


class DeviceThread(OwnThread):
    """A thread that makes device calls.

    Whatever is raised in `_live` is reported, and it is called again: what it was at is still in the shared state.
    """

    def __init__(self, name: str, device: DeviceBinding, failures: FailureDesk, on_end: Callable[[], None]) -> None:
        super().__init__(name, failures, on_end)
        self._device = device

    def _run_until_stopped(self) -> None:
        # A signal interrupts what a thread is blocked in; Python's handlers run in the main thread anyway.
        signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
        bound = False
        while True:
            try:
                if not bound:
                    bound = True
                    self._device.bind_thread()
                self._live()
                return
            except BaseException as exc:
                self._failures.thread_failed(self._name, exc)

    def _live(self) -> None:
        """Serve until told to stop."""
        raise NotImplementedError


class ParkedThread(DeviceThread):
    """A thread that serves, parked without a timer while there is nothing to do.

    `hint` wakes it; what there is to do it reads from state that it shares, so a hint may come late, twice or for
    nothing.
    """

    def __init__(self, name: str, device: DeviceBinding, failures: FailureDesk, on_end: Callable[[], None]) -> None:
        super().__init__(name, device, failures, on_end)
        self._hints: SimpleQueue[None] = SimpleQueue()

    def hint(self) -> None:
        self._hints.put(None)

    def stop(self) -> None:
        self._stopping = True
        self.hint()

    def _live(self) -> None:
        while True:
            self._serve()
            if self._stopping:
                return
            self._hints.get()

    def _serve(self) -> None:
        """Do what there is to do and return."""
        raise NotImplementedError

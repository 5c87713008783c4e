"""What happens when a device call, a backend or a callback raises."""

from __future__ import annotations

from hicache_sched.burst import Burst
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.runtime import Stream
from hicache_sched.errors import DeviceLostError
from hicache_sched.log import say
from hicache_sched.protocol import TransferProtocol


class FailureDesk:
    """Latches failures and tells a failed burst from a lost device; from any thread.

    Attributes:
        muted: set when the process ends: what fails because everything is stopped is nobody's news.
    """

    def __init__(self, protocol: TransferProtocol, device: DeviceBinding, h2d_stream: Stream) -> None:
        self._protocol = protocol
        self._device = device
        self._h2d_stream = h2d_stream
        self.muted = False

    def burst_failed(self, burst: Burst, stage: str, layer: int | None, error: BaseException) -> None:
        """Mark `burst` failed, with a lost device as the cause where that is why."""
        if self.muted:
            return
        lost = self._find_lost(error)
        if burst.fail(stage, layer, lost or error):
            self._protocol.last_error = lost or error

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """One of our threads was about to die of `error`; it goes on."""
        self._protocol.last_error = error
        for burst in self._protocol.bursts_alive():  # a wake-up that it was about to give may be lost
            burst.wake()
        self._protocol.wake()
        if not self.muted:
            say("error", "thread_failed", thread=thread, exc_info=error)

    def _find_lost(self, error: BaseException) -> DeviceLostError | None:
        """A device is lost when a call that has nothing to do with the burst fails as well.

        CUDA's errors of that kind are sticky: every later call returns them (CUDA runtime API, error handling).
        """
        if self._protocol.lost is not None:
            return self._protocol.lost
        try:
            self._h2d_stream.query()
        except Exception:
            lost = DeviceLostError(
                f"the device {self._device.name} is lost, every call on it fails: {type(error).__name__}: {error}"
            )
            lost.__cause__ = error
            if self._protocol.lose(lost) and not self.muted:
                say("error", "device_lost", device=self._device.name, exc_info=error)
            return self._protocol.lost
        return None

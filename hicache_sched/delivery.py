"""Delivery: the log line and the callbacks that follow the end of a burst, in order, once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_sched.ack import LoadAck
from hicache_sched.burst import Burst
from hicache_sched.log import log, say
from hicache_sched.protocol import TransferProtocol

OnAck = Callable[[LoadAck], object]


class Delivery:
    """Runs what is due after bursts have ended; on the loop thread, in inline mode on the observing thread."""

    def __init__(self, protocol: TransferProtocol, on_ack: OnAck | None) -> None:
        self._protocol = protocol
        self._on_ack = on_ack
        self._thread: int | None = None

    @property
    def is_running_here(self) -> bool:
        """Whether the calling thread is inside a callback."""
        return self._thread == threading.get_ident()

    def run(self) -> None:
        """Deliver every burst that has ended; one thread at a time."""
        while (burst := self._protocol.next_undelivered()) is not None:
            self._thread = threading.get_ident()
            try:
                self._deliver(burst)
            finally:
                self._thread = None
                self._protocol.delivered(burst)

    def _deliver(self, burst: Burst) -> None:
        ack = burst.ack
        assert ack is not None
        log_end(burst, ack)
        for callback in burst.take_callbacks():
            self.call("done_callback_failed", burst, callback)
        if self._on_ack is not None:
            on_ack = self._on_ack
            self.call("on_ack_failed", burst, lambda: on_ack(ack))

    @staticmethod
    def call(event: str, burst: Burst, callback: Callable[[], object]) -> None:
        """Run a callback of the engine's; one that raises is logged as `event` and changes nothing."""
        try:
            callback()
        except BaseException as exc:
            say(log.error, event, burst_id=burst.id, slot=burst.slot, generation=burst.generation, exc_info=exc)
            if isinstance(exc, KeyboardInterrupt):  # inline mode: it is the caller's
                raise


def log_failure(burst: Burst) -> None:
    """Log once that a burst has failed."""
    if burst.error is None or burst.failure_logged:
        return
    burst.failure_logged = True
    say(
        log.error,
        "burst_failed",
        burst_id=burst.id,
        slot=burst.slot,
        generation=burst.generation,
        node_ids=list(burst.queue.node_ids),
        layer=burst.failed_layer,
        stage=burst.failed_stage,
        exc_info=burst.error,
    )


def log_end(burst: Burst, ack: LoadAck) -> None:
    names = {"burst_id": burst.id, "slot": burst.slot, "generation": burst.generation}
    if burst.error is not None:
        log_failure(burst)
    elif burst.cancelled:
        say(log.warning, "burst_cancelled", **names, node_ids=list(ack.node_ids))
    else:
        say(
            log.debug,
            "burst_landed",
            **names,
            num_tokens=ack.num_tokens,
            num_bytes=ack.num_bytes,
            duration_ms=ack.duration_ms,
        )

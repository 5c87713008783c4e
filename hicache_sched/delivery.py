"""Delivery: the log line and the callbacks that follow the end of a burst, in order, once."""

from __future__ import annotations

from collections.abc import Callable

from hicache_sched.ack import AckStatus, LoadAck
from hicache_sched.burst import Burst
from hicache_sched.listeners import BurstClock, Listeners, Listening, StallKind
from hicache_sched.log import is_ctrl_c, is_dropped, say
from hicache_sched.protocol import TransferProtocol

OnAck = Callable[[LoadAck], object]


class Delivery:
    """Runs what is due after bursts have ended; on the loop thread, in inline mode on the observing thread."""

    def __init__(self, protocol: TransferProtocol, on_ack: OnAck | None, listeners: Listeners) -> None:
        self._protocol = protocol
        self._on_ack = on_ack
        self._listeners = listeners
        self._acknowledged = 0

    def run(self, *, in_job: bool = False) -> None:
        """Deliver every burst that has ended; one thread at a time. Interrupted, it goes on where it was.

        :param in_job: whether this is the loop, which may come to a burst here before it comes to that burst's job.
        """
        while (burst := self._protocol.next_undelivered()) is not None:
            if in_job and burst.clock is not None:
                burst.clock.begin_job()
            self._deliver(burst)
            self._protocol.delivered(burst)

    def has_news(self, burst: Burst, ack: LoadAck) -> bool:
        """Whether more than callbacks of its own may follow the end of a burst with `ack`; from any thread."""
        is_of_interest = self._on_ack is not None or burst.clock is not None or ack.status is not AckStatus.OK
        return is_of_interest or not is_dropped("debug")

    def tell_stalled(self, what: StallKind) -> None:
        """Tell whoever listens now of something that is stuck; on the loop thread."""
        for listening in self._listeners.present:
            try:
                listening.listener.stalled(what)
            except BaseException as exc:
                say("error", "listener_failed", stalled=what, exc_info=exc)

    def _deliver(self, burst: Burst) -> None:
        ack = burst.ack
        assert ack is not None
        log_end(burst, ack)
        while (callback := burst.take_callback()) is not None:
            self.call("done_callback_failed", burst, callback)
        if self._on_ack is not None and self._acknowledged < burst.id:
            on_ack, self._acknowledged = self._on_ack, burst.id
            self.call("on_ack_failed", burst, lambda: on_ack(ack))
        if (clock := burst.clock) is not None:
            for listening in clock.audience:
                self._tell(listening, burst, ack, clock)

    def _tell(self, listening: Listening, burst: Burst, ack: LoadAck, clock: BurstClock) -> None:
        if listening.over or listening.last_burst >= burst.id:
            return
        listening.last_burst = burst.id
        self.call(
            "listener_failed",
            burst,
            lambda: listening.listener.burst_ended(ack, clock.times(burst.progress, burst.num_layers)),
        )

    @staticmethod
    def call(event: str, burst: Burst, callback: Callable[[], object]) -> None:
        """Run a callback of the engine's; one that raises is logged as `event` and changes nothing."""
        try:
            callback()
        except BaseException as exc:
            say("error", event, burst_id=burst.id, slot=burst.slot, generation=burst.generation, exc_info=exc)
            if is_ctrl_c(exc):  # inline mode: it is the caller's
                raise


def log_failure(burst: Burst) -> None:
    """Log once that a burst has failed."""
    if burst.error is None or burst.outcome_logged:
        return
    burst.outcome_logged = True
    say(
        "error",
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
    log_failure(burst)
    if burst.outcome_logged:
        return
    burst.outcome_logged = True
    if burst.cancelled:
        say("warning", "burst_cancelled", **names, node_ids=list(ack.node_ids))
    else:
        say(
            "debug",
            "burst_landed",
            **names,
            num_tokens=ack.num_tokens,
            num_bytes=ack.num_bytes,
            duration_ms=ack.duration_ms,
        )

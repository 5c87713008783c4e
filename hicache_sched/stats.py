"""A look at a scheduler from outside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What a scheduler was doing when it was asked; made from one look under its lock.

    Attributes:
        mode: "async" or "inline"; a closed scheduler works inline.
        plane: which data plane submits: "native", "python", or "inline" for the caller's thread.
        queued_ops: load ops that no hand-out has taken yet.
        bursts_queued: bursts that the data plane has not begun.
        bursts_in_flight: bursts that it has begun and that have not ended.
        free_slots: slots that could be handed out, whoever's turn it is.
        acks_unpopped: acks that `pop_acks` has not given yet.
        landed_bursts, failed_bursts, cancelled_bursts: how many ended so, ever.
        loaded_tokens: tokens of landed bursts, through the anchor pool.
        loaded_bytes: bytes of landed bursts, as far as the backend says.
    """

    mode: str
    plane: str
    queued_ops: int
    bursts_queued: int
    bursts_in_flight: int
    free_slots: int
    acks_unpopped: int
    landed_bursts: int
    failed_bursts: int
    cancelled_bursts: int
    loaded_tokens: int
    loaded_bytes: int

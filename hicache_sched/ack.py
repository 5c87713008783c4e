"""Acks: the one record that a burst ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hicache_sched.errors import LoadFailedError


class AckStatus(StrEnum):
    """How a burst can end."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class LoadAck:
    """How a burst ended. Published once per burst, in hand-out order, after what was submitted has landed.

    Attributes:
        burst_id: number of the burst, from 1, in hand-out order.
        slot: the slot it was handed out in.
        generation: that slot's generation.
        status: ok, failed or cancelled; device pages of the latter two are stale.
        node_ids: nodes of its load ops, in the order they were loaded.
        num_tokens: tokens loaded through the anchor pool; 0 unless ok.
        num_tokens_by_pool: tokens loaded per pool name; all 0 unless ok.
        num_bytes: bytes moved, as far as the backend says; 0 unless ok.
        duration_ms: device time from the first copy's start to the finish event; None where events have no
            timing, and unless ok.
        error: why it failed, else None.
    """

    burst_id: int
    slot: int
    generation: int
    status: AckStatus
    node_ids: tuple[int, ...]
    num_tokens: int
    num_tokens_by_pool: Mapping[str, int]
    num_bytes: int
    duration_ms: float | None
    error: LoadFailedError | None

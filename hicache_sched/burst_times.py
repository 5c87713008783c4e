"""When a burst got where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BurstTimes:
    """When a burst that has ended got where, in `time.monotonic` seconds; None for what it did not get to.

    Attributes:
        asked: `start_loading` was called.
        handed_out: it had its slot. Its events were recorded and it was queued after that.
        job_began: the loop came to it; None in inline mode, which has no loop.
        begun: the data plane took it up.
        planned: its indices had been read and checked, and its copies planned.
        submitted: the data plane was done with it.
        ended: its ack was published.
        enqueued: each layer had been submitted and its event recorded.
        landed: each layer was seen to have landed, which is later than it did where nobody waited for it.
    """

    asked: float
    handed_out: float
    job_began: float | None
    begun: float | None
    planned: float | None
    submitted: float | None
    ended: float
    enqueued: tuple[float | None, ...]
    landed: tuple[float | None, ...]


class ProgressTimes(NamedTuple):
    """What a burst's progress knows of that; only layers that got there."""

    begun: float | None
    planned: float | None
    submitted: float | None
    enqueued: tuple[float, ...]
    landed: tuple[float, ...]

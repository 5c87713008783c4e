"""How far a burst has got."""

from __future__ import annotations

import time
from typing import Any

from hicache_sched.burst_times import ProgressTimes


class Progress:
    """Watermarks and flags of one burst; they only ever move one way.

    Where the data plane is native, `hicache_sched._native.Burst` stands in for it, which has the same attributes and
    steps and makes some of them itself. Here they are made under the burst's lock.

    Attributes:
        enqueued, landed: the watermarks, in layers.
        begun: the data plane has taken it up.
        planned: its indices have been read and checked.
        submitted: the data plane will not touch it any more.
        finish_recorded: its finish event has been recorded behind all that was submitted.
        progress_at: when a layer last landed, in `time.monotonic` seconds.
        num_bytes: bytes that it moves, as far as the data plane has planned it itself.
    """

    num_bytes = 0

    __slots__ = (
        "_given_up",
        "_times",
        "begun",
        "enqueued",
        "finish_recorded",
        "landed",
        "planned",
        "progress_at",
        "submitted",
    )

    def __init__(self, keeps_times: bool = False) -> None:
        """
        :param keeps_times: whether somebody will want to know when it got where.
        """
        self.enqueued = 0
        self.landed = 0
        self.begun = False
        self.planned = False
        self.submitted = False
        self.finish_recorded = False
        self.progress_at = time.monotonic()
        self._given_up = False
        self._times = _Times() if keeps_times else None

    def begin(self) -> bool:
        """Take the burst up; False if it was given up."""
        if self._given_up:
            return False
        if self._times is not None:
            self._times.begun = time.monotonic()
        self.begun = True
        return True

    def give_up(self, unless_begun: bool) -> bool:
        """Have no more of it submitted; False if it has begun and that matters."""
        if unless_begun and self.begun:
            return False
        self._given_up = True
        return True

    def mark_planned(self) -> None:
        if self._times is not None:
            self._times.planned = time.monotonic()
        self.planned = True

    def advance_enqueued(self, watermark: int) -> None:
        if self._times is not None:
            self._times.enqueued += [time.monotonic()] * (watermark - self.enqueued)
        self.enqueued = watermark

    def advance_landed(self, watermark: int) -> None:
        self.progress_at = time.monotonic()
        if self._times is not None:
            self._times.landed += [self.progress_at] * (watermark - self.landed)
        self.landed = watermark

    def mark_finish_recorded(self) -> None:
        self.finish_recorded = True

    def mark_submitted(self) -> None:
        if self._times is not None and not self.submitted:
            self._times.submitted = time.monotonic()
        self.submitted = True

    def mark_ended(self) -> None:
        """Nobody waits for it on the device any more."""

    def want_enqueued(self, layer: int) -> bool:
        """Have `Burst.wake_reached` called soon after a layer is enqueued; whether it is already.

        Here whoever makes a step wakes those who wait for it.
        """
        return False

    def want_landed(self, layer: int) -> bool:
        return False

    def times(self) -> ProgressTimes | None:
        """When it got where; None where that was not kept."""
        times = self._times
        if times is None:
            return None
        return ProgressTimes(times.begun, times.planned, times.submitted, tuple(times.enqueued), tuple(times.landed))


class _Times:
    __slots__ = ("begun", "enqueued", "landed", "planned", "submitted")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.planned: float | None = None
        self.submitted: float | None = None
        self.enqueued: list[float] = []
        self.landed: list[float] = []


AnyProgress = Any
"""A `Progress`, or a native burst."""

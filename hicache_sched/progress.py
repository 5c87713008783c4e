"""How far a burst has got."""

from __future__ import annotations

import time
from typing import Any


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

    __slots__ = ("_given_up", "begun", "enqueued", "finish_recorded", "landed", "planned", "progress_at", "submitted")

    def __init__(self) -> None:
        self.enqueued = 0
        self.landed = 0
        self.begun = False
        self.planned = False
        self.submitted = False
        self.finish_recorded = False
        self.progress_at = time.monotonic()
        self._given_up = False

    def begin(self) -> bool:
        """Take the burst up; False if it was given up."""
        if self._given_up:
            return False
        self.begun = True
        return True

    def give_up(self, unless_begun: bool) -> bool:
        """Have no more of it submitted; False if it has begun and that matters."""
        if unless_begun and self.begun:
            return False
        self._given_up = True
        return True

    def mark_planned(self) -> None:
        self.planned = True

    def advance_enqueued(self, watermark: int) -> None:
        self.enqueued = watermark

    def advance_landed(self, watermark: int) -> None:
        self.landed = watermark
        self.progress_at = time.monotonic()

    def mark_finish_recorded(self) -> None:
        self.finish_recorded = True

    def mark_submitted(self) -> None:
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


AnyProgress = Any
"""A `Progress`, or a native burst."""

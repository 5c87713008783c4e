"""Stops background threads before the interpreter goes away.

A daemon thread that is inside torch or a driver when the interpreter finalises is ended in the middle of C++
frames, which aborts the process. `atexit` callbacks run before that, so what owns threads registers here and is
stopped first, then joined for a bounded time. One registry for all owners makes that two phases: everything is
told to stop before anything is joined, so a thread that is blocked inside another owner's call is woken by it.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

JOIN_SECONDS = 5.0
"""How long the exit of the process may be held up in all."""


class OwnsThreads(Protocol):
    def stop_at_exit(self) -> None:
        """Tell every thread to stop between two operations; must not block."""

    def join_at_exit(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (`time.monotonic` seconds), not longer."""


_owners: list[weakref.ref[OwnsThreads]] = []
# A forked child has none of its parent's threads, only copies of their locks in whatever state they were.
os.register_at_fork(after_in_child=_owners.clear)


def stop_at_exit(owner: OwnsThreads) -> None:
    """Stop `owner` when the interpreter exits, unless it has been garbage collected by then.

    The last to register is stopped first: it may use what was there before it.
    """
    _owners.append(weakref.ref(owner, _owners.remove))


@atexit.register
def _stop_all() -> None:
    owners = [owner for reference in reversed(_owners) if (owner := reference()) is not None]
    for owner in owners:
        owner.stop_at_exit()
    deadline = time.monotonic() + JOIN_SECONDS
    for owner in owners:
        owner.join_at_exit(deadline)

"""The plug-in's own log lines."""

from __future__ import annotations

from hicache_sched.log import Level, say


def announce(level: Level, what: str) -> None:
    """Log what has become of the plug-in."""
    say(level, f"HiCache async load enqueue: {what}")

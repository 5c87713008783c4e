"""The package's logger, and logging that cannot fail what it reports on."""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, Literal

import structlog

Level = Literal["debug", "info", "warning", "error"]

_log = structlog.get_logger()


def is_ctrl_c(exc: BaseException) -> bool:
    """Whether it is the caller's to handle: the interpreter raises Ctrl-C on the main thread and on no other."""
    return isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def say(level: Level, event: str, **context: Any) -> None:
    """Log one event; a logger that raises is reported on stderr and changes nothing, as in the logging module."""
    try:
        getattr(_log, level)(event, **context)  # structlog makes the logger here, and that can raise, too
    except BaseException as exc:
        if is_ctrl_c(exc):
            raise
        with suppress(Exception):  # stderr may be gone too, and then nobody is left to tell
            sys.stderr.write(f"hicache_sched: logging {event!r} failed:\n")
            traceback.print_exception(exc, file=sys.stderr)

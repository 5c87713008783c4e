"""The package's logger, and logging that cannot fail what it reports on."""

from __future__ import annotations

import logging
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


def is_dropped(level: Level) -> bool:
    """Whether the application's logger is known to drop what is said at `level`, now; False where it does not tell."""
    with suppress(Exception):  # who logs will meet it, too, and says so
        logger = _log.bind()
        for name in ("is_enabled_for", "isEnabledFor"):  # structlog's filtering loggers, and its loggers over logging's
            # Of the type: to a logger that wraps another one any name may be one to log by.
            if (is_enabled := getattr(type(logger), name, None)) is not None:
                return not is_enabled(logger, getattr(logging, level.upper()))
    return False


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

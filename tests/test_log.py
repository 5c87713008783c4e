"""What the package knows of the application's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from hicache_sched.log import Level, is_dropped

LEVELS: list[Level] = ["debug", "info", "warning", "error"]


@pytest.fixture(autouse=True)
def configuration() -> Iterator[None]:
    """What a test configures is undone."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def dropped() -> list[str]:
    return [level for level in LEVELS if is_dropped(level)]


@pytest.mark.parametrize(("level", "expected"), [("debug", 0), ("info", 1), ("warning", 2), ("error", 3)])
def test_a_filtering_logger_says_what_it_drops(level: str, expected: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    assert dropped() == LEVELS[:expected]


@pytest.mark.parametrize(("level", "expected"), [(logging.DEBUG, 0), (logging.WARNING, 2)])
def test_a_logger_of_loggings_says_what_it_drops(level: int, expected: int) -> None:
    structlog.configure(wrapper_class=structlog.stdlib.BoundLogger, logger_factory=structlog.stdlib.LoggerFactory())
    logger = logging.getLogger("hicache_sched")
    before = logger.level
    logger.setLevel(level)
    try:
        assert dropped() == LEVELS[:expected]
    finally:
        logger.setLevel(before)


def test_a_logger_that_cannot_say_is_not_asked_by_logging_to_it() -> None:
    wrapped = structlog.testing.CapturingLogger()  # has a method by any name
    structlog.configure(wrapper_class=structlog.BoundLogger, logger_factory=lambda *args: wrapped)
    assert dropped() == []
    assert wrapped.calls == []


def test_a_logger_that_cannot_be_made_drops_nothing() -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such logger")

    structlog.configure(logger_factory=fail)
    assert dropped() == []

"""Fixtures of the whole suite."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import structlog
import torch

from hicache_sched.device import EmulatedDevice
from tests.builders import MakeScheduler, Schedulers


@pytest.fixture(scope="session", autouse=True)
def plain_tracebacks() -> None:
    """Where rich is installed structlog draws every local variable, which takes seconds for each failure logged."""
    processors = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*processors[:-1], renderer])


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated device of the test's own; its engines are never left held."""
    with EmulatedDevice() as emulated:
        yield emulated


@pytest.fixture
def make_scheduler(device: EmulatedDevice) -> Iterator[MakeScheduler]:
    """Makes started schedulers on `device` and closes them after the test, with nothing held any more."""
    schedulers = Schedulers(device)
    yield schedulers.make
    schedulers.close()


@pytest.fixture
def logs() -> Iterator[list[structlog.types.EventDict]]:
    """What the package logs during the test, as dictionaries."""
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def no_debug_logs() -> Iterator[None]:
    """The application's logger drops what is said at debug, as in production."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    yield
    structlog.configure(**before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on a real device are left out where there is none, unless they were asked for by `make test-gpu`."""
    if torch.cuda.is_available() or os.environ.get("HICACHE_SCHED_TEST_GPU") == "1":
        return
    no_cuda = pytest.mark.skip(reason="needs torch.cuda")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_cuda)

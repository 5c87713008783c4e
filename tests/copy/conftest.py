"""Fixtures of the tests of the copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.emulated import EmulatedDevice
from tests.copy.builders import Point


@pytest.fixture(scope="module")
def emulated() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


@pytest.fixture(scope="module")
def point(emulated: EmulatedDevice) -> Point:
    return Point(DeviceBinding(emulated))

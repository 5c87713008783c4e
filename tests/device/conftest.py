"""The devices that the conformance tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.machines import CudaMachine, EmulatedMachine, Machine


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made: Machine = EmulatedMachine() if request.param == "emulated" else CudaMachine()
    yield made
    made.close()

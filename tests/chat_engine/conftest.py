"""Fixtures of the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_engine.builders import tiny_llama


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_llama()

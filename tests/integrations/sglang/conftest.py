"""SGLang's own controllers and tree over pools of a few tokens, with the emulated device in torch.cuda's place.

They need an environment of their own (`make test-sglang`); elsewhere they are not collected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_sched.device import EmulatedDevice

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.integrations.sglang.engine import Engine, patched

GATE = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"


@pytest.fixture
def engine(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """SGLang as it is."""
    with Engine(device, monkeypatch) as made:
        yield made


@pytest.fixture
def async_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """SGLang with the plug-in's hooks."""
    monkeypatch.setenv(GATE, "1")
    with patched():
        yield engine


@pytest.fixture(params=["plain", "hybrid"])
def make_controller(request: pytest.FixtureRequest, async_engine: Engine) -> Callable[..., Any]:
    """Makes controllers of either class."""
    return async_engine.plain if request.param == "plain" else async_engine.hybrid

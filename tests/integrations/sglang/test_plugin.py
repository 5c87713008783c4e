"""SGLang finds the plug-in and applies it, or leaves it; one process each, as SGLang loads plug-ins once."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_sched.integrations.sglang import plugin, surface
from tests.integrations.sglang.engine import Engine, load, patched

GATE = plugin.GATE

PROGRAM = """
import json, sys, threading
before = set(threading.enumerate())
if len(sys.argv) > 1:
    exec(sys.argv[1])
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
classes = HiCacheController, HybridCacheController, UnifiedRadixCache
originals = [dict(vars(one)) for one in classes]
from sglang.srt.plugins import load_plugins
load_plugins()
changed = [
    f"{one.__name__}.{name}" for one, original in zip(classes, originals)
    for name, value in vars(one).items() if original.get(name) is not value
]
print("RESULT", json.dumps([sorted(changed), [t.name for t in threading.enumerate() if t not in before]]))
"""

ALL = sorted(".".join(hook.target.split(".")[-2:]) for hook in plugin._HOOKS)


def run(program: str = PROGRAM, *args: str, **environment: str) -> tuple[list[str], list[str], str]:
    """(attributes that differ, threads that were started, what was printed) of a process that loads plug-ins."""
    path = [str(Path(__file__).parent / "stubs"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = done.stdout + done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    changed, threads = json.loads(result.removeprefix("RESULT"))
    return changed, threads, printed


def test_with_the_gate_on_every_hook_is_applied() -> None:
    changed, threads, _ = run(**{GATE: "1"})
    assert (changed, threads) == (ALL, [])


def test_with_the_gate_off_not_one_attribute_differs() -> None:
    changed, threads, printed = run(**{GATE: "0"})
    assert (changed, threads) == ([], [])
    assert printed.count("HiCache async load enqueue: disabled") == 1


def test_excluded_by_sglangs_own_setting_it_is_not_even_loaded() -> None:
    changed, threads, printed = run(**{GATE: "1", "SGLANG_PLUGINS": "another"})
    assert (changed, threads) == ([], [])
    assert "HiCache async load enqueue" not in printed


def test_an_sglang_that_it_does_not_know_is_left_alone_and_one_error_says_what_differs() -> None:
    changes = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: "0.6.0" if name == "sglang" else known(name)
from sglang.srt.managers import cache_controller
cache_controller.HiCacheController.reset = lambda self, hard: None
"""
    changed, _, printed = run(PROGRAM, changes, **{GATE: "1"})
    assert changed == []
    assert printed.count("HiCache async load enqueue: disabled") == 1
    assert "its version is 0.6.0, and not 0.5.23" in printed
    assert "HiCacheController.reset() takes ('self', 'hard'), and not ('self',)" in printed


# -- what is checked --------------------------------------------------------------------------------------------------


def test_the_installed_sglang_is_known() -> None:
    assert surface.differences() == []


@pytest.mark.parametrize("method", [each for each in surface._METHODS if each.digest is not None])
def test_a_function_whose_source_is_another_is_noticed(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    owner, name = method.target.rsplit(".", 1)
    original = getattr(surface._find(owner), name)

    def other(self: Any) -> None: ...

    other.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(surface._find(owner), name, other)
    assert surface.differences() == [f"{method.target}() does something else"]


@pytest.mark.parametrize("method", surface._METHODS)
def test_a_method_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    owner, name = method.target.rsplit(".", 1)
    monkeypatch.setattr(surface._find(owner), name, None)
    assert surface.differences() == [f"there is no {method.target}()"]


def test_an_ack_with_other_fields_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface._find(surface._ACK), "_fields", ("start_event",))
    (difference,) = surface.differences()
    assert "has the fields ('start_event',)" in difference


@pytest.mark.parametrize("hook", plugin._HOOKS, ids=lambda hook: hook.target.rsplit(".", 2)[1:])
def test_a_hook_that_was_not_applied_leaves_the_controller_inline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, logs: list[Any], hook: Any
) -> None:
    monkeypatch.setenv(GATE, "1")
    with patched():
        controller = engine.hybrid()
        load(controller, 1, [0, 1])
        if hook.target.endswith("start_loading"):
            assert hook.is_applied()
            return
        owner, name = hook.target.rsplit(".", 1)
        applied = getattr(surface._find(owner), name)
        monkeypatch.setattr(surface._find(owner), name, applied.__wrapped__)
        assert controller.start_loading() == 0
        assert plugin._started_loader(controller) is None
        monkeypatch.undo()
    (said,) = [entry["event"] for entry in logs if "downgraded" in entry["event"]]
    assert said == (
        "HiCache async load enqueue: downgraded to inline (HybridCacheController): "
        f"SGLang has not applied the hooks on {hook.target}"
    )


def test_other_plug_ins_wrappers_may_close_over_anything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE, "1")
    numbers = np.arange(3)
    with patched():
        owner = surface._find(surface.CONTROLLER)
        ours = owner.start_loading

        @functools.wraps(ours)
        def theirs(self: Any) -> Any:
            return ours(self) if numbers.any() else never  # a cell that is empty

        if not numbers.any():
            never = 1
        monkeypatch.setattr(owner, "start_loading", theirs)
        controller = engine.plain()
        load(controller, 1, [0, 1])
        assert controller.start_loading() == 0
        assert plugin._started_loader(controller) is not None
        monkeypatch.undo()


def test_where_another_plug_in_replaces_what_is_hooked_the_controller_is_inline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    monkeypatch.setenv(GATE, "1")
    with patched(
        lambda: HookRegistry.register(f"{surface.CONTROLLER}.start_loading", lambda self: 7, HookType.REPLACE)
    ):
        controller = engine.plain()
        load(controller, 1, [0, 1])
        assert controller.start_loading() == 7
        assert plugin._started_loader(controller) is None
    assert "another plug-in replaces" in logs[-1]["event"]


def test_a_counter_whose_class_was_replaced_is_left_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE, "1")

    class Counter(surface._find(surface.COUNTER)):  # type: ignore[misc]
        def update_producer(self) -> int:
            self.producer_index += 1
            return int(self.producer_index)

    with patched():
        monkeypatch.setattr("sglang.srt.managers.cache_controller.LayerDoneCounter", Counter)
        controller = engine.plain()
        load(controller, 1, [0, 1])
        assert controller.start_loading() == 0
        assert plugin._started_loader(controller) is None


def test_a_counter_that_is_not_sglangs_own_is_left_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE, "1")

    class FlexKVLayerDoneCounter(surface._find(surface.COUNTER)):  # type: ignore[misc]
        pass

    with patched():
        controller = engine.plain()
        counter = controller.layer_done_counter = FlexKVLayerDoneCounter(controller.transfer_layer_id_max)
        events = list(counter.events[0].load_events)
        load(controller, 1, [0, 1])
        assert controller.start_loading() == 0
        assert plugin._started_loader(controller) is None
        assert counter.events[0].load_events == events

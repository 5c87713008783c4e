"""Without the gate SGLang is as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hicache_sched.integrations.sglang import plugin
from tests.integrations.sglang.engine import NUM_LAYERS, Engine, has_loaded, load

LINE = "HiCache async load enqueue: disabled"


def loading_calls(engine: Engine, controller: Any) -> list[str]:
    """Every call, with the slot's event that it is about, and the stream that it is on unless that is the caller's."""
    events = controller.layer_done_counter.events[0]
    names = {id(controller.l2_transfer_engine.host_to_device_stream): "h2d", id(controller.load_fence_stream): "fence"}
    names |= {id(event): f"layer {layer}" for layer, event in enumerate(events.load_events)}
    names[id(events.start_event)] = "start"
    return [
        " ".join(filter(None, (call, names.get(id(what), "an event"), names.get(id(stream)))))
        for call, what, stream, _ in engine.calls
    ]


def test_the_gate_is_off_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.GATE, raising=False)
    assert not plugin._is_wanted()


@pytest.mark.parametrize(
    ("text", "wanted"), [("1", True), ("true", True), ("YES", True), ("y", True), ("0", False), ("False", False)]
)
def test_it_is_read_as_sglang_reads_its_booleans(monkeypatch: pytest.MonkeyPatch, text: str, wanted: bool) -> None:
    monkeypatch.setenv(plugin.GATE, text)
    assert plugin._is_wanted() is wanted


def test_what_is_no_boolean_is_warned_of_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.GATE, "on")
    with pytest.warns(UserWarning, match=plugin.GATE):
        assert not plugin._is_wanted()


def test_nothing_is_registered_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch, logs: list[Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.delenv(plugin.GATE, raising=False)
    before = dict(HookRegistry._hooks)
    plugin.register()
    assert dict(HookRegistry._hooks) == before
    assert [entry["event"] for entry in logs] == [LINE]


@pytest.mark.parametrize("has_fence", [False, True])
def test_a_burst_is_submitted_on_the_callers_thread(engine: Engine, has_fence: bool) -> None:
    controller = engine.plain()
    if has_fence:
        controller.load_fence_stream = engine.device.Stream()
    threads = threading.enumerate()
    device = load(controller, 7, [8, 9, 10, 11])
    engine.calls.clear()
    assert controller.start_loading() == 0
    controller.ack_load_queue[0].finish_event.synchronize()
    assert has_loaded(controller, device, [8, 9, 10, 11])
    assert threading.enumerate() == threads
    assert {thread for *_, thread in engine.calls} == {threading.current_thread().name}
    assert plugin._started_loader(controller) is None
    assert loading_calls(engine, controller) == [
        "record start",
        *(["wait_stream fence h2d"] if has_fence else []),
        "enter h2d h2d",
        "wait start h2d",
        "record an event h2d",
        *(f"record layer {layer} h2d" for layer in range(NUM_LAYERS)),
        "record an event h2d",
        "leave h2d h2d",
        "synchronize an event",
    ]


def test_an_empty_queue_gives_minus_one(engine: Engine) -> None:
    controller = engine.plain()
    assert controller.start_loading() == -1
    assert controller.ack_load_queue == []

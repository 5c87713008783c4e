"""A load that fails: SGLang is told, or serves on, and nothing hangs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_sched import LoadFailedError
from hicache_sched.integrations.sglang import plugin
from tests.integrations.sglang.engine import (
    NUM_LAYERS,
    WAIT,
    Engine,
    Metrics,
    anchor_host,
    has_loaded,
    load,
    patched,
    tree_of,
)
from tests.scheduler.crowd import eventually, in_thread

ERROR = RuntimeError("no copy")


@pytest.fixture(params=["plain", "hybrid"])
def make(request: pytest.FixtureRequest, engine: Engine) -> Callable[[], Any]:
    made: Callable[[], Any] = engine.plain if request.param == "plain" else engine.hybrid
    return made


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is so where nothing is said."""
    monkeypatch.setenv(plugin.GATE, "1")
    monkeypatch.delenv(plugin.ON_FAILURE, raising=False)
    with patched():
        yield


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(plugin.GATE, "1")
    monkeypatch.setenv(plugin.ON_FAILURE, "serve")
    with patched():
        yield


def failed(controller: Any, layer: int = 1) -> Any:
    """Hand out a burst that fails at a layer; gives its ack, once it has ended."""
    anchor_host(controller).failures[layer] = ERROR
    load(controller, 7, [8, 9])
    load(controller, 5, [10, 11])
    controller.start_loading()
    ack = controller.ack_load_queue[-1]
    loader = plugin._started_loader(controller)
    assert loader is not None
    loader.drain()
    return ack


@pytest.mark.usefixtures("raising")
def test_the_next_hand_out_raises_and_so_does_every_later_one(make: Callable[[], Any], logs: list[Any]) -> None:
    controller = make()
    failed(controller)
    load(controller, 1, [0])
    for _ in range(2):
        with pytest.raises(LoadFailedError) as failure:
            controller.start_loading()
        assert failure.value.cause is ERROR
        assert failure.value.node_ids == (7, 5)
    assert len(controller.ack_load_queue) == 1
    assert len(controller.load_queue) == 1, "nothing is lost"
    eventually(lambda: "burst_failed" in [entry["event"] for entry in logs])
    (said,) = [entry for entry in logs if entry["event"] == "burst_failed"]
    assert (said["node_ids"], said["layer"]) == ([7, 5], 1)


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("asks", ["query", "synchronize"])
def test_whoever_asks_whether_it_is_done_is_told_before_that(make: Callable[[], Any], asks: str) -> None:
    controller = make()
    ack = failed(controller)
    with pytest.raises(LoadFailedError):
        getattr(ack.finish_event, asks)()
    with pytest.raises(LoadFailedError):
        tree_of(controller).is_load_back_event_done(0)


@pytest.mark.usefixtures("raising")
def test_a_forward_does_not_run_on_what_was_not_loaded(make: Callable[[], Any]) -> None:
    controller = make()
    ack = failed(controller)
    counter = controller.layer_done_counter
    counter.set_consumer(counter.producer_index)
    for layer in range(NUM_LAYERS):
        with pytest.raises(LoadFailedError):
            counter.wait_until(layer)
    with pytest.raises(LoadFailedError):
        ack.finish_event.wait()


@pytest.mark.usefixtures("raising")
def test_of_two_that_fail_the_first_is_told(engine: Engine) -> None:
    controller = engine.plain()
    engine.device.hold("h2d")
    loader = None
    for node, layer in ((1, 1), (2, 2)):
        anchor_host(controller).failures[layer] = RuntimeError(f"of node {node}")
        load(controller, node, [node])
        controller.start_loading()
        loader = plugin._started_loader(controller)
        assert loader is not None
        engine.device.resume("h2d")
    assert loader is not None
    loader.drain()
    for _ in range(3):
        with pytest.raises(LoadFailedError) as failure:
            controller.start_loading()
        assert failure.value.node_ids == (1,)
    assert len(traceback.extract_tb(failure.value.__traceback__)) < 10, "it does not grow"


@pytest.mark.usefixtures("raising")
def test_a_reset_forgets_it_with_the_prefixes(make: Callable[[], Any]) -> None:
    controller = make()
    failed(controller)
    controller.reset()
    assert tree_of(controller).is_load_back_event_done(controller.layer_done_counter.producer_index)
    device = load(controller, 1, [0, 1])
    controller.start_loading()
    controller.ack_load_queue[0].finish_event.synchronize()
    assert has_loaded(controller, device, [0, 1])


@pytest.mark.usefixtures("serving")
def test_served_on_its_ack_says_nothing_was_moved_and_the_next_burst_is_served(
    make: Callable[[], Any], logs: list[Any]
) -> None:
    controller = make()
    tree = tree_of(controller, metrics_collector=Metrics())
    tree.ongoing_load_back.update({node: (node, None, None) for node in (7, 5)})
    ack = failed(controller)
    device = load(controller, 1, [0, 1])
    controller.start_loading()
    tree.ongoing_load_back[1] = (1, None, None)
    controller.ack_load_queue[-1].finish_event.synchronize()
    assert has_loaded(controller, device, [0, 1])
    assert ack.node_ids == [7, 5]
    assert (ack.num_tokens, ack.num_tokens_by_pool, ack.num_bytes, ack.timing_enabled) == (0, {}, 0, False)
    tree.loading_check()
    assert tree.released == [7, 5, 1]
    assert (tree.metrics_collector.tokens, tree.metrics_collector.num_bytes) == ({"kv": 2}, 20)
    assert len(tree.metrics_collector.durations) == 1


@pytest.mark.usefixtures("serving")
def test_a_side_pool_that_fails_fails_its_burst(engine: Engine) -> None:
    controller = engine.hybrid()
    side = controller.mem_pool_host.entries[1].host_pool
    side.failures[1] = ERROR
    load(controller, 7, [8, 9], [20, 21])
    controller.start_loading()
    load(controller, 8, [0, 1], [22, 23])
    controller.start_loading()
    first, second = controller.ack_load_queue
    for ack in (first, second):
        ack.finish_event.synchronize()
    assert (first.num_tokens_by_pool, first.num_bytes) == ({}, 0)
    assert second.num_tokens_by_pool == {"kv": 2, "swa": 2}
    assert engine.made[-1] == ("swa", 1, [22, 23])


@pytest.mark.usefixtures("serving")
def test_served_on_whoever_waits_for_its_layers_is_released(make: Callable[[], Any], engine: Engine) -> None:
    controller = make()
    engine.device.hold("h2d")
    anchor_host(controller).failures[1] = ERROR
    load(controller, 7, [8, 9])
    slot = controller.start_loading()
    events = controller.layer_done_counter.events[slot]
    waiting = [in_thread(lambda layer=layer: events.wait(layer)) for layer in range(NUM_LAYERS)]  # type: ignore[misc]
    assert not any(waiter.done() for waiter in waiting)
    engine.device.resume("h2d")  # the engine waits for what it has submitted before it raises
    for waiter in waiting:
        waiter.result(WAIT)
    eventually(lambda: tree_of(controller).is_load_back_event_done(slot))


@pytest.mark.usefixtures("raising")
def test_events_of_layers_that_failed_are_recorded_on_the_h2d_stream(make: Callable[[], Any], engine: Engine) -> None:
    controller = make()
    engine.calls.clear()
    failed(controller, layer=0)
    h2d = controller.l2_transfer_engine.host_to_device_stream
    recorded = [what for call, what, stream, _ in engine.calls if call == "record" and stream is h2d]
    handle = controller.ack_load_queue[0]._burst.handle
    assert len(recorded) >= NUM_LAYERS + 1
    assert handle.stale


def test_the_setting_is_said_at_start_up(monkeypatch: pytest.MonkeyPatch, logs: list[Any]) -> None:
    monkeypatch.setenv(plugin.GATE, "1")
    monkeypatch.setenv(plugin.ON_FAILURE, "serve")
    with patched():
        pass
    (said,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert plugin.ON_FAILURE in said["event"]


def test_a_setting_that_is_none_leaves_sglang_as_it_is(monkeypatch: pytest.MonkeyPatch, logs: list[Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setenv(plugin.GATE, "1")
    monkeypatch.setenv(plugin.ON_FAILURE, "ignore")
    with patched():
        assert not HookRegistry._hooks
    (said,) = logs
    assert said["log_level"] == "error"
    assert "must be one of raise, serve, not 'ignore'" in said["event"]

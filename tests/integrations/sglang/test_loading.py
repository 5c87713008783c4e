"""With the gate: the hand-out on SGLang's scheduler thread, all else as a job, in the order that SGLang has it in."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_sched.integrations.sglang import plugin
from tests.integrations.sglang.engine import NUM_LAYERS, WAIT, WIDTH, Engine, anchor_host, has_loaded, load, tree_of
from tests.scheduler.crowd import eventually, in_thread
from tests.scheduler.interrupt import InterruptAfterCall

WORKER = "hicache-sched-worker"


def calls_by(engine: Engine, thread: str) -> list[tuple[str, Any, Any]]:
    return [(call, what, stream) for call, what, stream, name in engine.calls if name == thread]


def finish(controller: Any, ack: int = -1) -> None:
    controller.ack_load_queue[ack].finish_event.synchronize()


def test_each_controller_says_that_it_is_enabled_when_it_is_built(
    make_controller: Callable[..., Any], logs: list[Any]
) -> None:
    controller = make_controller()
    line = f"HiCache async load enqueue: enabled ({type(controller).__name__})"
    assert [entry["event"] for entry in logs] == [line]


def test_a_controller_that_loads_nothing_starts_no_thread(make_controller: Callable[..., Any]) -> None:
    threads = threading.enumerate()
    controller = make_controller()
    assert controller.start_loading() == -1
    assert threading.enumerate() == threads
    assert plugin._started_loader(controller) is None


def test_the_bytes_arrive(make_controller: Callable[..., Any]) -> None:
    controller = make_controller()
    device = load(controller, 7, [8, 9, 10, 11])
    assert controller.start_loading() == 0
    assert controller.load_queue == []
    finish(controller)
    assert has_loaded(controller, device, [8, 9, 10, 11])


def test_the_hand_out_returns_while_the_job_submits(async_engine: Engine, make_controller: Callable[..., Any]) -> None:
    controller = make_controller()
    entered, gate = threading.Event(), threading.Event()
    threads: list[str] = []

    def before(layer: int) -> None:
        threads.append(threading.current_thread().name)
        entered.set()
        assert gate.wait(WAIT)

    anchor_host(controller).before = before
    load(controller, 7, [0, 1, 2, 3])
    async_engine.calls.clear()
    assert controller.start_loading() == 0
    ack = controller.ack_load_queue[0]
    assert entered.wait(WAIT)
    assert not ack.finish_event.query()
    gate.set()
    ack.finish_event.synchronize()
    assert set(threads) == {WORKER}
    here = [call for call, *_ in calls_by(async_engine, threading.current_thread().name)]
    assert here == ["record"], "the start event, and nothing else"


def test_the_device_is_bound_once_and_by_no_thread_of_the_engines(
    async_engine: Engine, make_controller: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    monkeypatch.setattr(async_engine.device, "set_device", lambda device: bound.append(threading.current_thread().name))
    controller = make_controller()
    for node in range(4):
        load(controller, node, [node])
        controller.start_loading()
        finish(controller)
    assert bound.count(WORKER) == 1
    assert threading.current_thread().name not in bound


def test_the_fence_is_taken_at_the_hand_out_and_waited_for_behind_the_index_move(
    async_engine: Engine, make_controller: Callable[..., Any]
) -> None:
    controller = make_controller()
    forward = controller.load_fence_stream = async_engine.device.Stream()
    h2d = controller.l2_transfer_engine.host_to_device_stream
    load(controller, 7, [0, 1, 2, 3])
    async_engine.calls.clear()
    controller.start_loading()
    finish(controller)
    (start, _), (fence, fence_stream) = [
        (what, stream)
        for call, what, stream in calls_by(async_engine, threading.current_thread().name)
        if call == "record"
    ]
    assert fence_stream is forward
    made = [
        (call, what)
        for call, what, stream in calls_by(async_engine, WORKER)
        if stream in (h2d, plugin._started_loader(controller).scheduler.index_stream)  # type: ignore[union-attr]
        and call in ("wait", "record", "wait_event")
    ]
    waits = [what for call, what in made if "wait" in call]
    records = [what for call, what in made if call == "record"]
    moved = records[0]
    assert waits.index(start) < waits.index(fence) < waits.index(moved)
    assert made.index(("record", moved)) < [what for _, what in made].index(fence), (
        "the fence does not hold the move up"
    )


def test_indices_are_moved_behind_the_start_event(async_engine: Engine) -> None:
    controller = async_engine.plain(layout="layer_first")  # whose move reads them
    device = load(controller, 7, [8, 9, 10, 11])
    values = device.clone()
    device.zero_()  # garbage until the engine's stream has got there
    engine_stream = async_engine.device.Stream()
    async_engine.device.hold("compute")
    with async_engine.device.stream(engine_stream):
        async_engine.device.launch(lambda: device.copy_(values))
        controller.start_loading()
    assert async_engine.made == []
    async_engine.device.resume("compute")
    finish(controller)
    assert has_loaded(controller, values, [8, 9, 10, 11])


def test_a_queued_bursts_index_move_does_not_wait_for_an_earlier_bursts_copies(
    async_engine: Engine, make_controller: Callable[..., Any]
) -> None:
    controller = make_controller()
    async_engine.device.hold("h2d")
    for node in (1, 2):
        load(controller, node, [4 * node, 4 * node + 1, 4 * node + 2, 4 * node + 3])
        controller.start_loading()
    eventually(lambda: len([made for made in async_engine.made if made[0] == "kv"]) == 2 * (1 + NUM_LAYERS))
    assert not controller.ack_load_queue[0].finish_event.query()
    async_engine.device.resume("h2d")
    finish(controller)


def test_bursts_are_submitted_in_order_and_land_layer_by_layer(async_engine: Engine) -> None:
    controller = async_engine.plain()
    async_engine.device.hold("h2d")
    devices = []
    for node in (1, 2, 3):
        devices.append(load(controller, node, [4 * node, 4 * node + 1]))
        assert controller.start_loading() == node - 1
    for burst in range(3):
        for layer in range(NUM_LAYERS):
            assert not controller.ack_load_queue[burst].finish_event.query()
            async_engine.device.step("h2d")
            event = controller.layer_done_counter.events[burst].load_events[layer]
            eventually(event.query)
        eventually(controller.ack_load_queue[burst].finish_event.query)
        assert has_loaded(controller, devices[burst], [4 * burst + 4, 4 * burst + 5])
    assert [made[1] for made in async_engine.made if made[1] != "prepare"] == [*range(NUM_LAYERS)] * 3


def test_what_is_queued_is_merged_and_the_ack_names_every_node(make_controller: Callable[..., Any]) -> None:
    controller = make_controller()
    first, second = load(controller, 7, [8, 9]), load(controller, 3, [1, 0])
    controller.start_loading()
    (ack,) = controller.ack_load_queue
    assert ack.node_ids == [7, 3]
    finish(controller)
    assert has_loaded(controller, torch.cat([first, second]), [8, 9, 1, 0])
    assert (ack.num_tokens, ack.num_tokens_by_pool, ack.num_bytes) == (4, {"kv": 4}, 40)


def test_an_acks_sizes_and_timing_are_sglangs_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integrations.sglang.engine import patched

    inline = engine.hybrid()
    load(inline, 1, [0, 1, 2, 3], [4, 5])
    inline.start_loading()
    stock = inline.ack_load_queue[0]
    monkeypatch.setenv(plugin.GATE, "1")
    with patched():
        controller = engine.hybrid()
        load(controller, 1, [0, 1, 2, 3], [4, 5])
        controller.start_loading()
        ack = controller.ack_load_queue[0]
        ack.finish_event.synchronize()
    for field in ("node_ids", "num_tokens", "timing_enabled", "num_tokens_by_pool", "num_bytes"):
        assert getattr(ack, field) == getattr(stock, field), field
    assert ack.start_event.elapsed_time(ack.finish_event) >= 0


def test_a_fourth_burst_waits_for_the_first_ones_slot(async_engine: Engine) -> None:
    controller = async_engine.plain()
    async_engine.device.hold("h2d")
    slots = []
    for node in range(3):
        load(controller, node, [node])
        slots.append(controller.start_loading())
    load(controller, 3, [3])
    fourth = in_thread(controller.start_loading)
    eventually(lambda: plugin._started_loader(controller).scheduler._protocol._waiters != set())  # type: ignore[union-attr]
    assert not fourth.done()
    assert len(controller.ack_load_queue) == 3
    async_engine.device.step("h2d", NUM_LAYERS)
    assert [*slots, fourth.result(WAIT)] == [0, 1, 2, 0]
    async_engine.device.resume("h2d")
    finish(controller)


def test_the_job_runs_with_the_modes_of_the_engines_thread(async_engine: Engine) -> None:
    controller = async_engine.plain()
    seen: list[tuple[bool, bool]] = []
    anchor_host(controller).before = lambda layer: seen.append(
        (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    )
    with torch.inference_mode():
        load(controller, 1, [0])
        controller.start_loading()
    with torch.enable_grad():
        load(controller, 2, [1])
        controller.start_loading()
    finish(controller)
    assert seen == [(True, False)] * NUM_LAYERS + [(False, True)] * NUM_LAYERS


def test_pools_made_under_inference_mode_are_loaded(async_engine: Engine) -> None:
    with torch.inference_mode():
        controller = async_engine.plain()
        device = load(controller, 1, [5, 6])
        controller.start_loading()
        finish(controller)
        assert has_loaded(controller, device, [5, 6])


def test_reset_waits_for_what_was_handed_out_and_no_ack_comes_back(
    async_engine: Engine, make_controller: Callable[..., Any]
) -> None:
    controller = make_controller()
    async_engine.device.hold("h2d")
    load(controller, 1, [0, 1])
    controller.start_loading()
    load(controller, 2, [2, 3])  # not handed out: SGLang forgets it
    resetting = in_thread(controller.reset)
    eventually(lambda: len(async_engine.made) == 1 + NUM_LAYERS)
    assert not resetting.done()
    assert len(controller.ack_load_queue) == 1
    async_engine.device.resume("h2d")
    resetting.result(WAIT)
    assert controller.ack_load_queue == controller.load_queue == []
    device = load(controller, 3, [4, 5])
    controller.start_loading()
    finish(controller)
    assert [ack.node_ids for ack in controller.ack_load_queue] == [[3]]
    assert has_loaded(controller, device, [4, 5])


def test_a_reset_forgets_a_hand_out_that_was_interrupted(async_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = async_engine.plain()
    device = load(controller, 1, [0])
    controller.start_loading()
    finish(controller)
    load(controller, 3, [6])
    loader = plugin._started_loader(controller)
    assert loader is not None

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loader.scheduler, "start_loading_sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            controller.start_loading()
    controller.reset()
    controller.mem_pool_device.layers[0].zero_()
    device = load(controller, 4, [9])
    controller.start_loading()
    finish(controller)
    assert [ack.node_ids for ack in controller.ack_load_queue] == [[4]]
    assert controller.ack_load_queue[0].num_tokens == 1
    assert torch.equal(controller.mem_pool_device.layers[0][device], anchor_host(controller).layers[0][[9]])
    assert controller.mem_pool_device.layers[0].count_nonzero() == WIDTH, "and nothing else"


def test_a_hand_out_that_was_interrupted_at_its_end_after_a_reset_is_found(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = async_engine.plain()
    load(controller, 1, [0])
    controller.start_loading()
    controller.reset()
    loader = plugin._started_loader(controller)
    assert loader is not None
    hand_out = loader.scheduler.start_loading_sync

    def interrupted() -> None:
        hand_out()
        raise KeyboardInterrupt

    device = load(controller, 2, [7])
    with monkeypatch.context() as patch:
        patch.setattr(loader.scheduler, "start_loading_sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            controller.start_loading()
    assert controller.start_loading() == 0, "slots rotate from 0 again"
    finish(controller)
    assert has_loaded(controller, device, [7])
    assert [ack.node_ids for ack in controller.ack_load_queue] == [[2]]


@pytest.mark.parametrize("function", ["start_loading", "_hand_out", "_publish", "load", "start_loading_sync"])
def test_ctrl_c_in_a_hand_out_loses_nothing_and_repeats_nothing(async_engine: Engine, function: str) -> None:
    controller = async_engine.plain()
    load(controller, 0, [0])
    controller.start_loading()
    finish(controller)
    num_bursts = 1
    for call in itertools.count():
        controller.ack_load_queue.clear()
        device = torch.cat([load(controller, node, [4 * node, 4 * node + 1]) for node in (1, 2)])
        tokens, nodes = [4, 5, 8, 9], [1, 2]
        interrupt = InterruptAfterCall(function, call)
        sys.setprofile(interrupt)
        try:
            controller.start_loading()
        except KeyboardInterrupt:
            sys.setprofile(None)
            device = torch.cat([device, load(controller, 3, [12])])  # the engine goes on in between
            tokens, nodes = [*tokens, 12], [*nodes, 3]
            while controller.load_queue:
                controller.start_loading()
        finally:
            sys.setprofile(None)
        finish(controller)
        assert has_loaded(controller, device, tokens)
        assert [node for ack in controller.ack_load_queue for node in ack.node_ids] == nodes
        assert sum(ack.num_tokens for ack in controller.ack_load_queue) == len(tokens)
        num_bursts += len(controller.ack_load_queue)
        assert controller.layer_done_counter.producer_index == (num_bursts - 1) % 3
        assert plugin._started_loader(controller).scheduler.stats().landed_bursts == num_bursts  # type: ignore[union-attr]
        if not interrupt.done:
            break
        controller.mem_pool_device_allocator._next = 0
        for layer in controller.mem_pool_device.layers:
            layer.zero_()
    assert call > 0, "it was interrupted at all"


def test_a_wait_is_for_the_stream_that_is_given(async_engine: Engine) -> None:
    controller = async_engine.plain()
    device, read = load(controller, 1, [5, 6]), []
    stream, current = async_engine.device.Stream(), async_engine.device.Stream()
    async_engine.device.hold("h2d")
    slot = controller.start_loading()
    finish_event = controller.ack_load_queue[0].finish_event
    with async_engine.device.stream(current):  # on which a wait does not block
        for event in (controller.layer_done_counter.events[slot].load_events[NUM_LAYERS - 1], finish_event):
            stream.wait_event(event)
            with async_engine.device.stream(stream):
                async_engine.device.launch(
                    lambda: read.append(controller.mem_pool_device.layers[NUM_LAYERS - 1][device].clone())
                )
    async_engine.device.resume("h2d")
    stream.synchronize()
    wanted = anchor_host(controller).layers[NUM_LAYERS - 1][[5, 6]]
    assert [torch.equal(got, wanted) for got in read] == [True, True]


def test_nothing_is_kept_of_bursts_whose_acks_were_popped(async_engine: Engine) -> None:
    controller = async_engine.plain()
    for node in range(20):
        load(controller, node, [node])
        controller.start_loading()
        finish(controller)
        controller.ack_load_queue.clear()
    loader = plugin._started_loader(controller)
    assert loader is not None
    assert loader.scheduler.stats().acks_unpopped == 0
    assert len(loader._outstanding) == 1, "the last, until the next hand-out"


def test_an_ack_that_has_not_landed_has_no_sizes_and_no_duration(async_engine: Engine) -> None:
    controller = async_engine.plain()
    async_engine.device.hold("h2d")
    load(controller, 1, [0, 1])
    slot = controller.start_loading()
    (ack,) = controller.ack_load_queue
    assert (ack.num_tokens, ack.num_bytes, ack.timing_enabled) == (0, 0, False)
    with pytest.raises(RuntimeError, match="has not landed"):
        ack.start_event.elapsed_time(ack.finish_event)
    last = controller.layer_done_counter.events[slot].finish_event
    waiting = in_thread(last.synchronize)
    assert not waiting.done()
    async_engine.device.resume("h2d")
    waiting.result(WAIT)
    assert last.query()


# -- hybrid -----------------------------------------------------------------------------------------------------------


def test_a_side_pools_transfers_are_merged_and_reach_the_engine(async_engine: Engine) -> None:
    controller = async_engine.hybrid()
    load(controller, 1, [0, 1], [10, 11])
    load(controller, 2, [2, 3], [20, 21])
    controller.start_loading()
    finish(controller)
    assert [made for made in async_engine.made if made[0] == "swa"] == [
        ("swa", "prepare"),
        ("swa", 0, [10, 11, 20, 21]),
        ("swa", 1, [10, 11, 20, 21]),
    ]
    (ack,) = controller.ack_load_queue
    assert (ack.num_tokens_by_pool, ack.num_bytes) == ({"kv": 4, "swa": 4}, 80)


def test_a_burst_of_side_pools_alone_is_loaded(async_engine: Engine) -> None:
    controller = async_engine.hybrid()
    load(controller, 1, [], [10, 11])
    controller.start_loading()
    finish(controller)
    assert [made[:2] for made in async_engine.made] == [("swa", "prepare"), ("swa", 0), ("swa", 1)]


def test_the_counter_that_is_built_again_for_more_layers_is_the_one_that_is_used(async_engine: Engine) -> None:
    controller = async_engine.hybrid(transfer_layers=5)
    assert controller.mem_pool_device.counter is not controller.layer_done_counter
    load(controller, 1, [0, 1], [10, 11])
    slot = controller.start_loading()
    finish(controller)
    events = controller.layer_done_counter.events[slot]
    assert len(events.load_events) == 5
    assert [event.query() for event in events.load_events] == [True] * 5
    assert [made[1] for made in async_engine.made if made[0] == "swa"] == ["prepare", 0, 1]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_shutdown_joins_and_what_comes_after_is_loaded_inline(
    async_engine: Engine, make_controller: Callable[..., Any], logs: list[Any]
) -> None:
    controller = make_controller()
    tree = tree_of(controller)
    async_engine.device.hold("h2d")
    load(controller, 1, [0, 1])
    slot = controller.start_loading()
    ack = controller.ack_load_queue[0]
    waiting = in_thread(lambda: controller.layer_done_counter.events[slot].wait(NUM_LAYERS - 1))
    releasing = in_thread(tree.release_host_resources)
    eventually(lambda: len(async_engine.made) == 1 + NUM_LAYERS)
    assert not releasing.done()
    async_engine.device.resume("h2d")
    releasing.result(WAIT)
    waiting.result(WAIT)
    assert ack.finish_event.query()
    line = f"HiCache async load enqueue: downgraded to inline ({type(controller).__name__})"
    assert line in [entry["event"] for entry in logs]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache-sched")]
    device = load(controller, 2, [2, 3])
    controller.start_loading()
    finish(controller)
    assert has_loaded(controller, device, [2, 3])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache-sched")]

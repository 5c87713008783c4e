"""Between hand-out and landing nothing of SGLang's believes that a burst is done, or that there is none.

SGLang's own methods ask, in a burst that is queued behind one that the data plane is stuck in: its real events have
never been recorded, and those of CUDA's would all say yes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.sglang.engine import NUM_LAYERS, WAIT, Engine, Metrics, anchor_host, has_loaded, load, tree_of
from tests.scheduler.crowd import eventually, in_thread


class Queued:
    """A controller with a burst that is queued, behind one in the middle of its submission."""

    def __init__(self, engine: Engine) -> None:
        self.controller = engine.hybrid()
        self.tree = tree_of(self.controller)
        entered, self._gate = threading.Event(), threading.Event()

        def before(layer: int) -> None:
            entered.set()
            assert self._gate.wait(WAIT)

        anchor_host(self.controller).before = before
        load(self.controller, 1, [0, 1])
        self.controller.start_loading()
        self.device = load(self.controller, 2, [4, 5])
        self.slot = self.controller.start_loading()
        assert entered.wait(WAIT)

    def go_on(self) -> None:
        self._gate.set()


@pytest.fixture
def queued(async_engine: Engine) -> Iterator[Queued]:
    made = Queued(async_engine)
    yield made
    made.go_on()


def lands(queued: Queued) -> None:
    """Let it go on, until all has landed."""
    queued.go_on()
    queued.controller.ack_load_queue[-1].finish_event.synchronize()


def test_the_move_gate_stays_shut(queued: Queued) -> None:
    assert queued.controller.has_inflight_device_transfers()
    lands(queued)
    assert queued.controller.has_inflight_device_transfers(), "until the acks are popped"


def test_it_is_not_counted_as_ready(queued: Queued) -> None:
    acks = queued.controller.ack_load_queue
    assert queued.tree._count_ready_acks(acks) == 0
    lands(queued)
    assert queued.tree._count_ready_acks(acks) == 2


def test_its_load_back_is_not_done(queued: Queued) -> None:
    assert not queued.tree.is_load_back_event_done(queued.slot)
    assert queued.controller.layer_done_counter.producer_index == queued.slot
    lands(queued)
    assert queued.tree.is_load_back_event_done(queued.slot)
    assert queued.tree.is_load_back_event_done(2), "a slot that never had a burst"


def test_it_takes_a_slot(queued: Queued) -> None:
    assert queued.tree.has_free_load_back_slot()
    load(queued.controller, 3, [8, 9])
    queued.controller.start_loading()
    assert not queued.tree.has_free_load_back_slot()


def test_pages_are_not_given_away_before_it_has_landed(async_engine: Engine, queued: Queued) -> None:
    event = queued.controller.mem_pool_device_allocator.transfer_done[(id(queued.controller), "load")]
    assert not event.query()
    stream, given_away = async_engine.device.Stream(), torch.zeros(1)

    def give_away() -> None:
        stream.wait_event(event)
        with async_engine.device.stream(stream):
            async_engine.device.launch(lambda: given_away.fill_(1))
            async_engine.device.current_stream().synchronize()

    async_engine.device.hold("h2d")
    waiting = in_thread(give_away)
    queued.go_on()
    eventually(lambda: len([made for made in async_engine.made if made[0] == "kv"]) == 2 * (1 + NUM_LAYERS))
    assert given_away.item() == 0
    async_engine.device.resume("h2d")
    waiting.result(WAIT)
    assert has_loaded(queued.controller, queued.device, [4, 5])


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_forward_waits_for_each_layer(async_engine: Engine, queued: Queued, own_stream: bool) -> None:
    counter = queued.controller.layer_done_counter
    counter.set_consumer(queued.slot)
    read: list[torch.Tensor] = []

    def forward() -> None:
        pool = queued.controller.mem_pool_device
        stream = async_engine.device.Stream() if own_stream else async_engine.device.current_stream()
        with async_engine.device.stream(stream):
            for layer, values in enumerate(pool.layers):
                counter.wait_until(layer)
                async_engine.device.launch(partial(lambda values: read.append(values[queued.device].clone()), values))
            async_engine.device.current_stream().synchronize()

    running = in_thread(forward)
    queued.go_on()
    running.result(WAIT)
    host = anchor_host(queued.controller)
    assert [torch.equal(got, host.layers[layer][[4, 5]]) for layer, got in enumerate(read)] == [True] * NUM_LAYERS


def test_a_draft_worker_and_a_full_graph_wait_for_the_last_layer_alone(async_engine: Engine, queued: Queued) -> None:
    counter = queued.controller.layer_done_counter
    waiting = in_thread(lambda: counter.events[queued.slot].wait(counter.num_layers - 1))
    eventually(lambda: not waiting.done())
    queued.go_on()
    waiting.result(WAIT)
    assert has_loaded(queued.controller, queued.device, [4, 5])


def check(tree: Any, nodes: list[int], finish_count: int | None = None) -> None:
    tree.ongoing_load_back.update({node: (node, None, None) for node in nodes})
    tree.loading_check(finish_count)


def test_loading_check_pops_what_has_landed_and_counts_it(queued: Queued) -> None:
    queued.tree.metrics_collector = metrics = Metrics()
    check(queued.tree, [1, 2])
    assert queued.tree.released == []
    lands(queued)
    queued.tree.loading_check()
    assert queued.tree.released == [1, 2]
    assert queued.controller.ack_load_queue == []
    assert not queued.controller.has_inflight_device_transfers()
    assert (metrics.tokens, metrics.num_bytes, len(metrics.durations)) == ({"kv": 4}, 40, 2)


def test_a_later_pipeline_rank_that_pops_an_ack_that_is_not_ready_blocks_until_it_is(
    async_engine: Engine, queued: Queued
) -> None:
    queued.tree.pp_rank = 1
    popping = in_thread(lambda: check(queued.tree, [1, 2], finish_count=2))
    async_engine.device.hold("h2d")
    queued.go_on()
    eventually(lambda: len([made for made in async_engine.made if made[0] == "kv"]) == 2 * (1 + NUM_LAYERS))
    assert not popping.done()
    assert queued.tree.released == []
    async_engine.device.resume("h2d")
    popping.result(WAIT)
    assert queued.tree.released == [1, 2]
    assert has_loaded(queued.controller, queued.device, [4, 5])


def test_a_retracted_requests_pages_are_restored_behind_every_burst(async_engine: Engine, queued: Queued) -> None:
    controller, tree = queued.controller, queued.tree
    device = controller.mem_pool_device_allocator.alloc(2)
    tree._retraction_device_transfers = lambda req: (device, [])
    tree.discard_kv_cache_backup = lambda backup: None
    backup = SimpleNamespace(host_indices=torch.tensor([30, 31]), pool_transfers=None)
    restoring = in_thread(lambda: tree.restore_kv_cache(None, backup))
    eventually(lambda: async_engine.made == [("kv", "prepare")])
    assert not restoring.done()
    queued.go_on()
    restoring.result(WAIT)
    layers = [made[2] for made in async_engine.made if made[1] != "prepare"]
    assert layers == [[0, 1]] * NUM_LAYERS + [[4, 5]] * NUM_LAYERS + [[30, 31]] * NUM_LAYERS
    assert has_loaded(controller, device, [30, 31])

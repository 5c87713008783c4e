"""Order on the device: index moves behind the start event, copies behind the fence, bursts one after another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hicache_sched import LoadOp
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op

GARBAGE = -(2**40)


class IndexReadingBackend(LaunchingBackend):
    """Reads the device indices as `PooledBackend` does, and notes what it read and on which stream."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__(device)
        self.read: list[tuple[list[int], Any]] = []
        self.has_read = threading.Event()

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        prepared = super().prepare(ops)
        for values in self.bound[0].device.to_host([op.device_indices for op in ops]):
            self.read.append((values.tolist(), self._device.current_stream()))
        self.has_read.set()
        return prepared


def late_indices(device: EmulatedDevice, stream: Any) -> torch.Tensor:
    """Indices that hold garbage until a kernel on `stream` has run."""
    indices = torch.full((4,), GARBAGE)
    with device.stream(stream):
        device.launch(lambda: indices.copy_(torch.arange(4)))
    return indices


def test_device_indices_are_read_once_behind_the_start_event_on_a_stream_of_their_own(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = IndexReadingBackend(device)
    scheduler = make_scheduler(backend)
    compute = device.Stream()
    device.hold("compute")
    indices = late_indices(device, compute)
    calls = device.record_calls()
    with device.stream(compute):
        scheduler.load(LoadOp(1, torch.arange(4), indices))
        handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None
    device.step("compute")
    handle.result(timeout=30)
    assert backend.read == [([0, 1, 2, 3], scheduler.index_stream)]
    start = next(call[1] for call in calls if call[0] == "record" and call[2] is compute)
    index_waits = [call for call in calls if call[0] == "wait" and call[2] is scheduler.index_stream]
    assert [(call[1], call[3]) for call in index_waits] == [(start, "hicache-sched-worker")]


def test_device_indices_are_read_while_an_earlier_bursts_copies_are_held(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = IndexReadingBackend(device)
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    hand_out(scheduler, 1)
    assert backend.has_read.wait(30)
    backend.has_read.clear()
    second = hand_out(scheduler, 2)
    assert backend.has_read.wait(30)
    assert backend.copied() == []
    device.resume("h2d")
    second.result(timeout=30)


def test_inline_mode_reads_device_indices_on_the_callers_stream(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = IndexReadingBackend(device)
    scheduler = make_scheduler(backend, mode="inline")
    compute = device.Stream()
    indices = late_indices(device, compute)
    with device.stream(compute):
        scheduler.load(LoadOp(1, torch.arange(4), indices))
        scheduler.start_loading_sync()
    assert backend.read == [([0, 1, 2, 3], compute)]


class FencedBackend(LaunchingBackend):
    """Its first layer copies what a page holds when the copy runs."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__(device, num_layers=1)
        self.page = torch.zeros(8, dtype=torch.uint8)

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        self._device.launch(lambda: self.page.fill_(1), engine="h2d")

    def write_on(self, stream: Any, value: int) -> None:
        """Let earlier work on a stream write the page."""
        with self._device.stream(stream):
            self._device.launch(lambda: self.page.fill_(value))


@pytest.mark.parametrize("how", ["in the constructor", "set later", "per burst"])
async def test_work_on_the_fence_stream_before_the_hand_out_delays_the_burst(
    device: EmulatedDevice, make_scheduler: MakeScheduler, how: str
) -> None:
    backend = FencedBackend(device)
    fence = device.Stream()
    scheduler = make_scheduler(backend, fence_stream=fence if how == "in the constructor" else None)
    if how == "set later":
        scheduler.fence_stream = fence
    device.hold("compute")
    backend.write_on(fence, 9)
    scheduler.load(load_op(1))
    handle = await scheduler.start_loading(fence=fence if how == "per burst" else None)
    assert handle is not None
    await handle.enqueued(0)
    assert backend.page.tolist() == [0] * 8, "the copy is submitted but waits for the fence"
    device.step("compute")
    await handle
    assert backend.page.tolist() == [1] * 8, "the copy came after the earlier write, not under it"


def test_work_on_the_fence_stream_after_the_hand_out_does_not_delay_the_burst(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = FencedBackend(device)
    backend.gate.clear()
    fence = device.Stream()
    scheduler = make_scheduler(backend, fence_stream=fence)
    device.hold("compute")
    handle = hand_out(scheduler, 1)
    backend.write_on(fence, 9)
    backend.release()
    handle.result(timeout=30)
    assert backend.page.tolist() == [1] * 8
    device.step("compute")
    assert backend.page.tolist() == [9] * 8


def test_the_fence_is_recorded_once_by_the_caller_and_waited_on_before_the_first_copy(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    fence = device.Stream()
    scheduler = make_scheduler(fence_stream=fence)
    calls = device.record_calls()
    hand_out(scheduler, 1).result(timeout=30)
    records = [call for call in calls if call[0] == "record" and call[2] is fence]
    assert [call[3] for call in records] == [threading.current_thread().name]
    on_h2d = [(call[0], call[1]) for call in calls if call[2] is scheduler.h2d_stream]
    first_record = next(index for index, (name, _) in enumerate(on_h2d) if name == "record")
    assert ("wait", records[0][1]) in on_h2d[:first_record]
    index_wait = next(i for i, call in enumerate(calls) if call[2] is scheduler.index_stream and call[0] == "wait")
    fence_wait = next(i for i, call in enumerate(calls) if call[0] == "wait" and call[1] is records[0][1])
    assert index_wait < fence_wait, "indices are moved without waiting for the fence"


def test_bursts_land_in_order_and_their_layers_never_interleave(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handles = [hand_out(scheduler, node_id) for node_id in (1, 2, 3)]
    device.resume("h2d")
    handles += [hand_out(scheduler, node_id) for node_id in (4, 5, 6, 7)]
    for handle in handles:
        handle.result(timeout=30)
    assert backend.copied() == [(node_id, layer) for node_id in range(1, 8) for layer in range(4)]
    acks = scheduler.pop_acks()
    assert [ack.burst_id for ack in acks] == [1, 2, 3, 4, 5, 6, 7]
    assert [ack.slot for ack in acks] == [0, 1, 2, 0, 1, 2, 0]


def test_a_burst_merged_from_several_ops_carries_all_nodes_and_tokens_in_order(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    for node_id, num_tokens in ((5, 2), (3, 7), (9, 1)):
        scheduler.load(load_op(node_id, num_tokens))
    handle = scheduler.start_loading_sync()
    assert handle is not None
    ack = handle.result(timeout=30)
    assert handle.node_ids == ack.node_ids == (5, 3, 9)
    assert handle.num_tokens == ack.num_tokens == 10
    assert ack.num_tokens_by_pool == {"kv": 10}
    assert backend.events[0] == ("prepare", [5, 3, 9])

"""A stream holds so many operations and no more: what is in flight is kept below that, off the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hicache_sched import AckStatus, LoadFailedError, TransferTimeoutError
from hicache_sched.device import EmulatedDevice
from hicache_sched.in_flight import OPS_PER_BURST
from tests.builders import LaunchingBackend, MakeScheduler, hand_out

DEPTH = 40
NUM_LAYERS = 30
"""An operation and an event each: three bursts are four and a half times what the stream holds."""


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(queue_depth=DEPTH) as emulated:
        yield emulated


def engine_step(device: EmulatedDevice) -> None:
    """What an engine scheduler asks of the device between two hand-outs."""
    with device.stream(device.Stream()):
        device.launch(lambda: None)
        device.Event().record()


def test_a_full_queue_never_blocks_the_engine_scheduler(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    backend = LaunchingBackend(device, NUM_LAYERS)
    scheduler = make_scheduler(backend, h2d_queue_ops=DEPTH)
    device.hold("h2d")
    handles = []
    for node in range(3):
        handles.append(hand_out(scheduler, node))
        engine_step(device)
    with device.stream(device.Stream()):
        handles[0].wait_layer((DEPTH - 3 * OPS_PER_BURST) // 2 - 1, timeout=30)  # as full as it gets
    engine_step(device)
    assert not handles[0].layer_enqueued(NUM_LAYERS - 1)

    device.resume("h2d")

    assert [handle.result(30).status for handle in handles] == [AckStatus.OK] * 3
    assert backend.copied() == [(node, layer) for node in range(3) for layer in range(NUM_LAYERS)]


def test_without_the_bound_it_does(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    """What the test above would not notice if the emulated device did not block as a driver does."""
    scheduler = make_scheduler(LaunchingBackend(device, NUM_LAYERS), h2d_queue_ops=100 * DEPTH)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    while device._core.length(scheduler.h2d_stream._core) < DEPTH:
        pass
    stepped = threading.Event()

    def step() -> None:
        engine_step(device)
        stepped.set()

    engine = threading.Thread(target=step)
    engine.start()

    assert not stepped.wait(0.05)

    device.resume("h2d")
    assert stepped.wait(30)
    engine.join()
    handle.result(30)


@pytest.mark.parametrize("ops_per_layer", [1, 5, 1000])
def test_as_many_layers_are_in_flight_as_their_operations_leave_room_for(
    device: EmulatedDevice, make_scheduler: MakeScheduler, ops_per_layer: int
) -> None:
    backend = LaunchingBackend(device, NUM_LAYERS)
    backend.ops_per_layer = ops_per_layer  # type: ignore[attr-defined]
    scheduler = make_scheduler(backend, h2d_queue_ops=DEPTH, num_slots=1)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    room = {1: 18, 5: 6, 1000: 1}[ops_per_layer]  # (40 - 4) / 2, (40 - 4) / 6, and never none
    with device.stream(device.Stream()):
        handle.wait_layer(room - 1, timeout=30)
        with pytest.raises(TransferTimeoutError):
            handle.wait_layer(room, timeout=0.05)
    device.step("h2d", max(1, room // 2))
    with device.stream(device.Stream()):
        handle.wait_layer(room, timeout=30)


@pytest.mark.parametrize("fails_in", ["prepare", 3])
def test_a_burst_that_fails_does_not_fill_the_queue_with_its_events_and_releases_its_waiters_at_once(
    device: EmulatedDevice, make_scheduler: MakeScheduler, fails_in: str | int
) -> None:
    backend = LaunchingBackend(device, NUM_LAYERS)
    scheduler = make_scheduler(backend, h2d_queue_ops=DEPTH)
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    with device.stream(device.Stream()):
        first.wait_layer(9, timeout=30)
        backend.failures[fails_in] = RuntimeError("broken")  # of the first, where it is a layer still to come
        second = hand_out(scheduler, 2)
        third = hand_out(scheduler, 3)
        engine_step(device)
    # All but two: a full stream is waited for until it is half empty, also where the second needs less.
    device.step("h2d", NUM_LAYERS - 2)  # the first goes on to its end, and the second to its failure
    with device.stream(device.Stream()):
        second.wait_layer(NUM_LAYERS - 1, timeout=30)
    assert second.stale or fails_in == 3
    for _ in range(5):
        engine_step(device)

    device.resume("h2d")

    with pytest.raises(LoadFailedError, match="broken"):
        second.result(30)
    assert first.result(30).status is third.result(30).status is AckStatus.OK
    assert [ack.burst_id for ack in scheduler.pop_acks()] == [1, 2, 3]


def test_a_burst_that_waits_for_room_ends_when_the_device_is_lost(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(LaunchingBackend(device, NUM_LAYERS), h2d_queue_ops=DEPTH)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    with device.stream(device.Stream()):
        handle.wait_layer(10, timeout=30)
    device.lose(RuntimeError("gone"))
    with pytest.raises(LoadFailedError):
        handle.result(30)


def test_close_runs_out_while_a_burst_waits_for_room_and_then_drains(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(LaunchingBackend(device, NUM_LAYERS), h2d_queue_ops=DEPTH)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    with pytest.raises(TransferTimeoutError):
        scheduler.close(0.05)
    device.resume("h2d")
    scheduler.close(30)
    assert handle.result(0).status is AckStatus.OK

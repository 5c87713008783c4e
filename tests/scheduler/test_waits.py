"""Waits: from threads and loops, through device events, on layers in any order."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hicache_sched import LoadHandle, TransferTimeoutError
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out


class PageBackend(LaunchingBackend):
    """Each layer's copy writes that layer's bytes."""

    def __init__(self, device: EmulatedDevice, num_layers: int = 4) -> None:
        super().__init__(device, num_layers)
        self.pages = torch.zeros(num_layers, dtype=torch.uint8)

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        super().enqueue_layer(prepared, layer)
        self._device.launch(lambda: self.pages[layer].fill_(layer + 1), engine="compute")


@pytest.fixture
def backend(device: EmulatedDevice) -> PageBackend:
    return PageBackend(device)


def test_wait_layer_waits_for_the_layer_to_be_enqueued(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    entered = backend.hold_layer(2)
    handle = hand_out(scheduler, 1)
    assert entered.wait(30)
    with device.stream(device.Stream()):
        handle.wait_layer(1, timeout=30)
        with pytest.raises(TransferTimeoutError, match="layer 2 of burst 1 to be enqueued"):
            handle.wait_layer(2, timeout=0.02)
        backend.release()
        handle.wait_layer(2, timeout=30)


def test_wait_layer_orders_the_callers_stream_behind_the_layer(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    attention = device.Stream()
    read: list[int] = []
    with device.stream(attention):
        handle.wait_layer(1, timeout=30)
        device.launch(lambda: read.append(int(backend.pages[1])), engine="d2h")
    device.step("h2d", 1)
    assert not attention.query()
    device.step("h2d", 1)
    attention.synchronize()
    assert read == [2], "it was read after its copy, while layer 2 is still held"
    assert not handle.layer_landed(2)


def test_on_an_inline_stream_wait_layer_blocks_until_the_layer_has_landed(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    assert device.current_stream().runs_inline
    with pytest.raises(TransferTimeoutError, match="layer 0 of burst 1 to land"):
        handle.wait_layer(0, timeout=0.02)
    device.step("h2d", 1)
    handle.wait_layer(0, timeout=30)
    assert backend.pages.tolist() == [1, 0, 0, 0]


def test_waits_may_come_out_of_order_and_repeatedly(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    attention = device.Stream()
    with device.stream(attention):
        for layer in (3, 0, 2, 2, 1, 3):
            handle.wait_layer(layer, timeout=30)
    device.step("h2d", 3)
    assert not attention.query(), "layer 3 was waited for first, and that wait stands"
    device.step("h2d", 1)
    attention.synchronize()
    assert backend.pages.tolist() == [1, 2, 3, 4]


def test_waits_from_several_threads_are_all_released(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    backend.gate.clear()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)

    def wait_on_a_stream_of_its_own(layer: int) -> int:
        stream = device.Stream()
        with device.stream(stream):
            handle.wait_layer(layer, timeout=60)
        stream.synchronize()
        return int(backend.pages[layer])

    with ThreadPoolExecutor(12) as pool:
        waits = [pool.submit(wait_on_a_stream_of_its_own, layer % 4) for layer in range(12)]
        backend.release()
        device.resume("h2d")
        assert [wait.result(60) for wait in waits] == [layer % 4 + 1 for layer in range(12)]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, None], ids=["asyncio", "uvloop"])
def test_waits_from_several_event_loops_and_the_same_loop_are_all_released(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend, new_loop: Any
) -> None:
    import uvloop

    scheduler = make_scheduler(backend)
    backend.gate.clear()
    handle = hand_out(scheduler, 1)
    waiting = threading.Barrier(3)

    async def wait_for_everything() -> list[int]:
        async def one(layer: int) -> int:
            await handle.enqueued(layer)
            await handle.layer(layer)
            return int(backend.pages[layer])

        tasks = [asyncio.ensure_future(one(layer % 4)) for layer in range(8)]
        await asyncio.sleep(0)
        waiting.wait(30)
        assert [layer async for layer in handle.layers()] == [0, 1, 2, 3]
        assert (await handle).burst_id == 1
        return await asyncio.gather(*tasks)

    def run() -> list[int]:
        with asyncio.Runner(loop_factory=new_loop or uvloop.new_event_loop) as runner:
            return runner.run(asyncio.wait_for(wait_for_everything(), 60))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run) for _ in range(2)]
        waiting.wait(30)
        backend.release()
        assert [each.result(60) for each in runs] == [[1, 2, 3, 4, 1, 2, 3, 4]] * 2


async def test_layers_come_in_order_as_they_land(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    layers = handle.layers()
    for layer in range(4):
        coming = asyncio.ensure_future(anext(layers))
        await asyncio.sleep(0)
        assert not coming.done()
        await asyncio.to_thread(device.step, "h2d")
        assert await asyncio.wait_for(coming, 30) == layer
    with pytest.raises(StopAsyncIteration):
        await anext(layers)


async def test_enqueued_is_before_landed(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    await asyncio.wait_for(handle.enqueued(3), 30)
    assert handle.layer_enqueued(3)
    assert not handle.layer_landed(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.layer(0), 0.02)


def test_a_done_callback_gets_the_handle_when_the_burst_has_ended(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: PageBackend
) -> None:
    scheduler = make_scheduler(backend)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    called: list[tuple[LoadHandle, bool, str]] = []
    has_run = threading.Event()

    def callback(which: LoadHandle) -> None:
        called.append((which, which.done(), threading.current_thread().name))
        has_run.set()

    handle.add_done_callback(callback)
    device.resume("h2d")
    assert has_run.wait(30)
    assert called == [(handle, True, "hicache-sched")]
    handle.add_done_callback(callback)
    assert called[1:] == [(handle, True, threading.current_thread().name)]


@pytest.mark.parametrize("layer", [-1, 4])
async def test_a_layer_that_the_burst_does_not_have_raises(
    make_scheduler: MakeScheduler, backend: PageBackend, layer: int
) -> None:
    handle = hand_out(make_scheduler(backend), 1)
    for wait in (handle.wait_layer, handle.layer_landed, handle.layer_enqueued):
        with pytest.raises(IndexError, match="layers 0 to 3"):
            wait(layer)
    for coroutine in (handle.enqueued, handle.layer):
        with pytest.raises(IndexError, match="layers 0 to 3"):
            await coroutine(layer)

"""A lost device is said once: what is outstanding ends, hand-outs raise, nothing loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache_sched import AckStatus, DeviceLostError, LoadFailedError, LoadHandle, TransferScheduler
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.scheduler.crowd import WAIT, Crowd, Loops, errors_of, eventually, in_thread, parked_crowd

NUM_LAYERS = 4
each_mode = pytest.mark.parametrize("mode", ["async", "inline"])


class CallCounter:
    """Counts the calls that Python makes on a device, failing ones and queries included."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.num_calls = 0
        check = device._core.check

        def counted() -> None:
            self.num_calls += 1
            check()

        device._core.check = counted  # type: ignore[method-assign]


@pytest.fixture
def backend(device: EmulatedDevice) -> LaunchingBackend:
    return LaunchingBackend(device)


@pytest.fixture
def loops() -> Iterator[Loops]:
    both = Loops()
    yield both
    both.close()


def lose(device: EmulatedDevice) -> RuntimeError:
    """Lose the device; gives the error that every call on it raises from now on."""
    error = RuntimeError("an illegal memory access was encountered")
    device.lose(error)
    return error


def event_names(logs: list[Any]) -> list[str]:
    return [entry["event"] for entry in logs]


def assert_lost(error: BaseException | None, cause: BaseException) -> None:
    """A hand-out that met a lost device raised this."""
    assert isinstance(error, DeviceLostError)
    assert error.__cause__ is cause


def assert_failed_by_loss(error: BaseException | None, cause: BaseException) -> None:
    """A burst that a lost device ended gave this."""
    assert isinstance(error, LoadFailedError)
    assert_lost(error.cause, cause)


# -- idle -------------------------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("bursts_before", [0, 1])
def test_the_first_hand_out_after_the_loss_raises_and_its_burst_has_failed(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str, bursts_before: int, logs: list[Any]
) -> None:
    on_acks: list[Any] = []
    scheduler = make_scheduler(mode=mode, on_ack=on_acks.append)
    for node in range(bursts_before):
        hand_out(scheduler, node).result(WAIT)
    error = lose(device)
    scheduler.load(load_op(5))
    with pytest.raises(DeviceLostError) as lost:
        scheduler.start_loading_sync(WAIT)
    assert_lost(lost.value, error)
    scheduler.close(WAIT)
    *_, ack = scheduler.pop_acks()
    assert (ack.node_ids, ack.status, ack.num_tokens) == ((5,), AckStatus.FAILED, 0)
    assert_failed_by_loss(ack.error, error)
    assert on_acks[-1] is ack
    assert [name for name in event_names(logs) if name in ("device_lost", "burst_failed", "thread_failed")] == [
        "device_lost",
        "burst_failed",
    ]


@each_mode
def test_every_later_hand_out_raises_at_once_and_leaves_its_ops(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str, logs: list[Any]
) -> None:
    scheduler = make_scheduler(mode=mode)
    error = lose(device)
    scheduler.load(load_op(1))
    with pytest.raises(DeviceLostError):
        scheduler.start_loading_sync(WAIT)
    scheduler.load(load_op(2))
    for _ in range(3):
        with pytest.raises(DeviceLostError) as lost:
            scheduler.start_loading_sync(WAIT)
        assert_lost(lost.value, error)
        with pytest.raises(DeviceLostError):
            asyncio.run(scheduler.start_loading())
    assert scheduler.stats().queued_ops == 1
    assert isinstance(scheduler.last_error, DeviceLostError)
    assert event_names(logs).count("device_lost") == 1


# -- with bursts at every stage ---------------------------------------------------------------------------------------


@dataclass
class Outstanding:
    """Three bursts at different stages, with waiters of all kinds, and a hand-out that waits for a slot."""

    device: EmulatedDevice
    backend: LaunchingBackend
    scheduler: TransferScheduler
    handles: list[LoadHandle]
    crowds: list[Crowd]
    hand_out: Future[Any]
    on_acks: list[Any] = field(default_factory=list)


def queued(device: EmulatedDevice, backend: LaunchingBackend) -> Callable[[list[LoadHandle]], bool]:
    """The first burst is in `prepare`, the others are queued behind it."""
    return lambda handles: backend.preparing.is_set()


def enqueuing(device: EmulatedDevice, backend: LaunchingBackend) -> Callable[[list[LoadHandle]], bool]:
    """The first burst is on the device with two layers, in the middle of its third; the others are queued."""
    entered = backend.hold_layer(2)
    backend.gate.set()
    return lambda handles: entered.is_set()


def on_the_device(device: EmulatedDevice, backend: LaunchingBackend) -> Callable[[list[LoadHandle]], bool]:
    """All are enqueued."""
    backend.gate.set()
    return lambda handles: all(handle.layer_enqueued(NUM_LAYERS - 1) for handle in handles)


def landing(device: EmulatedDevice, backend: LaunchingBackend) -> Callable[[list[LoadHandle]], bool]:
    """All are enqueued, and half of the first has landed."""
    backend.gate.set()
    device.step("h2d", 2)
    return lambda handles: handles[0].layer_landed(1) and handles[2].layer_enqueued(NUM_LAYERS - 1)


STAGES = [queued, enqueuing, on_the_device, landing]


@pytest.fixture(params=["sync", "async"])
def outstanding(
    request: pytest.FixtureRequest,
    device: EmulatedDevice,
    backend: LaunchingBackend,
    make_scheduler: MakeScheduler,
    loops: Loops,
) -> Outstanding:
    on_acks: list[Any] = []
    scheduler = make_scheduler(backend, on_ack=on_acks.append)
    device.hold("h2d")
    backend.gate.clear()
    handles = [hand_out(scheduler, node) for node in (1, 2, 3)]
    crowds = [parked_crowd(handle, device, loops) for handle in handles]
    scheduler.load(load_op(4))
    if request.param == "sync":
        waiting = in_thread(lambda: scheduler.start_loading_sync(WAIT))
    else:
        waiting = in_thread(lambda: asyncio.run(scheduler.start_loading(timeout=WAIT)))
    eventually(lambda: scheduler._protocol._waiters != set())
    return Outstanding(device, backend, scheduler, handles, crowds, waiting, on_acks)


def lose_at(outstanding: Outstanding, stage: Callable[..., Callable[[list[LoadHandle]], bool]]) -> RuntimeError:
    """Bring the bursts to that stage and lose the device; what then holds the data plane lets it go."""
    reached = stage(outstanding.device, outstanding.backend)
    eventually(lambda: reached(outstanding.handles))
    for handle, crowd in zip(outstanding.handles, outstanding.crowds, strict=True):
        errors_of([crowd.waits[layer][1] for layer in range(NUM_LAYERS) if handle.layer_enqueued(layer)])
    error = lose(outstanding.device)
    outstanding.backend.release()
    return error


@pytest.mark.parametrize("stage", STAGES)
def test_every_waiter_is_released(outstanding: Outstanding, stage: Any) -> None:
    error = lose_at(outstanding, stage)
    for crowd in outstanding.crowds:
        for end in errors_of(crowd.ends):
            assert_failed_by_loss(end, error)
        for waits in crowd.waits.values():
            assert errors_of(waits) == [None, None], "wait_layer does not raise"
        for waiter in errors_of(crowd.everybody):
            assert waiter is None or isinstance(waiter, LoadFailedError)


@pytest.mark.parametrize("stage", STAGES)
def test_every_burst_ends_failed_in_order(outstanding: Outstanding, stage: Any) -> None:
    error = lose_at(outstanding, stage)
    outstanding.scheduler.close(WAIT)
    acks = outstanding.scheduler.pop_acks()
    assert [(ack.burst_id, ack.status, ack.num_tokens, ack.num_bytes) for ack in acks] == [
        (burst_id, AckStatus.FAILED, 0, 0) for burst_id in (1, 2, 3)
    ]
    for ack in acks:
        assert_failed_by_loss(ack.error, error)
    assert outstanding.on_acks == acks
    assert all(handle.stale for handle in outstanding.handles)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hand_out_that_waits_raises_and_so_do_later_ones(outstanding: Outstanding, stage: Any) -> None:
    error = lose_at(outstanding, stage)
    assert_lost(outstanding.hand_out.exception(WAIT), error)
    with pytest.raises(DeviceLostError):
        outstanding.scheduler.start_loading_sync(WAIT)
    assert outstanding.scheduler.stats().queued_ops == 1


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_logged_once_for_the_device_and_once_for_each_burst(
    outstanding: Outstanding, stage: Any, logs: list[Any]
) -> None:
    error = lose_at(outstanding, stage)
    outstanding.scheduler.close(WAIT)
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert sorted(event_names(errors)) == ["burst_failed"] * 3 + ["device_lost"]
    (said,) = [entry for entry in errors if entry["event"] == "device_lost"]
    assert said["exc_info"] is error
    assert said["device"] == "emulated"


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_loops_afterwards(outstanding: Outstanding, stage: Any) -> None:
    lose_at(outstanding, stage)
    calls = CallCounter(outstanding.device)
    for crowd in outstanding.crowds:
        errors_of(crowd.everybody)
    outstanding.hand_out.exception(WAIT)
    eventually(lambda: outstanding.scheduler._protocol.bursts_alive() == [])
    settled = calls.num_calls
    assert settled < 100, "each burst fails at its next call, with one try for each of its events"
    time.sleep(0.1)  # a window to count in
    assert calls.num_calls == settled


def test_a_hand_out_that_waits_raises_while_the_data_plane_is_still_stuck(outstanding: Outstanding) -> None:
    reached = enqueuing(outstanding.device, outstanding.backend)
    eventually(lambda: reached(outstanding.handles))
    eventually(lambda: outstanding.handles[0].layer_enqueued(1))
    error = lose(outstanding.device)
    assert_lost(outstanding.hand_out.exception(WAIT), error)
    assert outstanding.scheduler.stats().failed_bursts == 0, "no slot has become free"


def test_it_is_said_once_where_two_threads_meet_it_at_the_same_time(
    outstanding: Outstanding, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    both = threading.Barrier(2)
    met: set[int] = set()

    def query() -> bool:
        if threading.get_ident() not in met:  # the native plane may ask twice, once for the words of the error
            met.add(threading.get_ident())
            both.wait(WAIT)
        raise RuntimeError("lost")

    reached = enqueuing(outstanding.device, outstanding.backend)
    eventually(lambda: reached(outstanding.handles))
    with monkeypatch.context() as patch:
        patch.setattr(outstanding.scheduler.h2d_stream, "query", query)
        lose(outstanding.device)
        outstanding.backend.release()
        outstanding.scheduler.close(WAIT)
    assert not both.broken, "the observer asked at layer 0, the worker at layer 2"
    assert event_names(logs).count("device_lost") == 1


async def test_reset_and_close_return(outstanding: Outstanding) -> None:
    lose_at(outstanding, on_the_device)
    await outstanding.scheduler.areset(WAIT)
    await outstanding.scheduler.aclose(WAIT)
    assert outstanding.scheduler.pop_acks() == []
    outstanding.scheduler.load(load_op(9))
    with pytest.raises(DeviceLostError):
        await outstanding.scheduler.start_loading()


def test_a_copy_that_faults_loses_the_device(
    device: EmulatedDevice, backend: LaunchingBackend, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(backend)
    fault = MemoryError("fault")

    def copy_that_faults() -> None:
        raise fault

    def enqueue_layer(prepared: Any, layer: int) -> None:
        device.launch(copy_that_faults, engine="h2d")

    monkeypatch.setattr(backend, "enqueue_layer", enqueue_layer)
    with pytest.raises(LoadFailedError) as failure:
        hand_out(scheduler, 1).result(WAIT)
    assert_failed_by_loss(failure.value, fault)


# -- inline -----------------------------------------------------------------------------------------------------------


def test_inline_bursts_on_the_device_end_and_a_waiting_hand_out_raises(
    device: EmulatedDevice, backend: LaunchingBackend, make_scheduler: MakeScheduler, loops: Loops, logs: list[Any]
) -> None:
    on_acks: list[Any] = []
    scheduler = make_scheduler(backend, mode="inline", on_ack=on_acks.append)
    device.hold("h2d")
    handles = [hand_out(scheduler, node) for node in (1, 2, 3)]
    crowds = [Crowd(handle, device, loops) for handle in handles]
    for crowd in crowds:
        assert errors_of([crowd.waits[layer][1] for layer in range(NUM_LAYERS)]) == [None] * NUM_LAYERS
    scheduler.load(load_op(4))
    waiting = in_thread(lambda: scheduler.start_loading_sync(WAIT))
    eventually(lambda: scheduler._protocol._current_turn is not None)
    error = lose(device)
    assert_lost(waiting.exception(WAIT), error)
    for crowd in crowds:
        for end in errors_of(crowd.ends):
            assert_failed_by_loss(end, error)
        for waits in crowd.waits.values():
            assert errors_of(waits) == [None, None]
        errors_of(crowd.everybody)
    acks = scheduler.pop_acks()
    assert [(ack.burst_id, ack.status, ack.num_tokens) for ack in acks] == [
        (burst_id, AckStatus.FAILED, 0) for burst_id in (1, 2, 3)
    ]
    assert on_acks == acks
    scheduler.close(WAIT)
    assert event_names(logs).count("device_lost") == 1
    assert event_names(logs).count("burst_failed") == 3


@pytest.mark.parametrize("where", ["prepare", 0, 3])
def test_inline_a_device_lost_during_submission_raises_from_the_hand_out(
    device: EmulatedDevice,
    backend: LaunchingBackend,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    where: str | int,
) -> None:
    scheduler = make_scheduler(backend, mode="inline")
    error = RuntimeError("an illegal memory access was encountered")
    lost_at: list[Any] = []

    def fail(place: str | int) -> None:
        if place == where:
            lost_at.append(place)
            device.lose(error)

    monkeypatch.setattr(backend, "_fail", fail)
    scheduler.load(load_op(1))
    with pytest.raises(DeviceLostError) as lost:
        scheduler.start_loading_sync(WAIT)
    assert_lost(lost.value, error)
    assert lost_at == [where]
    (ack,) = scheduler.pop_acks()
    assert ack.status is AckStatus.FAILED

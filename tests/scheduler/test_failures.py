"""Nothing hangs and nothing is lost, whatever raises, at any stage of a burst."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import structlog
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_sched import (
    AckStatus,
    InvalidLoadError,
    LoadFailedError,
    LoadHandle,
    LoadOp,
    SchedulerConfig,
    TransferScheduler,
)
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice, EmulatedEvent, EmulatedStream
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.copy.builders import make_pair, page_op, raw_bytes
from tests.scheduler.crowd import WAIT, Crowd, Loops, errors_of, eventually, in_thread, parked_crowd

NUM_LAYERS = 4


class NamedEvent(EmulatedEvent):
    """An event whose calls can be made to fail, by its name."""

    def __init__(self, device: FaultyDevice, enable_timing: bool, name: str) -> None:
        super().__init__(device, enable_timing)
        self.name = name
        self._faults = device.faults

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._meet("record")
        super().record(stream)

    def wait(self, stream: EmulatedStream | None = None) -> None:
        self._meet("wait")
        super().wait(stream)

    def synchronize(self) -> None:
        self._meet("synchronize at once")
        super().synchronize()
        self._meet("synchronize")

    def query(self) -> bool:
        self._meet("query")
        return super().query()

    def _meet(self, call: str) -> None:
        faults = self._faults.get((call, self.name))
        if faults:
            raise faults.pop(0)


class FaultyDevice(EmulatedDevice):
    """An emulated device whose events know what a scheduler made them for.

    The names follow from the order in which they are made: "start 0" and "fence 0" belong to slot 0; "ack start of
    set 0", "layer 2 of set 0" and "ack finish of set 0" to the first event set. While nothing has ended, the n-th
    burst has slot and set n.

    Attributes:
        faults: by call and event name, what the next calls raise.
    """

    def __init__(self, num_layers: int = NUM_LAYERS, num_slots: int = 3) -> None:
        super().__init__()
        self.faults: dict[tuple[str, str], list[BaseException]] = {}
        self._names = self._all_names(num_layers, num_slots)

    def fail(self, call: str, event_name: str, error: BaseException, times: int = 1) -> None:
        self.faults[call, event_name] = [error] * times

    def Event(  # noqa: N802 - torch's name
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> EmulatedEvent:
        return NamedEvent(self, enable_timing, next(self._names))

    @staticmethod
    def _all_names(num_layers: int, num_slots: int) -> Iterator[str]:
        for slot in range(num_slots):
            yield f"start {slot}"
            yield f"fence {slot}"
        for number in range(100):
            yield f"ack start of set {number}"
            yield from (f"layer {layer} of set {number}" for layer in range(num_layers))
            yield f"ack finish of set {number}"


class FaultyBackend(LaunchingBackend):
    """Fails for single bursts, by their first node; its `prepare` reads device indices as a real one does.

    Attributes:
        faults: by first node and "prepare", "finish" or the number of a layer.
        submitted: how many copies have been submitted.
    """

    def __init__(self, device: EmulatedDevice, num_layers: int = NUM_LAYERS) -> None:
        super().__init__(device, num_layers)
        self.faults: dict[tuple[int, str | int], BaseException] = {}
        self.submitted = 0

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        prepared = super().prepare(ops)
        self._raise_fault(ops[0].node_id, "prepare")
        self._device.read([ops[0].device_indices])
        return prepared

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        if layer in self.entered_layers:
            self.entered_layers[layer].set()
        if layer in self.layer_gates:
            self.layer_gates[layer].wait()
        self._raise_fault(prepared[0], layer)
        super().enqueue_layer(prepared, layer)
        self.submitted += 1

    def finish(self, prepared: Any) -> None:
        super().finish(prepared)
        self._raise_fault(prepared[0], "finish")

    def _raise_fault(self, node: int, where: str | int) -> None:
        if (node, where) in self.faults:
            raise self.faults.pop((node, where))


class Place(NamedTuple):
    """Where a fault is put: the device and backend, and the number, from 0, and first node of the burst to fail."""

    device: FaultyDevice
    backend: FaultyBackend
    burst: int
    node: int


class Fault(NamedTuple):
    """One way to fail a burst of `NUM_LAYERS` layers.

    Attributes:
        name: what fails.
        stage, layer: what is reported of it.
        enqueued, landed: how many layers get as far as that.
        put: puts the fault in its place.
    """

    name: str
    stage: str
    layer: int | None
    enqueued: int
    landed: int
    put: Callable[[Place, BaseException], object]


def _event(call: str, name: str) -> Callable[[Place, BaseException], object]:
    return lambda place, error: place.device.fail(call, name.format(place.burst), error)


def _backend(where: str | int) -> Callable[[Place, BaseException], object]:
    return lambda place, error: place.backend.faults.__setitem__((place.node, where), error)


AT_HAND_OUT = [
    Fault("start record", "hand-out", None, 0, 0, _event("record", "start {}")),
    Fault("fence record", "hand-out", None, 0, 0, _event("record", "fence {}")),
]
PREPARING = [
    Fault("start synchronize", "preparing", None, 0, 0, _event("synchronize", "start {}")),
    Fault("start wait", "preparing", None, 0, 0, _event("wait", "start {}")),
    Fault("prepare", "preparing", None, 0, 0, _backend("prepare")),
    Fault("index move", "preparing", None, 0, 0, lambda place, error: place.device.fail_next("d2h", error)),
]
ENQUEUING = [
    Fault("fence wait", "enqueuing", 0, 0, 0, _event("wait", "fence {}")),
    Fault("ack start record", "enqueuing", 0, 0, 0, _event("record", "ack start of set {}")),
    Fault("copy submission", "enqueuing", 0, 0, 0, lambda place, error: place.device.fail_next("h2d", error)),
    Fault("first layer", "enqueuing", 0, 0, 0, _backend(0)),
    Fault("middle layer", "enqueuing", 2, 2, 2, _backend(2)),
    Fault("last layer", "enqueuing", 3, 3, 3, _backend(3)),
    Fault("first layer's record", "enqueuing", 0, 0, 0, _event("record", "layer 0 of set {}")),
    Fault("middle layer's record", "enqueuing", 2, 2, 2, _event("record", "layer 2 of set {}")),
    Fault("last layer's record", "enqueuing", 3, 3, 3, _event("record", "layer 3 of set {}")),
    Fault("ack finish record", "enqueuing", None, 4, 4, _event("record", "ack finish of set {}")),
]
LANDING = [
    Fault("first layer's landing", "device", 0, 4, 0, _event("synchronize", "layer 0 of set {}")),
    Fault("middle layer's landing", "device", 2, 4, 2, _event("synchronize", "layer 2 of set {}")),
    Fault("last landing", "device", None, 4, 4, _event("synchronize", "ack finish of set {}")),
    Fault("finish", "finish", None, 4, 4, _backend("finish")),
]
FAULTS = [*AT_HAND_OUT, *PREPARING, *ENQUEUING, *LANDING]


def each(faults: Sequence[Fault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=[fault.name for fault in faults])


@dataclass
class Setup:
    """A started scheduler with everything that a fault can be put in."""

    device: FaultyDevice
    backend: FaultyBackend
    scheduler: TransferScheduler
    on_acks: list[Any]

    def put(self, fault: Fault, *, burst: int = 0, node: int = 1, error: BaseException | None = None) -> BaseException:
        """Put the fault where the `burst`-th hand-out, of `node`, meets it; gives the error that it will raise."""
        error = error or RuntimeError(f"no {fault.name}")
        fault.put(Place(self.device, self.backend, burst, node), error)
        return error


@pytest.fixture
def plane() -> str:
    """There is no native one for such a device; what fails there is in `test_native_plane` and `tests/native`."""
    return "python"


@pytest.fixture
def device() -> Iterator[FaultyDevice]:
    with FaultyDevice() as faulty:
        yield faulty


@pytest.fixture
def backend(device: FaultyDevice) -> FaultyBackend:
    return FaultyBackend(device)


@pytest.fixture
def setup(device: FaultyDevice, backend: FaultyBackend, make_scheduler: MakeScheduler) -> Setup:
    on_acks: list[Any] = []
    scheduler = make_scheduler(backend, on_ack=on_acks.append, fence_stream=device.Stream())
    return Setup(device, backend, scheduler, on_acks)


def event_names(logs: list[Any]) -> list[str]:
    return [entry["event"] for entry in logs]


@pytest.fixture
def loops() -> Iterator[Loops]:
    both = Loops()
    yield both
    both.close()


def assert_load_failed(error: BaseException | None, node_ids: tuple[int, ...], fault: Fault, cause: Any) -> None:
    assert isinstance(error, LoadFailedError)
    assert (error.node_ids, error.layer, error.cause) == (node_ids, fault.layer, cause)


# -- what a failure says and does -------------------------------------------------------------------------------------


@each(FAULTS)
def test_a_failure_is_logged_once_with_its_place_and_latched(setup: Setup, fault: Fault, logs: list[Any]) -> None:
    error = setup.put(fault, node=5)
    handle = hand_out(setup.scheduler, 5, 6)
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    setup.scheduler.close(WAIT)
    (entry,) = [entry for entry in logs if entry["log_level"] not in ("debug", "info")]
    assert entry["event"] == "burst_failed"
    assert (entry["node_ids"], entry["layer"], entry["stage"]) == ([5, 6], fault.layer, fault.stage)
    assert entry["exc_info"] is error
    assert setup.scheduler.last_error is error


@each([*PREPARING, *ENQUEUING, *LANDING])
def test_every_parked_waiter_is_released(setup: Setup, loops: Loops, fault: Fault) -> None:
    setup.backend.gate.clear()
    if fault.name.startswith("start"):  # met before `prepare`: hold the data plane in the burst before
        in_front = hand_out(setup.scheduler, 9)
        cause = setup.put(fault, burst=1, node=5)
    else:
        in_front = None
        cause = setup.put(fault, node=5)
    handle = hand_out(setup.scheduler, 5, 6)
    crowd = parked_crowd(handle, setup.device, loops)
    setup.device.hold("h2d")
    setup.backend.release()
    eventually(lambda: handle.stale or handle.layer_enqueued(NUM_LAYERS - 1))
    setup.device.resume("h2d")
    for error in errors_of(crowd.ends):
        assert_load_failed(error, (5, 6), fault, cause)
    for layer in range(NUM_LAYERS):
        assert errors_of(crowd.waits[layer]) == [None, None], f"wait_layer({layer}) never raises"
        for error in errors_of(crowd.enqueued[layer]):
            assert isinstance(error, LoadFailedError if layer >= fault.enqueued else type(None))
        for error in errors_of(crowd.layers[layer]):
            assert isinstance(error, LoadFailedError if layer >= fault.landed else type(None))
    for iteration in crowd.iterations:
        seen, error = iteration.result(WAIT)
        assert seen == list(range(fault.landed))
        assert isinstance(error, LoadFailedError if fault.landed < NUM_LAYERS else type(None))
    assert in_front is None or in_front.result(WAIT).status is AckStatus.OK


@each(FAULTS)
def test_whoever_comes_late_gets_the_same_answers(setup: Setup, loops: Loops, fault: Fault) -> None:
    cause = setup.put(fault)
    handle = hand_out(setup.scheduler, 1)
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    crowd = Crowd(handle, setup.device, loops)
    for error in (*errors_of(crowd.ends), handle.exception()):
        assert_load_failed(error, (1,), fault, cause)
    assert handle.stale
    assert handle.done()
    for layer in range(NUM_LAYERS):
        assert errors_of(crowd.waits[layer]) == [None, None]
        for error in errors_of(crowd.layers[layer]):
            assert isinstance(error, LoadFailedError if layer >= fault.landed else type(None))


@each(FAULTS)
def test_its_one_ack_is_empty_and_between_those_of_its_neighbours(setup: Setup, fault: Fault) -> None:
    setup.device.hold("h2d")
    before = hand_out(setup.scheduler, 1)
    eventually(lambda: before.layer_enqueued(NUM_LAYERS - 1))
    setup.put(fault, burst=1, node=2)
    failing = hand_out(setup.scheduler, 2)
    if fault.stage in ("preparing", "enqueuing"):
        eventually(lambda: failing.stale)
    after = hand_out(setup.scheduler, 3)
    eventually(lambda: after.layer_enqueued(NUM_LAYERS - 1))
    assert setup.scheduler.pop_acks() == []
    setup.device.resume("h2d")
    assert after.result(WAIT).status is AckStatus.OK
    acks = setup.scheduler.pop_acks()
    assert [(ack.burst_id, ack.node_ids, ack.status) for ack in acks] == [
        (1, (1,), AckStatus.OK),
        (2, (2,), AckStatus.FAILED),
        (3, (3,), AckStatus.OK),
    ]
    failed = acks[1]
    assert (failed.num_tokens, dict(failed.num_tokens_by_pool), failed.num_bytes) == (0, {"kv": 0}, 0)
    assert failed.duration_ms is None
    assert failed.error is not None
    setup.scheduler.close(WAIT)
    assert setup.on_acks == acks


@each(FAULTS)
def test_the_next_bursts_are_served_in_every_slot_by_the_same_threads(setup: Setup, fault: Fault) -> None:
    ours = {thread for thread in threading.enumerate() if thread.name.startswith("hicache-sched")}
    assert len(ours) == 3
    setup.put(fault)
    with pytest.raises(LoadFailedError):
        hand_out(setup.scheduler, 1).result(WAIT)
    later = [hand_out(setup.scheduler, node) for node in range(2, 6)]
    assert [handle.result(WAIT).status for handle in later] == [AckStatus.OK] * 4
    assert [(handle.slot, handle.generation) for handle in later] == [(1, 1), (2, 1), (0, 2), (1, 2)]
    assert setup.backend.copied()[-16:] == [(node, layer) for node in range(2, 6) for layer in range(NUM_LAYERS)]
    assert all(thread.is_alive() for thread in ours)


@each([*PREPARING, *ENQUEUING, LANDING[-1]])
@pytest.mark.parametrize("error_type", [SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_fails_the_burst_as_well(
    setup: Setup, fault: Fault, error_type: type[BaseException]
) -> None:
    error = setup.put(fault, error=error_type("out"))
    with pytest.raises(LoadFailedError) as failure:
        hand_out(setup.scheduler, 1).result(WAIT)
    assert failure.value.cause is error
    assert hand_out(setup.scheduler, 2).result(WAIT).status is AckStatus.OK


@pytest.mark.parametrize("fails", [True, False])
def test_wait_layer_raises_what_the_device_says_only_where_the_burst_does_not_fail(setup: Setup, fails: bool) -> None:
    error = RuntimeError("no wait")
    setup.device.fail("wait", "layer 0 of set 0", error)
    if fails:
        setup.put(ENQUEUING[-1])
    setup.device.hold("h2d")
    handle = hand_out(setup.scheduler, 1)
    eventually(lambda: handle._burst.progress.submitted)
    with setup.device.stream(setup.device.Stream()):
        if fails:
            handle.wait_layer(0, WAIT)
        else:
            with pytest.raises(RuntimeError, match="no wait"):
                handle.wait_layer(0, WAIT)


# -- at the hand-out --------------------------------------------------------------------------------------------------


def test_a_fence_that_is_no_stream_gives_a_failed_handle(setup: Setup, loops: Loops) -> None:
    setup.scheduler.fence_stream = object()
    handle = hand_out(setup.scheduler, 1, 2)
    assert handle.stale
    for error in errors_of(Crowd(handle, setup.device, loops).ends):
        assert isinstance(error, LoadFailedError)
        assert isinstance(error.cause, AttributeError)
    assert setup.backend.events == [], "the data plane does not begin it"


async def test_a_hand_out_that_waited_gives_a_failed_handle_too(setup: Setup) -> None:
    setup.device.hold("h2d")
    first, *_ = [hand_out(setup.scheduler, node) for node in (1, 2, 3)]
    setup.scheduler.load(load_op(4))
    cause = setup.put(AT_HAND_OUT[0])
    waiting = asyncio.create_task(setup.scheduler.start_loading())
    await first.enqueued(NUM_LAYERS - 1)
    setup.device.resume("h2d")
    handle = await asyncio.wait_for(waiting, WAIT)
    assert handle is not None
    assert (handle.slot, handle.generation) == (0, 2)
    with pytest.raises(LoadFailedError) as failure:
        await asyncio.wait_for(handle, WAIT)
    assert failure.value.cause is cause


def test_a_keyboard_interrupt_at_the_hand_out_is_the_callers_and_the_burst_has_failed(setup: Setup) -> None:
    setup.put(AT_HAND_OUT[0], error=KeyboardInterrupt())
    setup.scheduler.load(load_op(1))
    with pytest.raises(KeyboardInterrupt):
        setup.scheduler.start_loading_sync()
    handle = setup.scheduler.handle_for(0)
    assert handle is not None
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    assert hand_out(setup.scheduler, 2).result(WAIT).status is AckStatus.OK


# -- planning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (page_op(7, [0], [99]), "out of range"),
        (page_op(7, [0, 1], [3, 3]), "already a destination"),
        (LoadOp(7, torch.arange(4), torch.arange(1, 5)), "align"),
    ],
)
def test_bad_indices_fail_the_burst_before_a_byte_is_copied(
    device: FaultyDevice, make_scheduler: MakeScheduler, op: LoadOp, message: str
) -> None:
    pair = make_pair(num_layers=NUM_LAYERS)
    before = raw_bytes(pair.device)
    scheduler = make_scheduler(PooledBackend([pair]))
    scheduler.load(op)
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    with pytest.raises(LoadFailedError, match=message) as failure:
        handle.result(WAIT)
    assert isinstance(failure.value.cause, InvalidLoadError)
    assert raw_bytes(pair.device) == before
    scheduler.load(page_op(8, [0], [1]))
    good = scheduler.start_loading_sync(WAIT)
    assert good is not None
    assert good.result(WAIT).num_tokens == 4


# -- what was submitted lands first -----------------------------------------------------------------------------------


@dataclass
class EightLayers:
    """A burst that fails at layer 5 of 8, held with 2 of its submitted layers copied."""

    device: FaultyDevice
    backend: FaultyBackend
    scheduler: TransferScheduler
    handle: LoadHandle
    crowd: Crowd


@pytest.fixture(params=["copies", "record"])
def failed_at_5(request: pytest.FixtureRequest, loops: Loops) -> Iterator[EightLayers]:
    with FaultyDevice(num_layers=8) as device:
        backend = FaultyBackend(device, num_layers=8)
        with TransferScheduler(backend, runtime=device) as scheduler:
            device.hold("h2d")
            if request.param == "copies":
                backend.faults[1, 5] = RuntimeError("no layer 5")
            else:
                device.fail("record", "layer 5 of set 0", RuntimeError("no event for layer 5"))
            backend.gate.clear()
            handle = hand_out(scheduler, 1)
            crowd = parked_crowd(handle, device, loops)
            backend.gate.set()
            eventually(lambda: handle.stale)
            device.step("h2d", 2)
            yield EightLayers(device, backend, scheduler, handle, crowd)
            device.resume("h2d")


def test_waiters_on_layers_that_will_not_come_are_released_at_once(failed_at_5: EightLayers) -> None:
    crowd = failed_at_5.crowd
    for layer in (5, 6, 7):
        assert errors_of(crowd.waits[layer]) == [None, None]
        for error in errors_of([*crowd.enqueued[layer], *crowd.layers[layer]]):
            assert isinstance(error, LoadFailedError)
    assert failed_at_5.backend.copied() == [(1, 0), (1, 1)], "while the rest is still held"


def test_waiters_on_layers_that_were_submitted_are_released_as_those_land(failed_at_5: EightLayers) -> None:
    crowd = failed_at_5.crowd
    for layer in (2, 3, 4):
        inline_wait, stream_wait = crowd.waits[layer]
        assert stream_wait.result(WAIT) is None
        assert not any(waiter.done() for waiter in (inline_wait, *crowd.layers[layer]))
        failed_at_5.device.step("h2d", 1)
        assert errors_of([inline_wait, *crowd.layers[layer]]) == [None, None, None]


def test_the_end_comes_only_after_the_last_submitted_copy(failed_at_5: EightLayers) -> None:
    submitted = failed_at_5.backend.submitted
    failed_at_5.device.step("h2d", submitted - 3)
    assert not any(end.done() for end in failed_at_5.crowd.ends)
    assert failed_at_5.scheduler.pop_acks() == []
    assert failed_at_5.backend.events[-1] == ("copy", 1, submitted - 2)
    failed_at_5.device.step("h2d", 1)
    for error in errors_of(failed_at_5.crowd.ends):
        assert isinstance(error, LoadFailedError)
    assert [ack.status for ack in failed_at_5.scheduler.pop_acks()] == [AckStatus.FAILED]
    assert failed_at_5.backend.events[-2:] == [("copy", 1, submitted - 1), ("finish", 1)]


def test_a_handle_is_stale_from_the_failure_on(failed_at_5: EightLayers) -> None:
    assert failed_at_5.handle.stale
    assert not failed_at_5.handle.done()
    assert failed_at_5.handle.exception() is None, "it has not ended"


@pytest.mark.parametrize("event_names", [["layer 0"], ["layer 0", "ack finish"]])
def test_events_that_cannot_be_waited_for_do_not_end_the_burst_before_its_copies(
    setup: Setup, event_names: list[str]
) -> None:
    setup.device.hold("h2d")
    for name in event_names:
        setup.device.fail("synchronize at once", f"{name} of set 0", RuntimeError("not this one"))
    handle = hand_out(setup.scheduler, 1)
    eventually(lambda: handle.stale and handle._burst.progress.submitted)
    setup.device.step("h2d", NUM_LAYERS - 1)
    assert not handle.done()
    setup.device.step("h2d", 1)
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    assert setup.backend.events[-2:] == [("copy", 1, NUM_LAYERS - 1), ("finish", 1)]


# -- raw events -------------------------------------------------------------------------------------------------------


def h2d_work(setup: Setup, calls: MutableSequence[Any]) -> list[str]:
    """The events recorded on the h2d stream, in order."""
    h2d_stream = setup.scheduler.h2d_stream
    return [obj.name for name, obj, stream, _ in calls if name == "record" and stream is h2d_stream]


RAW_EVENTS = [*(f"layer {layer} of set 0" for layer in range(NUM_LAYERS)), "ack finish of set 0"]


@each([*PREPARING, *ENQUEUING])
def test_events_of_layers_that_were_not_submitted_are_recorded_behind_what_was(setup: Setup, fault: Fault) -> None:
    calls = setup.device.record_calls()
    setup.device.hold("h2d")
    setup.put(fault)
    handle = hand_out(setup.scheduler, 1)
    eventually(lambda: handle._burst.progress.submitted and handle.stale)
    assert h2d_work(setup, calls)[-len(RAW_EVENTS) :] == RAW_EVENTS
    setup.device.resume("h2d")
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)


def test_one_event_that_cannot_be_recorded_does_not_leave_out_the_others(setup: Setup) -> None:
    calls = setup.device.record_calls()
    setup.device.fail("record", "layer 1 of set 0", RuntimeError("broken event"), times=2)
    handle = hand_out(setup.scheduler, 1)
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    missing = "layer 1 of set 0"
    assert h2d_work(setup, calls)[1:] == [name for name in RAW_EVENTS if name != missing]


@pytest.mark.parametrize("error", [RuntimeError("broken event"), SystemExit("broken event")])
def test_the_end_waits_for_the_stream_where_no_finish_event_can_be_recorded(setup: Setup, error: BaseException) -> None:
    setup.device.hold("h2d")
    setup.device.fail("record", "ack finish of set 0", error, times=3)
    handle = hand_out(setup.scheduler, 1)
    eventually(lambda: handle.stale)
    setup.device.step("h2d", 3)
    assert not handle.done()
    setup.device.step("h2d", 1)
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_burst_is_never_ok_without_all_its_layers(setup: Setup, layer: int) -> None:
    setup.device.fail("record", f"layer {layer} of set 0", SystemExit("out"), times=2)
    handle = hand_out(setup.scheduler, 1)
    with pytest.raises(LoadFailedError):
        handle.result(WAIT)
    assert hand_out(setup.scheduler, 2).result(WAIT).status is AckStatus.OK


def test_events_that_cannot_be_made_fail_the_burst(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_event(**kwargs: Any) -> Any:
        raise MemoryError("no event left")

    with monkeypatch.context() as patch:
        patch.setattr(setup.scheduler.device, "new_event", no_event)
        handle = hand_out(setup.scheduler, 1)
        with pytest.raises(LoadFailedError) as failure:
            handle.result(WAIT)
    assert isinstance(failure.value.cause, MemoryError)
    assert hand_out(setup.scheduler, 2).result(WAIT).status is AckStatus.OK


# -- callbacks and loggers --------------------------------------------------------------------------------------------


RAISED = [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
each_raised = pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@each_raised
def test_an_on_ack_that_raises_changes_nothing(
    make_scheduler: MakeScheduler, event_loop: str, raised: BaseException, logs: list[Any]
) -> None:
    called: list[int] = []

    def on_ack(ack: Any) -> None:
        called.append(ack.burst_id)
        raise raised

    scheduler = make_scheduler(on_ack=on_ack, event_loop=event_loop)
    handles = [hand_out(scheduler, node) for node in (1, 2, 3)]
    assert [handle.result(WAIT).status for handle in handles] == [AckStatus.OK] * 3
    scheduler.close(WAIT)
    assert called == [1, 2, 3]
    assert event_names(logs).count("on_ack_failed") == 3
    assert [ack.burst_id for ack in scheduler.pop_acks()] == [1, 2, 3]


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@each_raised
def test_a_done_callback_that_raises_keeps_no_other_from_running(
    device: FaultyDevice, make_scheduler: MakeScheduler, event_loop: str, raised: BaseException, logs: list[Any]
) -> None:
    called: list[str] = []

    def bad(handle: LoadHandle) -> None:
        called.append("bad")
        raise raised

    scheduler = make_scheduler(on_ack=lambda ack: called.append("on_ack"), event_loop=event_loop)
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    handle.add_done_callback(bad)
    handle.add_done_callback(lambda handle: called.append("good"))
    device.resume("h2d")
    scheduler.close(WAIT)
    assert called == ["bad", "good", "on_ack"]
    assert event_names(logs).count("done_callback_failed") == 1


@pytest.fixture(params=RAISED, ids=lambda raised: type(raised).__name__)
def broken_logger(request: pytest.FixtureRequest) -> Iterator[None]:
    """structlog is configured, by the application, with a processor that raises."""

    def broken(logger: Any, name: str, event_dict: Any) -> Any:
        # Where the test itself logs, Ctrl-C would be its own.
        if threading.current_thread() is not threading.main_thread():
            raise request.param
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[broken])
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("broken_logger")
@each([AT_HAND_OUT[0], *PREPARING[2:], ENQUEUING[4], ENQUEUING[-1], LANDING[0], LANDING[-1]])
def test_a_logger_that_raises_changes_nothing(setup: Setup, loops: Loops, fault: Fault) -> None:
    cause = setup.put(fault)
    failing = hand_out(setup.scheduler, 1)
    good = hand_out(setup.scheduler, 2)
    for error in errors_of(Crowd(failing, setup.device, loops).ends):
        assert_load_failed(error, (1,), fault, cause)
    assert good.result(WAIT).status is AckStatus.OK
    setup.scheduler.close(WAIT)
    assert [ack.burst_id for ack in setup.on_acks] == [1, 2]
    assert setup.scheduler.last_error is cause


@pytest.mark.usefixtures("broken_logger")
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
def test_a_logger_that_raises_ends_no_thread(
    device: FaultyDevice, make_scheduler: MakeScheduler, event_loop: str
) -> None:
    def on_ack(ack: Any) -> None:
        asyncio.get_running_loop().stop()  # ends in "thread_failed", which the logger then raises from

    scheduler = make_scheduler(on_ack=on_ack, event_loop=event_loop)
    for node in (1, 2, 3):
        assert hand_out(scheduler, node).result(WAIT).status is AckStatus.OK
    scheduler.close(WAIT)


# -- inline mode ------------------------------------------------------------------------------------------------------


INLINE = [
    Fault("start record", "enqueuing", 0, 0, 0, _event("record", "start {}")),
    Fault("start wait", "enqueuing", 0, 0, 0, _event("wait", "start {}")),
    *PREPARING[2:],
    *ENQUEUING[1:],
    Fault("landing", "device", 1, 4, 1, _event("query", "layer 1 of set {}")),
    LANDING[-1],
]


@each(INLINE)
def test_inline_a_failure_gives_one_empty_ack_and_the_next_burst_is_served(
    device: FaultyDevice, backend: FaultyBackend, make_scheduler: MakeScheduler, fault: Fault, logs: list[Any]
) -> None:
    on_acks: list[Any] = []
    scheduler = make_scheduler(backend, mode="inline", on_ack=on_acks.append)
    error = RuntimeError(f"no {fault.name}")
    fault.put(Place(device, backend, 0, 1), error)
    handle = hand_out(scheduler, 1)
    for layer in range(NUM_LAYERS):
        handle.wait_layer(layer, WAIT)
    with pytest.raises(LoadFailedError) as failure:
        handle.result(WAIT)
    assert_load_failed(failure.value, (1,), fault, error)
    assert hand_out(scheduler, 2).result(WAIT).status is AckStatus.OK
    acks = scheduler.pop_acks()
    assert [(ack.status, ack.num_tokens) for ack in acks] == [(AckStatus.FAILED, 0), (AckStatus.OK, 4)]
    assert on_acks == acks
    (entry,) = [entry for entry in logs if entry["event"] == "burst_failed"]
    assert (entry["layer"], entry["stage"]) == (fault.layer, fault.stage)
    assert scheduler.last_error is error


# -- any schedule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a random schedule does: bursts with a fault or None, and how many copies are let through after each."""

    bursts: list[Fault | None]
    steps: list[int]


plans = st.lists(
    st.tuples(st.none() | st.sampled_from(FAULTS), st.integers(0, 2 * NUM_LAYERS)), min_size=1, max_size=6
).map(lambda pairs: Plan([fault for fault, _ in pairs], [steps for _, steps in pairs]))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans, event_loop=st.sampled_from(["uvloop", "asyncio"]))
def test_every_schedule_ends_with_one_right_ack_per_burst(plan: Plan, event_loop: Any) -> None:
    on_acks: list[Any] = []
    with FaultyDevice(num_slots=len(plan.bursts)) as device:
        backend = FaultyBackend(device)
        config = SchedulerConfig(num_slots=len(plan.bursts), event_loop=event_loop)
        scheduler = TransferScheduler(
            backend, runtime=device, config=config, on_ack=on_acks.append, fence_stream=device.Stream()
        )
        scheduler.start()
        # Every burst has an event set of its own, so that a fault in one is met by no other.
        scheduler._event_sets._free = deque(maxlen=0)
        device.hold("h2d")
        handles: list[LoadHandle] = []
        waiters: list[Future[Any]] = []
        for number, (fault, steps) in enumerate(zip(plan.bursts, plan.steps, strict=True)):
            if fault is not None:
                eventually(lambda: all(handle._burst.progress.submitted for handle in handles))
                fault.put(Place(device, backend, number, number), RuntimeError(fault.name))
            handle = hand_out(scheduler, number)
            handles.append(handle)
            waiters += [in_thread(partial(handle.wait_layer, layer, WAIT)) for layer in range(NUM_LAYERS)]
            _let_through(device, backend, handles, steps)
        device.resume("h2d")
        scheduler.close(WAIT)
        assert errors_of(waiters) == [None] * len(waiters)
        acks = scheduler.pop_acks()
    expected = [AckStatus.OK if fault is None else AckStatus.FAILED for fault in plan.bursts]
    assert [(ack.burst_id, ack.status) for ack in acks] == list(enumerate(expected, start=1))
    assert on_acks == acks
    assert [ack.num_tokens for ack in acks] == [4 if status is AckStatus.OK else 0 for status in expected]
    for handle, fault in zip(handles, plan.bursts, strict=True):
        assert (handle.stale, handle.done()) == (fault is not None, True)
        assert [handle.layer_landed(layer) for layer in range(NUM_LAYERS)].count(True) == (
            NUM_LAYERS if fault is None else fault.landed
        )


def _let_through(device: FaultyDevice, backend: FaultyBackend, handles: list[LoadHandle], steps: int) -> None:
    """Let `steps` copies through, no more than there will be."""
    eventually(lambda: all(handle._burst.progress.submitted for handle in handles))
    device.step("h2d", min(steps, backend.submitted - len(backend.copied())))

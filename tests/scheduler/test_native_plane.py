"""What only the native data plane does; all else is tested with each plane."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import structlog
import torch

from hicache_sched import (
    AckStatus,
    DeviceLostError,
    HiCacheSchedError,
    LoadFailedError,
    LoadHandle,
    LoadOp,
    SchedulerConfig,
    TransferScheduler,
    native,
)
from hicache_sched.burst import Burst
from hicache_sched.copy import CopyPlan, PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.progress import Progress
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.copy.builders import expected_bytes, make_pair, page_op, raw_bytes, tokens_of
from tests.scheduler.crowd import WAIT, eventually, in_thread
from tests.scheduler.interrupt import InterruptAfterCall

pytestmark = pytest.mark.skipif(native.module is None, reason="needs the native part")

OPS = [page_op(1, [5, 2], [1, 6]), page_op(2, [7], [0])]


@pytest.fixture
def plane() -> str:
    """What is chosen where nothing is said."""
    return "auto"


def load(scheduler: TransferScheduler, ops: Sequence[LoadOp] = OPS) -> LoadHandle:
    for op in ops:
        scheduler.load(op)
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    return handle


# -- without the GIL --------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_gives_up_the_gil() -> Iterator[Any]:
    """A way to sleep that keeps the GIL, and no request for it by another thread is heard."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield ctypes.PyDLL(None).usleep
    sys.setswitchinterval(interval)


def test_a_burst_lands_while_this_thread_keeps_the_gil(
    make_scheduler: MakeScheduler, nobody_gives_up_the_gil: Any
) -> None:
    pair = make_pair(num_layers=8)
    wanted = expected_bytes(pair, OPS)
    scheduler = make_scheduler(PooledBackend([pair]))
    progress = load(scheduler)._burst.progress
    for _ in range(10_000):
        if progress.landed == 8:
            break
        nobody_gives_up_the_gil(1000)
    assert progress.landed == 8
    assert raw_bytes(pair.device) == wanted


def test_a_thread_that_waits_for_a_layer_is_woken_although_the_loop_is_stuck(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def on_ack(ack: Any) -> None:
        stuck.set()
        go_on.wait(WAIT)

    scheduler = make_scheduler(PooledBackend([make_pair()]), on_ack=on_ack)
    load(scheduler).result(WAIT)
    assert stuck.wait(WAIT)
    device.hold("h2d")
    handle = load(scheduler)
    on_stream = device.Stream()

    def wait() -> None:
        handle.wait_layer(0, WAIT)  # on the thread's default stream: until it has landed
        with device.stream(on_stream):
            handle.wait_layer(1, WAIT)

    waiting = in_thread(wait)
    device.resume("h2d")
    waiting.result(WAIT)
    go_on.set()


def test_a_thread_that_waits_for_a_layer_to_land_sleeps_until_then(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    look = Burst.look_landed

    def counted(*args: Any) -> Any:
        next(looks)
        return look(*args)

    monkeypatch.setattr(Burst, "look_landed", counted)
    scheduler = make_scheduler(PooledBackend([make_pair(num_layers=4)]))
    device.hold("h2d")
    handle = load(scheduler)
    waiting = in_thread(lambda: handle.wait_layer(3, WAIT))
    eventually(lambda: handle.layer_enqueued(3))
    for layer in range(4):
        device.step("h2d")
        eventually(lambda layer=layer: handle.layer_landed(layer))  # type: ignore[misc]
    waiting.result(WAIT)
    assert next(looks) <= 4


# -- which plane ------------------------------------------------------------------------------------------------------


class OwnCopies(PooledBackend):
    """Might do anything differently."""


class OwnDevice(EmulatedDevice):
    """Likewise."""


def started(logs: list[Any]) -> tuple[str, str | None]:
    (entry,) = [entry for entry in logs if entry["event"] == "scheduler_started"]
    return entry["plane"], entry["plane_reason"]


def test_it_is_chosen_where_it_can_plan_and_the_log_says_so(make_scheduler: MakeScheduler, logs: list[Any]) -> None:
    scheduler = make_scheduler(PooledBackend([make_pair()]))
    assert started(logs) == ("native", None)
    assert scheduler.stats().plane == "native"


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (LaunchingBackend, "LaunchingBackend makes its copies in Python"),
        (lambda device: OwnCopies([make_pair()]), "OwnCopies makes its copies in Python"),
    ],
)
def test_a_backend_that_makes_its_copies_itself_gets_the_python_plane_and_the_log_says_why(
    device: EmulatedDevice, make_scheduler: MakeScheduler, backend: Any, reason: str, logs: list[Any]
) -> None:
    make_scheduler(backend(device))
    assert started(logs) == ("python", reason)


def test_a_device_that_is_not_quite_the_emulated_one_gets_the_python_plane(logs: list[Any]) -> None:
    with OwnDevice() as device, TransferScheduler(PooledBackend([make_pair()]), runtime=device):
        assert started(logs) == ("python", "OwnDevice is not known to it")


def test_without_the_native_part_the_log_says_why_it_is_missing(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "missing_because", "of a test")
    with EmulatedDevice() as device:
        make_scheduler(PooledBackend([make_pair()]), runtime=device).close(WAIT)
    assert started(logs) == ("python", "the native part is missing: of a test")


def test_asked_for_by_name_where_there_is_none_it_is_refused_with_the_reason() -> None:
    with OwnDevice() as device:
        scheduler = TransferScheduler(LaunchingBackend(device), runtime=device, config=SchedulerConfig(plane="native"))
        with pytest.raises(HiCacheSchedError, match='plane="native" cannot be had: OwnDevice is not known to it'):
            scheduler.start()


# -- what it is given -------------------------------------------------------------------------------------------------


def test_ops_that_were_loaded_before_the_start_are_loaded(make_scheduler: MakeScheduler) -> None:
    pair = make_pair()
    wanted = expected_bytes(pair, OPS)
    scheduler = make_scheduler(PooledBackend([pair]), start=False)
    for op in OPS:
        scheduler.load(op)
    scheduler.start()
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    assert handle.result(WAIT).num_tokens == 12
    assert raw_bytes(pair.device) == wanted


class NotPlain(torch.Tensor):
    """A subclass, whose memory may not hold what it says."""

    def data_ptr(self) -> int:
        raise AssertionError("nobody may look there")


def strided(op: LoadOp) -> LoadOp:
    """The same indices, each with another behind it in memory."""
    host, device = (
        torch.stack([indices, indices + 1], dim=1)[:, 0] for indices in (op.host_indices, op.device_indices)
    )
    return LoadOp(op.node_id, host, device)


def expanded(op: LoadOp) -> LoadOp:
    """The same token again and again, as one number in memory."""
    host = torch.tensor([7]).expand(4)
    return LoadOp(op.node_id, host, op.device_indices[:4])


def not_plain(op: LoadOp) -> LoadOp:
    return LoadOp(op.node_id, op.host_indices.as_subclass(NotPlain), op.device_indices)


@pytest.mark.parametrize("change", [strided, expanded, not_plain])
def test_indices_are_read_however_they_lie_in_memory(make_scheduler: MakeScheduler, change: Any) -> None:
    pair = make_pair(page_size=1)
    ops = [change(page_op(1, [5, 2, 3, 1], [1, 6, 4, 2], page_size=1)), page_op(2, [7], [0], page_size=1)]
    wanted = expected_bytes(pair, ops)
    assert load(make_scheduler(PooledBackend([pair])), ops).result(WAIT).status is AckStatus.OK
    assert raw_bytes(pair.device) == wanted


def zeros_without_memory() -> torch.Tensor:
    return torch._efficientzerotensor(4, dtype=torch.int64)


def given_back() -> torch.Tensor:
    indices = torch.arange(4)
    indices.untyped_storage().resize_(0)
    return indices


def negated() -> torch.Tensor:
    return torch._neg_view(-torch.arange(4))


@pytest.mark.parametrize("indices", [zeros_without_memory, given_back, negated])
@pytest.mark.parametrize("plane", ["native", "python"])
def test_indices_that_are_not_in_memory_as_they_are_fail_as_python_fails_to_read_them(
    make_scheduler: MakeScheduler, indices: Any, plane: str
) -> None:
    scheduler = make_scheduler(PooledBackend([make_pair()]), plane=plane)
    with pytest.raises(LoadFailedError):
        load(scheduler, [LoadOp(1, indices(), torch.arange(4))]).result(WAIT)
    assert load(scheduler).result(WAIT).status is AckStatus.OK


def test_indices_are_those_of_the_load_whatever_the_tensor_is_made_to_refer_to_later(
    make_scheduler: MakeScheduler,
) -> None:
    pair = make_pair()
    host = tokens_of([5], 4)
    wanted = expected_bytes(pair, [LoadOp(1, tokens_of([5], 4), tokens_of([1], 4))])
    scheduler = make_scheduler(PooledBackend([pair]))
    scheduler.load(LoadOp(1, host, tokens_of([1], 4)))
    host.data = tokens_of([6], 4)
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    handle.result(WAIT)
    assert raw_bytes(pair.device) == wanted


def test_the_ops_of_an_interrupted_load_are_left_to_python(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    wanted = expected_bytes(pair, OPS)
    scheduler = make_scheduler(PooledBackend([pair]))
    scheduler.load(OPS[0])
    queue = scheduler._protocol._queue
    assert queue is not None
    indices = queue.indices
    with monkeypatch.context() as patch:
        patch.setattr(type(indices), "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.load(OPS[1])
    handle = scheduler.start_loading_sync(WAIT)
    assert handle is not None
    assert handle.node_ids == (1, 2), "it was loaded all the same"
    handle.result(WAIT)
    assert raw_bytes(pair.device) == wanted


def interrupted(*args: Any) -> bool:
    raise KeyboardInterrupt


# -- who looks ends what has landed -----------------------------------------------------------------------------------


def held_burst(device: EmulatedDevice, scheduler: TransferScheduler) -> LoadHandle:
    """A burst that is submitted, and held."""
    device.hold("h2d")
    handle = load(scheduler)
    eventually(lambda: handle.layer_enqueued(handle.num_layers - 1))
    return handle


@pytest.mark.parametrize(
    "sees",
    [
        lambda scheduler, handle: handle.done(),
        lambda scheduler, handle: bool(scheduler.pop_acks()),
        lambda scheduler, handle: scheduler.stats().landed_bursts == 1,
        lambda scheduler, handle: handle.layer_landed(0) and scheduler._protocol.counts()["acks_unpopped"] == 1,
    ],
)
def test_whoever_looks_sees_that_a_burst_has_ended_though_no_other_thread_gets_the_gil(
    device: EmulatedDevice, make_scheduler: MakeScheduler, nobody_gives_up_the_gil: Any, sees: Any
) -> None:
    scheduler = make_scheduler(PooledBackend([make_pair()]))
    handle = held_burst(device, scheduler)
    assert not sees(scheduler, handle)
    device.resume("h2d")
    deadline = time.monotonic() + WAIT
    while not sees(scheduler, handle):
        assert time.monotonic() < deadline
        nobody_gives_up_the_gil(100)
    assert handle.result(0).status is AckStatus.OK


@pytest.mark.usefixtures("no_debug_logs")
@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize(
    "function", ["observe", "_serve", "pop_report", "end_once_landed", "end", "publish", "give_back", "wake_all"]
)
def test_ctrl_c_in_one_who_looks_keeps_nobody_from_being_told(
    device: EmulatedDevice, make_scheduler: MakeScheduler, nobody_gives_up_the_gil: Any, function: str, is_heard: bool
) -> None:
    acks: list[int] = []
    on_ack = (lambda ack: acks.append(ack.burst_id)) if is_heard else None
    scheduler = make_scheduler(PooledBackend([make_pair()]), on_ack=on_ack, num_slots=1)
    interrupted = 0
    for num_bursts in itertools.count(1):
        handle = held_burst(device, scheduler)
        waiter = in_thread(partial(handle.result, WAIT))
        eventually(partial(bool, handle._burst._waiters))
        device.resume("h2d")
        interrupt = InterruptAfterCall(function, interrupted)
        sys.setprofile(interrupt)
        try:
            while not handle.done():
                nobody_gives_up_the_gil(100)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert waiter.result(WAIT).status is AckStatus.OK
        if interrupt.done:
            interrupted += 1
        elif interrupted or num_bursts == 100:  # on a busy machine the observer may have been first
            break
    scheduler.close(WAIT)  # which waits for the delivery of each
    popped = [ack.burst_id for ack in scheduler.pop_acks()]
    assert popped == list(range(1, num_bursts + 1))
    assert not is_heard or acks == popped
    assert interrupted, "it was interrupted at all"


def test_one_who_looks_does_not_wait_for_a_finish_that_blocks(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, entered, gate = LaunchingBackend(device), threading.Event(), threading.Event()

    def finish(prepared: Any) -> None:
        entered.set()
        assert gate.wait(WAIT)

    monkeypatch.setattr(backend, "finish", finish)
    scheduler = make_scheduler(backend, plane="native")
    handle = hand_out(scheduler, 1)
    assert entered.wait(WAIT)
    assert not handle.done()
    assert scheduler.pop_acks() == []
    gate.set()
    assert handle.result(WAIT).status is AckStatus.OK


# -- the calls it makes -----------------------------------------------------------------------------------------------


def calls_of(plane: str) -> list[tuple[str, str, str, str]]:
    """The calls of a burst with a fence, objects by the order in which they appear."""
    pair = make_pair(num_layers=3)
    with EmulatedDevice() as device:
        fence = device.Stream()
        with TransferScheduler(
            PooledBackend([pair]),
            runtime=device,
            fence_stream=fence,
            config=SchedulerConfig(plane=plane),  # type: ignore[arg-type]
        ) as scheduler:
            calls = device.record_calls()
            load(scheduler).result(WAIT)
            streams = {id(scheduler.h2d_stream): "h2d", id(scheduler.index_stream): "index", id(fence): "fence"}
            names: dict[int, str] = {}
            listed = []
            for call, what, stream, thread in calls:
                if call not in ("enter", "leave"):
                    name = streams.get(id(what)) or names.setdefault(id(what), f"event {len(names)}")
                    where = streams.get(id(stream), "a thread's own") if call != "synchronize" else ""
                    listed.append((call, name, where, thread))
    return listed


def by_thread(calls: list[tuple[str, str, str, str]]) -> dict[str, list[tuple[str, ...]]]:
    return {name: [call[:3] for call in calls if call[3] == name] for name in {call[3] for call in calls}}


def test_each_thread_makes_the_calls_that_it_makes_in_python() -> None:
    in_python = by_thread(calls_of("python"))
    in_python["hicache-sched-landings"] = in_python.pop("hicache-sched-observer")
    assert by_thread(calls_of("native")) == in_python


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "stage", "layer"), [("h2d", "enqueuing", 0), ("d2h", "preparing", None)])
def test_an_operation_that_is_refused_fails_its_burst_with_what_was_raised(
    device: EmulatedDevice, make_scheduler: MakeScheduler, engine: Any, stage: str, layer: int | None, logs: list[Any]
) -> None:
    scheduler = make_scheduler(PooledBackend([make_pair()]))
    error = RuntimeError("refused")
    device.fail_next(engine, error)
    with pytest.raises(LoadFailedError) as failure:
        load(scheduler).result(WAIT)
    assert failure.value.cause is error
    assert failure.value.layer == layer
    assert load(scheduler).result(WAIT).status is AckStatus.OK
    scheduler.close(WAIT)
    (entry,) = [entry for entry in logs if entry["event"] == "burst_failed"]
    assert (entry["stage"], entry["layer"], entry["node_ids"]) == (stage, layer, [1, 2])


def test_layers_before_one_that_is_refused_land_and_it_is_named(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    pair = make_pair(num_layers=4)
    wanted = expected_bytes(pair, OPS, layers=[0, 1])
    scheduler = make_scheduler(PooledBackend([pair]), h2d_queue_ops=1)  # one layer in flight
    device.hold("h2d")
    handle = load(scheduler)
    eventually(lambda: handle.layer_enqueued(0))
    device.step("h2d", 1)
    eventually(lambda: handle.layer_enqueued(1))
    device.fail_next("h2d", RuntimeError("refused"))
    device.resume("h2d")
    with pytest.raises(LoadFailedError) as failure:
        handle.result(WAIT)
    assert failure.value.layer == 2
    assert [handle.layer_landed(layer) for layer in range(4)] == [True, True, False, False]
    assert raw_bytes(pair.device) == wanted


@pytest.mark.parametrize("held", ["compute", "d2h", "h2d"])
def test_a_device_that_is_lost_while_a_burst_is_stuck_on_it_is_said_once(
    make_scheduler: MakeScheduler, held: Any, logs: list[Any]
) -> None:
    device = EmulatedDevice()
    scheduler = make_scheduler(PooledBackend([make_pair()]), runtime=device)
    device.hold(held)
    with device.stream(device.Stream()):
        device.launch(lambda: None)
        handles = [load(scheduler) for _ in range(3)]
    if held == "h2d":
        eventually(lambda: handles[0].layer_enqueued(0))
    device.lose(RuntimeError("fell off the bus"))
    for handle in handles:
        with pytest.raises(LoadFailedError) as failure:
            handle.result(WAIT)
        assert isinstance(failure.value.cause, DeviceLostError)
    scheduler.close(WAIT)
    assert [entry["event"] for entry in logs].count("device_lost") == 1


def test_a_burst_whose_last_events_are_missing_ends_when_its_copies_have_been_made(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend, plane="native")
    backend.gate.clear()
    device.hold("h2d")
    handle = hand_out(scheduler, 1)
    assert backend.preparing.wait(WAIT)
    events = handle._burst.events

    def refuse(*args: Any) -> None:
        raise RuntimeError("no such event")

    last = backend.num_layers - 1
    events.layers[last].record = events.ack_finish.record = refuse
    backend.gate.set()
    eventually(lambda: handle.stale)
    device.step("h2d", last)
    eventually(lambda: handle.layer_landed(last - 1))
    assert not handle.done()
    device.resume("h2d")
    with pytest.raises(LoadFailedError, match="no such event"):
        handle.result(WAIT)
    assert len(backend.copied()) == backend.num_layers
    del events.layers[last].record, events.ack_finish.record


def test_a_hand_out_gets_a_slot_however_long_the_engine_takes_to_finish(
    device: EmulatedDevice, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LaunchingBackend(device)
    go_on = threading.Event()
    monkeypatch.setattr(backend, "finish", lambda prepared: go_on.wait(WAIT))
    scheduler = make_scheduler(backend, plane="native", num_slots=1)
    device.hold("h2d")
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    waiting = in_thread(lambda: scheduler.start_loading_sync(WAIT))
    eventually(lambda: bool(scheduler._protocol._waiters))
    device.resume("h2d")
    assert waiting.result(WAIT).node_ids == (2,)
    go_on.set()


def test_a_closed_scheduler_loads_inline_without_it(make_scheduler: MakeScheduler) -> None:
    pair = make_pair()
    wanted = expected_bytes(pair, OPS)
    scheduler = make_scheduler(PooledBackend([pair]))
    scheduler.close(WAIT)
    handle = load(scheduler)
    assert isinstance(handle._burst.progress, Progress)
    assert handle.result(WAIT).status is AckStatus.OK
    assert raw_bytes(pair.device) == wanted


@pytest.mark.parametrize(("held", "stage"), [("compute", "preparing"), ("d2h", "preparing"), ("h2d", "device")])
def test_a_burst_that_is_stuck_is_logged_with_where_and_its_recovery_once(
    device: EmulatedDevice, make_scheduler: MakeScheduler, held: Any, stage: str, logs: list[Any]
) -> None:
    scheduler = make_scheduler(PooledBackend([make_pair()]), stall_log_interval=0.01)

    def entries(event: str) -> list[Any]:
        return [entry for entry in logs if entry["event"] == event]

    device.hold(held)
    with device.stream(device.Stream()):
        device.launch(lambda: None)
        handle = load(scheduler)
    waiting = in_thread(lambda: handle.wait_layer(0, WAIT))
    eventually(lambda: any(entry["waiter"] is not None for entry in entries("layer_stalled")))
    eventually(lambda: len(entries("layer_stalled")) >= 3)
    device.resume(held)
    waiting.result(WAIT)
    handle.result(WAIT)
    scheduler.close(WAIT)
    assert {(entry["stage"], entry["layer"]) for entry in entries("layer_stalled")} == {(stage, 0)}
    assert [(entry["burst_id"], entry["layer"]) for entry in entries("layer_recovered")] == [(1, 0)]


def test_a_close_runs_out_of_time_while_a_call_is_stuck_and_succeeds_later(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(PooledBackend([make_pair()]))
    device.hold("d2h")
    handle = load(scheduler)
    with pytest.raises(TimeoutError):
        scheduler.close(timeout=0.05)
    device.resume("d2h")
    scheduler.close(WAIT)
    assert handle.result(WAIT).status is AckStatus.OK


# -- nothing is left --------------------------------------------------------------------------------------------------


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def silence() -> Iterator[None]:
    """No log entry is kept anywhere."""

    def drop(*args: Any) -> Any:
        raise structlog.DropEvent

    processors = structlog.get_config()["processors"]
    before = processors.copy()
    processors[:] = [drop]  # in place: loggers that are bound already follow
    yield
    processors[:] = before


@pytest.mark.usefixtures("silence")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_many_bursts_leave_no_memory_no_file_and_no_thread_behind() -> None:
    bursts = int(os.environ.get("HICACHE_SCHED_TEST_BURSTS", "4000"))
    with EmulatedDevice() as device, TransferScheduler(PooledBackend([make_pair()]), runtime=device) as scheduler:

        def run(count: int) -> None:
            for number in range(count):
                handle = load(scheduler)
                if number % 7 == 0:
                    handle.wait_layer(1, WAIT)
                if number % 11 == 0:
                    handle.cancel()
                if number % 13 == 0:
                    device.fail_next("h2d", RuntimeError("refused"))
                scheduler.pop_acks()

        run(1000)
        gc.collect()
        before = resident_kib(), num_open_files(), threading.active_count()
        run(bursts)
        gc.collect()
        after = resident_kib(), num_open_files(), threading.active_count()
    assert after[1] <= before[1], "what an earlier test left may have gone meanwhile"
    assert after[2] <= before[2]
    assert after[0] - before[0] < 2048


async def test_schedulers_that_come_and_go_leave_no_file_and_no_thread_behind() -> None:
    async def come_and_go(count: int) -> tuple[int, int]:
        for _ in range(count):
            with EmulatedDevice() as device:
                async with TransferScheduler(PooledBackend([make_pair()]), runtime=device) as scheduler:
                    handle = load(scheduler)
                    await asyncio.wait_for(handle.layer(0), WAIT)
                    await handle
        del scheduler, handle, device
        gc.collect()
        return num_open_files(), threading.active_count()

    before = await come_and_go(3)
    after = await come_and_go(20)
    # Less than one each; what an earlier test has left may go meanwhile, and others may open files of their own.
    assert after[0] - before[0] < 20
    assert after[1] - before[1] < 20


class Engine(PooledBackend):
    """A backend that refers to its scheduler."""

    def bind(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        super().bind(scheduler)

    def plan(self, ops: Sequence[LoadOp]) -> CopyPlan:
        return super().prepare(ops).plan


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("backend", [PooledBackend, Engine])
def test_a_closed_scheduler_that_nobody_refers_to_is_collected_with_its_pools_and_device(
    backend: type[PooledBackend], is_lost: bool
) -> None:
    def close_one() -> list[weakref.ref[Any]]:
        device, pair = EmulatedDevice(), make_pair()
        scheduler = TransferScheduler(backend([pair]), runtime=device)
        scheduler.start()
        assert scheduler.stats().plane == "native"
        device.hold("h2d")
        handle = load(scheduler)
        if is_lost:
            device.lose(RuntimeError("fell off the bus"))
            with pytest.raises(LoadFailedError):
                handle.result(WAIT)
        device.resume("h2d")
        scheduler.close(WAIT)
        device.close()
        return [weakref.ref(thing) for thing in (device, pair.device.planes[0], scheduler)]

    refs = close_one()
    with EmulatedDevice():  # what native code has let go of is released by the next that calls it
        gc.collect()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_what_python_submits_and_what_it_does_not_go_in_the_order_of_their_hand_out(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    pair = make_pair(page_size=1)
    scheduler = make_scheduler(PooledBackend([pair]))
    device.hold("h2d")
    handles = [
        load(scheduler, [op])
        for op in (page_op(1, [5], [1], 1), not_plain(page_op(2, [6], [1], 1)), page_op(3, [7], [1], 1))
    ]
    device.resume("h2d")
    for handle in handles:
        handle.result(WAIT)
    wanted = expected_bytes(pair, [page_op(3, [7], [1], 1)])
    assert raw_bytes(pair.device) == wanted
    assert [ack.node_ids for ack in scheduler.pop_acks()] == [(1,), (2,), (3,)]


def test_a_launching_backend_can_have_its_landings_observed_natively(
    device: EmulatedDevice, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(LaunchingBackend(device), plane="native")
    assert hand_out(scheduler, 1).result(WAIT).status is AckStatus.OK
    assert scheduler.stats().plane == "native"


def test_token_indices_of_the_last_page_are_in_range(make_scheduler: MakeScheduler) -> None:
    pair = make_pair()
    op = LoadOp(1, tokens_of([7], 4), tokens_of([7], 4))
    wanted = expected_bytes(pair, [op])
    load(make_scheduler(PooledBackend([pair])), [op]).result(WAIT)
    assert raw_bytes(pair.device) == wanted

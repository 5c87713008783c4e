"""The scheduler's order, proven on bytes: on the emulated device everywhere, on `torch.cuda` where there is one.

What must come first is slow or held by a gate, so that a byte read or written too early is a wrong one. Behind a gate
bursts move runs of pages, which take no buffers: allocating one could wait for the whole device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from hicache_sched import (
    AckStatus,
    HiCacheSchedError,
    LoadFailedError,
    LoadHandle,
    LoadOp,
    SchedulerConfig,
    TransferScheduler,
    TransferTimeoutError,
)
from hicache_sched.config import Mode
from hicache_sched.copy import PooledBackend
from hicache_sched.copy.pooled import PreparedBurst
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.pools import PoolPair
from tests.copy.builders import expected_bytes, make_pair, page_op, raw_bytes
from tests.device.machines import WAIT, Gate, Machine

NUM_LAYERS = 3
RUN = ([2, 3], [4, 5])
SCATTERED = ([5, 2], [6, 1])
"""Host pages, device pages."""


only_cuda = pytest.mark.parametrize("machine", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


class SteppedBackend(PooledBackend):
    """A pooled backend that says how far it is, and can be held up.

    Attributes:
        begin: cleared, it keeps the data plane from preparing.
        prepared: given to by each burst that is prepared.
        gated_layers: layers before which the h2d stream is held up.
        failing_layer: layer that raises, once, when its copies have been submitted.
    """

    def __init__(self, machine: Machine, pair: PoolPair) -> None:
        super().__init__([pair])
        self.begin = threading.Event()
        self.begin.set()
        self.prepared = threading.Semaphore(0)
        self.gated_layers: set[int] = set()
        self.failing_layer: int | None = None
        self._machine = machine

    def prepare(self, ops: Sequence[LoadOp]) -> PreparedBurst:
        assert self.begin.wait(WAIT)
        prepared = super().prepare(ops)
        self.prepared.release()
        return prepared

    def enqueue_layer(self, prepared: PreparedBurst, layer: int) -> None:
        if layer in self.gated_layers:
            self._machine.gate("h2d")
        super().enqueue_layer(prepared, layer)
        if layer == self.failing_layer:
            self.failing_layer = None
            raise RuntimeError("no such layer")


class Engine:
    """An engine's side of a transfer: pools, a compute stream and a scheduler."""

    def __init__(self, machine: Machine, mode: Mode, num_layers: int) -> None:
        self.machine = machine
        self.runtime = machine.runtime
        # Both sides in the same layout, so that a run of pages is copied as it is.
        self.pair = make_pair(num_layers=num_layers, device=machine.where, host_layout="layer_first")
        self.backend = SteppedBackend(machine, self.pair)
        self.compute = self.runtime.Stream()
        self.scheduler = TransferScheduler(self.backend, runtime=self.runtime, config=SchedulerConfig(mode=mode))
        self.scheduler.start()
        self._warm_up()

    def _warm_up(self) -> None:
        """Have every kernel loaded and every buffer allocated once; the pools are then as they were."""
        before = [plane.clone() for plane in self.pair.device.planes]
        for pages in (RUN, SCATTERED):
            self.load(*pages, on_device=True)
            self.hand_out().result(WAIT)
            assert self.backend.prepared.acquire(timeout=WAIT)
        self.overwrite(0)
        self.snapshot(0)
        self.runtime.synchronize()
        for plane, values in zip(self.pair.device.planes, before, strict=True):
            plane.copy_(values)
        self.runtime.synchronize()
        self.scheduler.reset(WAIT)

    def load(self, host_pages: list[int], device_pages: list[int], *, on_device: bool = False) -> LoadOp:
        op = page_op(1, host_pages, device_pages)
        if on_device:
            op = LoadOp(op.node_id, op.host_indices, op.device_indices.to(self.machine.where))
        self.scheduler.load(op)
        return op

    def hand_out(self, **kwargs: Any) -> LoadHandle:
        """Hand out with the compute stream as the current one."""
        with self.runtime.stream(self.compute):
            handle = self.scheduler.start_loading_sync(timeout=WAIT, **kwargs)
        assert handle is not None
        return handle

    def write_late(self, indices: torch.Tensor) -> torch.Tensor:
        """Memory that holds garbage until a kernel on the current stream has written `indices` to it, slowly."""
        written, late = self.unwritten(indices)
        self.machine.slow()
        self.machine.kernel(lambda: late.copy_(written))
        return late

    def unwritten(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`indices` in device memory, and memory of their size that holds garbage."""
        written, late = indices.to(self.machine.where), torch.full_like(indices, -7).to(self.machine.where)
        self.runtime.synchronize()
        return written, late

    def gate_h2d(self) -> Gate:
        """Hold up the h2d stream from here on."""
        with self.runtime.stream(self.scheduler.h2d_stream):
            return self.machine.gate("h2d")

    def snapshot(self, layer: int) -> list[torch.Tensor]:
        """Copies of a layer's device planes, made by a kernel on the current stream."""
        planes = [plane[layer] for plane in self.pair.device.planes]
        with self.runtime.stream(self.runtime.default_stream()):  # there is memory for this one
            copies = [torch.empty_like(plane) for plane in planes]

        def copy() -> None:
            for to, plane in zip(copies, planes, strict=True):
                to.copy_(plane)

        self.machine.kernel(copy)
        return copies

    def overwrite(self, value: int) -> None:
        """A kernel on the current stream that writes all of the device pool."""
        self.machine.kernel(lambda: [plane.fill_(value) for plane in self.pair.device.planes])

    def close(self) -> None:
        self.backend.begin.set()
        self.scheduler.close(WAIT)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(machine: Machine) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(mode: Mode = "async", num_layers: int = NUM_LAYERS) -> Engine:
        made.append(Engine(machine, mode, num_layers))
        return made[-1]

    yield make
    machine.open_gates()
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


def layer_bytes(pair: PoolPair, op: LoadOp, layer: int) -> list[bytes]:
    """What one layer of the device pool's planes holds once `op` has landed."""
    planes = []
    for host, device in zip(pair.host.planes, pair.device.planes, strict=True):
        plane = device[layer].cpu().clone()
        plane[op.device_indices.cpu()] = host[layer][op.host_indices]
        planes.append(plane.view(torch.uint8).numpy().tobytes())
    return planes


def bytes_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [tensor.cpu().view(torch.uint8).numpy().tobytes() for tensor in tensors]


# -- a burst --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("pages", [RUN, SCATTERED], ids=["run", "scattered"])
def test_every_byte_named_arrives_and_no_other_changes(
    make_engine: MakeEngine, mode: str, pages: tuple[list[int], list[int]]
) -> None:
    engine = make_engine(mode)
    op = engine.load(*pages, on_device=True)
    wanted = expected_bytes(engine.pair, [op])
    ack = engine.hand_out().result(WAIT)
    assert ack.status is AckStatus.OK
    assert raw_bytes(engine.pair.device) == wanted


def test_a_burst_has_a_duration_of_device_time(engine: Engine) -> None:
    engine.load(*RUN)
    ack = engine.hand_out().result(WAIT)
    assert ack.duration_ms is not None
    assert ack.duration_ms >= 0


def test_many_bursts_land_in_order_with_the_right_bytes(engine: Engine) -> None:
    pages = [([turn % 6, (turn + 3) % 6], [(turn + 3) % 6, turn % 6]) for turn in range(10)]
    wanted = expected_bytes(engine.pair, [page_op(1, *each) for each in pages])
    handles = []
    for turn, each in enumerate(pages):
        engine.load(*each, on_device=bool(turn % 2))
        handles.append(engine.hand_out())
    for handle in handles:
        handle.result(WAIT)
    assert raw_bytes(engine.pair.device) == wanted
    assert [ack.burst_id for ack in engine.scheduler.pop_acks()] == [handle.burst_id for handle in handles]


# -- indices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("pages", [RUN, SCATTERED], ids=["run", "scattered"])
def test_device_indices_are_read_behind_the_kernel_that_writes_them(
    make_engine: MakeEngine, mode: str, pages: tuple[list[int], list[int]]
) -> None:
    engine = make_engine(mode)
    op = page_op(1, *pages)
    wanted = expected_bytes(engine.pair, [op])
    with engine.runtime.stream(engine.compute):
        late = engine.write_late(op.device_indices)
    engine.scheduler.load(LoadOp(1, op.host_indices, late))
    engine.hand_out().result(WAIT)
    assert raw_bytes(engine.pair.device) == wanted


def test_the_hand_out_does_not_wait_for_the_device_indices(engine: Engine) -> None:
    op = page_op(1, *RUN)
    wanted = expected_bytes(engine.pair, [op])
    with engine.runtime.stream(engine.compute):
        written, late = engine.unwritten(op.device_indices)
        gate = engine.machine.gate()
        engine.machine.kernel(lambda: late.copy_(written))
    engine.scheduler.load(LoadOp(1, op.host_indices, late))
    handle = engine.hand_out()
    assert not engine.backend.prepared.acquire(timeout=0.05), "they are not written yet"
    gate.set()
    handle.result(WAIT)
    assert raw_bytes(engine.pair.device) == wanted


def test_device_indices_are_read_while_an_earlier_bursts_copies_are_held(engine: Engine) -> None:
    gate = engine.gate_h2d()
    engine.load(*RUN, on_device=True)
    first = engine.hand_out()
    engine.load([0, 1], [2, 3], on_device=True)
    second = engine.hand_out()
    for _ in (first, second):
        assert engine.backend.prepared.acquire(timeout=WAIT)
    assert not first.layer_landed(0)
    gate.set()
    second.result(WAIT)


@only_cuda  # the memory of an emulated device is host memory
def test_indices_on_the_host_are_not_waited_for(engine: Engine) -> None:
    with engine.runtime.stream(engine.compute):
        gate = engine.machine.gate()
    engine.load(*RUN)
    handle = engine.hand_out()
    assert engine.backend.prepared.acquire(timeout=WAIT)
    assert not engine.compute.query()
    assert not handle.layer_landed(0)
    gate.set()
    handle.result(WAIT)


# -- fence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["attribute", "argument"])
@pytest.mark.parametrize("mode", ["async", "inline"])
def test_work_that_the_fence_stream_has_got_before_the_hand_out_delays_the_burst(
    make_engine: MakeEngine, mode: str, how: str
) -> None:
    engine = make_engine(mode)
    fence = engine.runtime.Stream()
    with engine.runtime.stream(fence):
        gate = engine.machine.gate()
        engine.overwrite(0)
    op = engine.load(*RUN)
    if how == "attribute":
        engine.scheduler.fence_stream = fence
        handle = engine.hand_out()
    else:
        handle = engine.hand_out(fence=fence)
    with engine.runtime.stream(engine.compute):
        handle.wait_layer(NUM_LAYERS - 1, timeout=WAIT)  # everything is submitted from here on
    assert not handle.layer_landed(0)
    gate.set()
    handle.result(WAIT)
    loaded = torch.cat([plane[:, op.device_indices].flatten().cpu() for plane in engine.pair.device.planes])
    source = torch.cat([plane[:, op.host_indices].flatten() for plane in engine.pair.host.planes])
    assert torch.equal(loaded.view(torch.uint8), source.view(torch.uint8)), "written after the fence stream's work"


def test_work_that_the_fence_stream_gets_after_the_hand_out_does_not_delay_the_burst(engine: Engine) -> None:
    fence = engine.runtime.Stream()
    op = engine.load(*RUN)
    wanted = expected_bytes(engine.pair, [op])
    engine.backend.begin.clear()
    handle = engine.hand_out(fence=fence)
    with engine.runtime.stream(fence):
        engine.machine.gate()
    engine.backend.begin.set()
    handle.result(WAIT)
    assert not fence.query()
    assert raw_bytes(engine.pair.device) == wanted


def test_work_that_the_current_stream_gets_after_the_hand_out_does_not_delay_the_burst(engine: Engine) -> None:
    op = engine.load(*RUN, on_device=True)
    wanted = expected_bytes(engine.pair, [op])
    engine.backend.begin.clear()
    handle = engine.hand_out()
    with engine.runtime.stream(engine.compute):
        engine.machine.gate()
    engine.backend.begin.set()
    handle.result(WAIT)
    assert not engine.compute.query()
    assert raw_bytes(engine.pair.device) == wanted


# -- waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0, 2, 2]])
def test_a_kernel_behind_wait_layer_reads_what_the_layer_brought(
    make_engine: MakeEngine, mode: str, order: list[int]
) -> None:
    engine = make_engine(mode)
    gate = engine.gate_h2d()
    op = engine.load(*RUN)
    wanted = {layer: layer_bytes(engine.pair, op, layer) for layer in range(NUM_LAYERS)}
    handle = engine.hand_out()
    seen = []
    with engine.runtime.stream(engine.compute):
        for layer in order:
            handle.wait_layer(layer, timeout=WAIT)
            seen.append(engine.snapshot(layer))
    assert not handle.layer_landed(0)
    gate.set()
    engine.compute.synchronize()
    assert [bytes_of(planes) for planes in seen] == [wanted[layer] for layer in order]


def test_wait_layer_waits_until_the_layer_is_enqueued(engine: Engine) -> None:
    engine.load(*RUN)
    engine.backend.begin.clear()
    handle = engine.hand_out()
    with engine.runtime.stream(engine.compute):
        with pytest.raises(TransferTimeoutError):
            handle.wait_layer(0, timeout=0.01)
        engine.backend.begin.set()
        handle.wait_layer(0, timeout=WAIT)
    assert handle.layer_enqueued(0)


def test_a_kernel_behind_a_layer_does_not_wait_for_the_next_layer(engine: Engine) -> None:
    engine.backend.gated_layers = {1}
    op = engine.load(*RUN)
    wanted = layer_bytes(engine.pair, op, 0)
    handle = engine.hand_out()
    with engine.runtime.stream(engine.compute):
        handle.wait_layer(0, timeout=WAIT)
        seen = engine.snapshot(0)
    engine.compute.synchronize()
    assert bytes_of(seen) == wanted
    assert not handle.layer_landed(1)


def test_streams_of_several_threads_are_ordered_behind_their_layers(engine: Engine) -> None:
    gate = engine.gate_h2d()
    op = engine.load(*RUN)
    wanted = [layer_bytes(engine.pair, op, layer) for layer in range(NUM_LAYERS)]
    handle = engine.hand_out()
    seen: dict[int, list[torch.Tensor]] = {}

    def run(layer: int) -> None:
        with engine.runtime.stream(engine.runtime.Stream()):
            handle.wait_layer(layer, timeout=WAIT)
            seen[layer] = engine.snapshot(layer)

    threads = [threading.Thread(target=run, args=(layer,)) for layer in range(NUM_LAYERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not handle.layer_landed(0)
    gate.set()
    engine.runtime.synchronize()
    assert [bytes_of(seen[layer]) for layer in range(NUM_LAYERS)] == wanted


# -- failures and slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_layer", [0, 1])
def test_a_burst_that_fails_ends_when_all_that_was_submitted_has_landed(engine: Engine, held_layer: int) -> None:
    engine.backend.gated_layers = {held_layer}
    engine.backend.failing_layer = 1
    op = engine.load(*RUN)
    wanted = expected_bytes(engine.pair, [op], layers=[0, 1])
    handle = engine.hand_out()
    with engine.runtime.stream(engine.compute):
        handle.wait_layer(2, timeout=WAIT)
    with pytest.raises(TransferTimeoutError):
        handle.result(timeout=0.05)
    assert engine.scheduler.pop_acks() == []
    engine.machine.open_gates()
    with pytest.raises(LoadFailedError, match="no such layer"):
        handle.result(WAIT)
    assert handle.stale
    assert raw_bytes(engine.pair.device) == wanted


def test_the_burst_after_a_failed_one_is_served(engine: Engine) -> None:
    engine.backend.failing_layer = 1
    engine.load(*RUN)
    failed = engine.hand_out()
    op = engine.load(*RUN)
    wanted = expected_bytes(engine.pair, [op])
    assert engine.hand_out().result(WAIT).status is AckStatus.OK
    assert failed.stale
    assert raw_bytes(engine.pair.device) == wanted


def test_indices_that_a_kernel_wrote_wrong_fail_the_burst_before_a_byte_is_copied(engine: Engine) -> None:
    before = raw_bytes(engine.pair.device)
    op = page_op(1, *RUN)
    with engine.runtime.stream(engine.compute):
        late = engine.write_late(op.device_indices + 1000)
    engine.scheduler.load(LoadOp(1, op.host_indices, late))
    with pytest.raises(LoadFailedError, match="out of range"):
        engine.hand_out().result(WAIT)
    assert raw_bytes(engine.pair.device) == before


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_slot_is_handed_out_again_only_when_its_copies_have_landed(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(mode)
    gate = engine.gate_h2d()
    handles, ops = [], []
    for turn in range(3):
        ops.append(engine.load([turn, turn + 1], [turn + 2, turn + 3]))
        handles.append(engine.hand_out())
    ops.append(engine.load([6, 7], [0, 1]))
    wanted = expected_bytes(engine.pair, ops)
    with pytest.raises(TransferTimeoutError):
        engine.scheduler.start_loading_sync(timeout=0.01)
    gate.set()
    fourth = engine.hand_out()
    assert (fourth.slot, fourth.generation) == (handles[0].slot, handles[0].generation + 1)
    fourth.result(WAIT)
    assert raw_bytes(engine.pair.device) == wanted


# -- capture --------------------------------------------------------------------------------------------------


def test_a_hand_out_on_a_capturing_thread_raises_and_leaves_its_ops_queued(engine: Engine) -> None:
    op = engine.load(*RUN)
    wanted = expected_bytes(engine.pair, [op])
    with engine.runtime.stream(engine.compute):
        with engine.machine.capturing():
            with pytest.raises(HiCacheSchedError, match="captured"):
                engine.scheduler.start_loading_sync(timeout=WAIT)
    assert engine.scheduler.stats().queued_ops == 1
    engine.hand_out().result(WAIT)
    assert raw_bytes(engine.pair.device) == wanted


def test_wait_layer_on_a_capturing_thread_raises(engine: Engine) -> None:
    gate = engine.gate_h2d()
    engine.load(*RUN)
    handle = engine.hand_out()
    with engine.runtime.stream(engine.compute):
        with engine.machine.capturing():
            with pytest.raises(HiCacheSchedError, match="captured"):
                handle.wait_layer(0, timeout=WAIT)
    gate.set()
    handle.result(WAIT)


@only_cuda  # capture itself is not emulated
@pytest.mark.parametrize("pages", [RUN, SCATTERED], ids=["run", "scattered"])
def test_a_burst_does_not_break_the_capture_of_another_thread(
    engine: Engine, pages: tuple[list[int], list[int]]
) -> None:
    cell = engine.machine.cells(1)
    engine.backend.begin.clear()
    op = engine.load(*pages, on_device=True)
    wanted = expected_bytes(engine.pair, [op])
    handle = engine.hand_out()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        cell.add_(1)
        engine.backend.begin.set()
        handle.result(WAIT)  # all of the burst happens during the capture; this waits without a device call
        cell.mul_(10)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert engine.machine.read(cell) == [20]
    assert raw_bytes(engine.pair.device) == wanted


def test_a_thread_can_be_bound_before_it_has_made_any_device_call(machine: Machine) -> None:
    binding = DeviceBinding(machine.runtime)
    seen: list[Any] = []

    def bind() -> None:
        try:
            binding.bind_thread()
            event = binding.new_event()
            event.record(binding.new_stream())
            event.synchronize()
            seen.append(machine.runtime.current_device())
        except BaseException as exc:
            seen.append(exc)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join(WAIT)
    assert seen == [binding.index]

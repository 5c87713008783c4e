"""A scheduler whose native data plane calls the driver stand-in: which bursts it plans, and what errors say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    LoadOp,
    SchedulerConfig,
    TransferScheduler,
    native,
)
from hicache_sched.copy.pooled import PooledBackend
from hicache_sched.device.batched_copy import BatchError, batched_copy_for
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.cuda_driver import CudaDriverError
from hicache_sched.pools import PoolPair
from tests.copy.builders import expected_bytes, make_pair, page_op, raw_bytes
from tests.driver.stand_in import StandIn, cuda_like
from tests.driver.torch_cuda import CudaEvent, TorchCuda

pytestmark = pytest.mark.skipif(native.module is None, reason="needs the native part")

WAIT = 30.0
NUM_LAYERS = 3

MakeScheduler = Callable[..., TransferScheduler]


@pytest.fixture
def pair(driver: StandIn) -> PoolPair:
    made = make_pair(num_layers=NUM_LAYERS)
    driver.knows(host=made.host.planes, device=made.device.planes)
    return made


@pytest.fixture
def make_scheduler(driver: StandIn, pair: PoolPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeScheduler]:
    """Makes started schedulers that take CPU memory for that of a CUDA device."""
    monkeypatch.setattr("hicache_sched.copy.pooled.batched_copy_for", partial(batched_copy_for, driver=driver))
    monkeypatch.setattr("hicache_sched.copy.pooled._check_place", lambda pair, device: None)
    monkeypatch.setattr("hicache_sched.device.binding.leave_global_capture_mode", lambda index: None)
    made: list[TransferScheduler] = []

    def make(backend: Any = None, *, h2d_stream: Any = None, **config: Any) -> TransferScheduler:
        scheduler = TransferScheduler(
            backend or PooledBackend([pair]),
            runtime=TorchCuda(driver),
            config=SchedulerConfig(**config),
            h2d_stream=h2d_stream,
        )
        scheduler.device.is_cuda = True
        scheduler.start()
        made.append(scheduler)
        driver.forget_calls()
        return scheduler

    yield make
    driver.fail_calls(count=0)
    for scheduler in made:
        scheduler.close(WAIT)


def load(scheduler: TransferScheduler, *ops: LoadOp) -> Any:
    for op in ops:
        scheduler.load(op)
    handle = scheduler.start_loading_sync(timeout=WAIT)
    assert handle is not None
    return handle


def an_op(driver: StandIn) -> LoadOp:
    op = page_op(1, [5, 2, 3], [6, 1, 2])
    driver.knows(device=[op.device_indices])
    return op


# -- bursts -------------------------------------------------------------------------------------------------------


def test_bursts_are_loaded_by_the_native_plane(driver: StandIn, pair: PoolPair, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(plane="native")
    assert scheduler.stats().plane == "native"
    for turn in range(7):
        op = page_op(turn, [turn, 2, 3], [(turn + step) % 8 for step in (6, 1, 3)])
        driver.knows(device=[op.device_indices])
        wanted = expected_bytes(pair, [op])
        ack = load(scheduler, op).result(WAIT)
        assert (ack.status, ack.num_bytes) == (AckStatus.OK, 12 * 2 * NUM_LAYERS * 8)
        assert raw_bytes(pair.device) == wanted
    assert len(driver.calls("cuMemcpyBatchAsync")) == 7 * NUM_LAYERS
    assert len(driver.calls("cuMemHostAlloc")) == 1


def test_events_are_made_when_the_scheduler_starts_and_used_again(
    driver: StandIn, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(num_slots=2)
    for _ in range(5):
        load(scheduler, an_op(driver)).result(WAIT)

    # The starts of two slots, and the event behind a read.
    assert len(driver.calls("cuEventCreate")) == 3


def test_a_stream_behind_a_layer_waits_for_it(driver: StandIn, pair: PoolPair, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    driver.hold(scheduler.h2d_stream.cuda_stream)
    handle = load(scheduler, an_op(driver))
    engine = scheduler.runtime.Stream()

    with scheduler.runtime.stream(engine):
        handle.wait_layer(1, timeout=WAIT)
    assert not engine.query()
    assert not handle.layer_landed(0)
    driver.release(scheduler.h2d_stream.cuda_stream)

    handle.result(WAIT)
    assert engine.query()


def test_a_burst_with_indices_that_are_not_plainly_in_memory_is_submitted_by_python(
    driver: StandIn, pair: PoolPair, make_scheduler: MakeScheduler
) -> None:
    class OwnTensor(torch.Tensor):
        pass

    op = page_op(1, [5, 2], [6, 1])
    own = LoadOp(1, op.host_indices, op.device_indices.as_subclass(OwnTensor))
    wanted = expected_bytes(pair, [op])
    scheduler = make_scheduler()

    assert load(scheduler, own).result(WAIT).status is AckStatus.OK

    assert raw_bytes(pair.device) == wanted
    assert driver.calls("cuMemcpyDtoHAsync_v2") == []
    assert len(driver.calls("cuMemcpyBatchAsync")) == NUM_LAYERS


# -- failures -----------------------------------------------------------------------------------------------------


def failure(handle: Any) -> BaseException:
    with pytest.raises(LoadFailedError) as failed:
        handle.result(WAIT)
    cause = failed.value.__cause__
    assert cause is not None
    return cause


def test_a_copy_that_is_refused_is_named_and_the_next_burst_is_served(
    driver: StandIn, pair: PoolPair, make_scheduler: MakeScheduler
) -> None:
    scheduler, op = make_scheduler(), an_op(driver)
    driver.fail(1, 2)

    handle = load(scheduler, op)
    error = failure(handle)

    assert isinstance(error, BatchError)
    assert str(error) == (
        "pool 'kv', plane 0, layer 0, row 1 of the device pool from row 2 of the host pool: "
        "cuMemcpyBatchAsync failed with CUDA_ERROR_OUT_OF_MEMORY"
    )
    assert handle.stale
    driver.fail(-1, 0)
    wanted = expected_bytes(pair, [op])
    assert load(scheduler, op).result(WAIT).status is AckStatus.OK
    assert raw_bytes(pair.device) == wanted


def test_a_read_that_fails_fails_the_burst_and_the_next_is_served(
    driver: StandIn, pair: PoolPair, make_scheduler: MakeScheduler
) -> None:
    scheduler, op = make_scheduler(), an_op(driver)
    before, wanted = raw_bytes(pair.device), expected_bytes(pair, [op])
    driver.fail_calls("cuMemHostAlloc")

    error = failure(load(scheduler, op))

    assert isinstance(error, CudaDriverError)
    assert str(error) == "cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY"
    assert raw_bytes(pair.device) == before
    assert load(scheduler, op).result(WAIT).status is AckStatus.OK
    assert raw_bytes(pair.device) == wanted


def test_a_device_that_fails_every_call_is_lost(driver: StandIn, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    driver.hold(scheduler.h2d_stream.cuda_stream)
    handle = load(scheduler, an_op(driver))
    with scheduler.runtime.stream(scheduler.runtime.Stream()):
        handle.wait_layer(NUM_LAYERS - 1, timeout=WAIT)
    driver.fail_calls(count=-1, status=700)
    driver.release(scheduler.h2d_stream.cuda_stream)

    error = failure(handle)

    assert isinstance(error, DeviceLostError)
    assert isinstance(error.__cause__, CudaDriverError)


# -- when there is none -------------------------------------------------------------------------------------------


def reason(make_scheduler: MakeScheduler, **kwargs: Any) -> str:
    with structlog.testing.capture_logs() as logs:
        scheduler = make_scheduler(**kwargs)
    assert scheduler.stats().plane == "python"
    (started,) = [entry for entry in logs if entry["event"] == "scheduler_started"]
    words: str = started["plane_reason"]
    return words


def test_memory_that_is_not_page_locked_has_no_native_plane(make_scheduler: MakeScheduler) -> None:
    pageable = PooledBackend([make_pair(num_layers=2)])

    assert reason(make_scheduler, backend=pageable) == "copies are not made in batches: a host pool is not page-locked"


def test_an_engines_default_stream_has_no_native_plane(driver: StandIn, make_scheduler: MakeScheduler) -> None:
    default = TorchCuda(driver).Stream()
    default.cuda_stream = 0
    driver.lib.stand_in_stream(None)

    assert reason(make_scheduler, h2d_stream=default) == (
        "copies are not made in batches: the h2d stream is the default stream, which takes no batches: pass one of "
        "your own"
    )


def test_a_backend_of_another_class_has_no_native_plane(pair: PoolPair, make_scheduler: MakeScheduler) -> None:
    class OwnBackend(PooledBackend):
        pass

    assert reason(make_scheduler, backend=OwnBackend([pair])) == "OwnBackend makes its copies in Python"
    with pytest.raises(HiCacheSchedError, match='plane="native" cannot be had: OwnBackend makes its copies in Python'):
        make_scheduler(OwnBackend([pair]), plane="native")


# -- handles ------------------------------------------------------------------------------------------------------


def test_an_event_is_recorded_once_for_its_handle_and_never_again(driver: StandIn) -> None:
    runtime = TorchCuda(driver)
    binding, event, stream = cuda_like(), CudaEvent(runtime), runtime.Stream()

    handle = binding.handle_of(event, stream)

    assert handle == event.cuda_event != 0
    assert binding.handle_of(event, stream) == handle
    assert [call.args for call in driver.calls("cuEventRecord")] == [(handle, stream.cuda_stream)]


def test_what_is_plainly_in_cpu_memory_has_an_address_and_what_may_be_anything_has_none() -> None:
    binding, values = cuda_like(), torch.tensor([1, 2])

    assert binding.find(values) is not None
    assert binding.find(values[1:]) is not None
    assert binding.find(torch.nn.Parameter(values, requires_grad=False)) is None
    assert binding.find(values.to("meta")) is None


def test_a_runtime_without_a_native_plane_gives_no_handles(driver: StandIn) -> None:
    runtime = TorchCuda(driver)
    with pytest.raises(NotImplementedError):
        DeviceBinding(runtime).handle_of(CudaEvent(runtime), runtime.Stream())

"""Bad input is refused where it is given, says what to change, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from hicache_sched import (
    AckStatus,
    HiCacheSchedError,
    InvalidLoadError,
    LoadFailedError,
    LoadOp,
    PoolTransfer,
    TransferScheduler,
    TransferTimeoutError,
)
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import PoolPair
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op
from tests.copy.builders import expected_bytes, make_pair, page_op, raw_bytes, token_op

TIMEOUT = 30.0
FOUR = torch.arange(4)


def anything(value: object) -> Any:
    """What the types forbid and an engine does all the same."""
    return value


def transfer(name: Any = "indexer", host: Any = FOUR, device: Any = FOUR) -> PoolTransfer:
    return PoolTransfer(name, host, device)


# -- load() -------------------------------------------------------------------------------------------------------

BAD_LOADS: dict[str, tuple[Any, str]] = {
    "no load op": ((9, FOUR, FOUR), "load() takes a LoadOp, not tuple"),
    "node id a string": (LoadOp(anything("9"), FOUR, FOUR), "node '9': node_id must be an int, not str"),
    "node id a bool": (LoadOp(True, FOUR, FOUR), "node True: node_id must be an int, not bool"),
    "node id a tensor": (LoadOp(anything(FOUR[0]), FOUR, FOUR), "node_id must be an int, not Tensor"),
    "host indices a list": (LoadOp(9, anything([0, 1]), FOUR), "node 9: host_indices must be a torch.Tensor, not list"),
    "device indices an array": (
        LoadOp(9, FOUR, anything(FOUR.numpy())),
        "node 9: device_indices must be a torch.Tensor, not ndarray",
    ),
    "device indices missing": (
        LoadOp(9, FOUR, anything(None)),
        "node 9: device_indices must be a torch.Tensor, not NoneType",
    ),
    "int32 indices": (LoadOp(9, FOUR.int(), FOUR), "node 9: host_indices must be torch.int64, not torch.int32"),
    "float indices": (
        LoadOp(9, FOUR, FOUR.double()),
        "node 9: device_indices must be torch.int64, not torch.float64",
    ),
    "two dimensions": (LoadOp(9, FOUR, FOUR[None]), "node 9: device_indices must have 1 dimension, not 2"),
    "no dimension": (LoadOp(9, FOUR[0], FOUR), "node 9: host_indices must have 1 dimension, not 0"),
    "different lengths": (
        LoadOp(9, FOUR, FOUR[:3]),
        "node 9: host_indices and device_indices must be of equal length, not 4 and 3",
    ),
    "on the meta device": (
        LoadOp(9, FOUR, FOUR.to("meta")),
        "node 9: device_indices must be a dense tensor with values, not one on the meta device",
    ),
    "sparse": (
        LoadOp(9, FOUR.to_sparse(), FOUR),
        "node 9: host_indices must be a dense tensor with values, not one of layout torch.sparse_coo",
    ),
    "empty": (LoadOp(9, FOUR[:0], FOUR[:0]), "node 9: moves no token; do not load an empty op"),
    "transfers a list": (
        LoadOp(9, FOUR, FOUR, anything([transfer()])),
        "node 9: pool_transfers must be a tuple, not list",
    ),
    "transfers a tensor": (
        LoadOp(9, FOUR[:0], FOUR[:0], anything(FOUR)),
        "node 9: pool_transfers must be a tuple, not Tensor",
    ),
    "transfer a tuple": (
        LoadOp(9, FOUR, FOUR, anything((("indexer", FOUR, FOUR),))),
        "node 9: pool_transfers holds a tuple, not a PoolTransfer",
    ),
    "unknown pool": (
        LoadOp(9, FOUR, FOUR, (transfer("mamba"),)),
        "node 9: no side pool is named 'mamba'; the backend's side pools: 'indexer'",
    ),
    "the anchor as a side pool": (LoadOp(9, FOUR, FOUR, (transfer("kv"),)), "node 9: no side pool is named 'kv'"),
    "pool name no string": (LoadOp(9, FOUR, FOUR, (transfer(3),)), "node 9: no side pool is named 3"),
    "side pool's dtype": (
        LoadOp(9, FOUR, FOUR, (transfer(host=FOUR.int()),)),
        "node 9, pool 'indexer': host_indices must be torch.int64, not torch.int32",
    ),
    "side pool's lengths": (
        LoadOp(9, FOUR, FOUR, (transfer(device=FOUR[:1]),)),
        "node 9, pool 'indexer': host_indices and device_indices must be of equal length, not 4 and 1",
    ),
    "side pool empty": (
        LoadOp(9, FOUR, FOUR, (transfer(host=FOUR[:0], device=FOUR[:0]),)),
        "node 9, pool 'indexer': moves no token; leave the transfer out",
    ),
}


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize(("op", "message"), BAD_LOADS.values(), ids=BAD_LOADS.keys())
def test_a_malformed_op_is_refused_at_load_and_the_next_hand_out_is_as_if_it_had_not_been(
    device: EmulatedDevice, make_scheduler: MakeScheduler, op: Any, message: str, mode: str
) -> None:
    scheduler = make_scheduler(LaunchingBackend(device, pool_names=("kv", "indexer")), mode=mode)
    scheduler.load(load_op(1))
    with pytest.raises(InvalidLoadError) as refused:
        scheduler.load(op)
    assert message in str(refused.value)
    assert scheduler.stats().queued_ops == 1

    handle = hand_out(scheduler, 2)
    assert (handle.node_ids, handle.num_tokens) == ((1, 2), 8)
    assert handle.result(TIMEOUT).num_tokens_by_pool == {"kv": 8, "indexer": 0}
    assert scheduler.last_error is None


def test_an_op_may_move_side_pools_only(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(LaunchingBackend(device, pool_names=("kv", "indexer")))
    scheduler.load(LoadOp(1, FOUR[:0], FOUR[:0], (transfer(),)))
    handle = scheduler.start_loading_sync(TIMEOUT)
    assert handle is not None
    assert handle.result(TIMEOUT).num_tokens_by_pool == {"kv": 0, "indexer": 4}


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_indices_need_not_be_contiguous(device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str) -> None:
    pair = make_pair()
    op = LoadOp(1, torch.arange(8, 16).repeat_interleave(2)[::2], torch.arange(8).repeat_interleave(3)[::3])
    assert (op.host_indices.is_contiguous(), op.device_indices.is_contiguous()) == (False, False)
    wanted = expected_bytes(pair, [op])
    scheduler = make_scheduler(PooledBackend([pair]), mode=mode)
    scheduler.load(op)
    handle = scheduler.start_loading_sync(TIMEOUT)
    assert handle is not None
    handle.result(TIMEOUT)
    assert raw_bytes(pair.device) == wanted


# -- planning -----------------------------------------------------------------------------------------------------

# Pools of 8 pages of 4 tokens.
BAD_PLANS: dict[str, tuple[Sequence[LoadOp], str]] = {
    "host index out of range": (
        [page_op(1, [0], [0]), token_op(2, [32, 33, 34, 35], [4, 5, 6, 7])],
        "host index 32 of node 2 is out of range; the host pool has tokens 0 to 31",
    ),
    "device index out of range": (
        [page_op(1, [0], [0]), token_op(2, [0, 1, 2, 3], [32, 33, 34, 35])],
        "device index 32 of node 2 is out of range; the device pool has tokens 0 to 31",
    ),
    "host index negative": (
        [page_op(1, [0], [0]), token_op(2, [-4, -3, -2, -1], [4, 5, 6, 7])],
        "host index -4 of node 2 is out of range",
    ),
    "device index negative": (
        [page_op(1, [0], [0]), token_op(2, [0, 1, 2, 3], [-1, 5, 6, 7])],
        "device index -1 of node 2 is out of range",
    ),
    "far out of range": (
        [token_op(2, [0, 1, 2, 3], [2**62, 1, 2, 3])],
        f"device index {2**62} of node 2 is out of range",
    ),
    "destination twice in an op": (
        [page_op(1, [0], [0]), page_op(2, [1, 2], [5, 5])],
        "device index 20 of node 2 is already a destination of node 2",
    ),
    "destination twice across ops": (
        [page_op(1, [0], [6]), page_op(2, [1], [6])],
        "device index 24 of node 2 is already a destination of node 1",
    ),
    "host run not aligned": (
        [page_op(1, [0], [0]), token_op(2, [1, 2, 3, 4], [4, 5, 6, 7])],
        "host index 1 of node 2 breaks page alignment",
    ),
    "device run not aligned": (
        [page_op(1, [0], [0]), token_op(2, [0, 1, 2, 3], [6, 7, 8, 9])],
        "device index 6 of node 2 breaks page alignment",
    ),
    "page out of order": (
        [page_op(1, [0], [0]), token_op(2, [0, 1, 2, 3], [4, 6, 5, 7])],
        "device index 6 of node 2 breaks page alignment",
    ),
    "page cut short": (
        [page_op(1, [0], [0]), token_op(2, [4, 5, 6], [4, 5, 6])],
        "node 2 loads 3 tokens, which is no multiple of the page size 4",
    ),
}


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize(("ops", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_burst_with_bad_indices_fails_before_any_copy_is_submitted_and_the_next_is_served(
    device: EmulatedDevice,
    make_scheduler: MakeScheduler,
    ops: Sequence[LoadOp],
    message: str,
    mode: str,
    logs: list[Any],
) -> None:
    pair = make_pair()
    before, next_op = raw_bytes(pair.device), page_op(3, [7, 1], [2, 5])
    scheduler = make_scheduler(PooledBackend([pair]), mode=mode)
    calls = device.record_calls()
    device.hold("h2d")  # a copy would keep the burst from ending

    handle = load_all(scheduler, ops)
    with pytest.raises(LoadFailedError) as failed:
        handle.result(TIMEOUT)
    cause = failed.value.cause
    assert isinstance(cause, InvalidLoadError)
    assert message in str(cause)
    assert "pool 'kv'" in str(cause)
    assert failed.value.node_ids == tuple(op.node_id for op in ops)
    assert ("enter", scheduler.h2d_stream) not in [call[:2] for call in calls]
    assert raw_bytes(pair.device) == before
    (ack,) = scheduler.pop_acks()
    assert (ack.status, ack.num_tokens, ack.num_bytes) == (AckStatus.FAILED, 0, 0)

    wanted = expected_bytes(pair, [next_op])
    device.resume("h2d")
    assert load_all(scheduler, [next_op]).result(TIMEOUT).status is AckStatus.OK
    assert raw_bytes(pair.device) == wanted


def load_all(scheduler: TransferScheduler, ops: Sequence[LoadOp]) -> Any:
    for op in ops:
        scheduler.load(op)
    return scheduler.start_loading_sync(TIMEOUT)


# -- layers, slots, timeouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [-1, 4, 10**20])
async def test_a_layer_that_the_burst_does_not_have_is_an_index_error(
    make_scheduler: MakeScheduler, layer: int
) -> None:
    await check_layer_is_refused(hand_out(make_scheduler(), 1), layer, IndexError, "layers 0 to 3")


@pytest.mark.parametrize("layer", [1.0, math.nan, True, "1", None, torch.tensor(1)], ids=repr)
async def test_a_layer_that_is_no_int_is_a_type_error(make_scheduler: MakeScheduler, layer: Any) -> None:
    await check_layer_is_refused(hand_out(make_scheduler(), 1), layer, TypeError, "layer must be an int")


async def check_layer_is_refused(handle: Any, layer: Any, error: type[Exception], message: str) -> None:
    for ask in (handle.wait_layer, handle.layer_enqueued, handle.layer_landed):
        with pytest.raises(error, match=message):
            ask(layer)
    for wait in (handle.layer, handle.enqueued):
        with pytest.raises(error, match=message):
            await wait(layer)


@pytest.mark.parametrize(("slot", "error", "message"), [
    (-1, IndexError, "slots 0 to 2"),
    (3, IndexError, "slots 0 to 2"),
    (1.0, TypeError, "slot must be an int"),
    (True, TypeError, "slot must be an int"),
    (None, TypeError, "slot must be an int"),
])  # fmt: skip
def test_a_slot_that_the_scheduler_does_not_have_is_an_error(
    make_scheduler: MakeScheduler, slot: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_scheduler().handle_for(slot)


def test_before_start_no_slot_has_a_handle(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(start=False)
    assert scheduler.handle_for(0) is None
    assert scheduler.handle_for(2) is None


@pytest.mark.parametrize(
    "timeout", [math.nan, "1", True, torch.tensor(1.0), 10**400], ids=lambda value: repr(value)[:9]
)
async def test_a_timeout_that_is_no_number_of_seconds_is_an_error_and_changes_nothing(
    make_scheduler: MakeScheduler, timeout: Any
) -> None:
    scheduler = make_scheduler()
    handle = hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    for call in (
        scheduler.start_loading_sync,
        scheduler.reset,
        scheduler.close,
        handle.result,
        lambda seconds: handle.wait_layer(0, seconds),
    ):
        with pytest.raises((TypeError, ValueError), match="timeout must be seconds, or None for no limit"):
            call(timeout)
    for wait in (lambda seconds: scheduler.start_loading(timeout=seconds), scheduler.areset, scheduler.aclose):
        with pytest.raises((TypeError, ValueError), match="timeout must be seconds, or None for no limit"):
            await wait(timeout)
    assert scheduler.stats().queued_ops == 1
    assert hand_out(scheduler, 3).result(TIMEOUT).node_ids == (2, 3)


@pytest.mark.parametrize("mode", ["async", "inline"])
async def test_a_timeout_that_is_over_already_looks_once(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    scheduler = make_scheduler(mode=mode, num_slots=1)
    handle = hand_out(scheduler, 1)
    assert handle.result(TIMEOUT) is handle.result(timeout=-1.0)
    device.hold("h2d")
    waiting = hand_out(scheduler, 2)
    scheduler.load(load_op(3))
    with pytest.raises(TransferTimeoutError):
        waiting.result(timeout=-1.0)
    with pytest.raises(TransferTimeoutError):
        scheduler.start_loading_sync(timeout=-math.inf)
    with pytest.raises(TransferTimeoutError):
        await scheduler.start_loading(timeout=-1)
    with pytest.raises(TransferTimeoutError):
        scheduler.reset(timeout=-1)
    assert scheduler.stats().queued_ops == 1


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("timeout", [math.inf, 1e12])
async def test_a_timeout_longer_than_the_platform_can_wait_is_as_good_as_none(
    make_scheduler: MakeScheduler, mode: str, timeout: float
) -> None:
    scheduler = make_scheduler(mode=mode, num_slots=1)
    hand_out(scheduler, 1)
    scheduler.load(load_op(2))
    handle = await scheduler.start_loading(timeout=timeout)
    assert handle is not None
    assert handle.result(timeout).node_ids == (2,)
    scheduler.load(load_op(3))
    handle = scheduler.start_loading_sync(timeout)
    assert handle is not None
    handle.wait_layer(3, timeout)
    scheduler.reset(timeout)
    await scheduler.aclose(timeout)
    scheduler.close(timeout)


# -- what a scheduler is made of ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_fence_that_is_no_stream_fails_the_burst_and_the_next_is_served(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str, logs: list[Any]
) -> None:
    scheduler = make_scheduler(mode=mode)
    scheduler.load(load_op(1))
    handle = scheduler.start_loading_sync(TIMEOUT, fence="the fence")
    assert handle is not None
    with pytest.raises(LoadFailedError) as failed:
        handle.result(TIMEOUT)
    assert isinstance(failed.value.cause, AttributeError)
    assert handle.stale
    assert hand_out(scheduler, 2).result(TIMEOUT).status is AckStatus.OK


class OddBackend(LaunchingBackend):
    """A backend with one attribute that makes no sense."""

    def __init__(self, device: EmulatedDevice, **attributes: Any) -> None:
        super().__init__(device)
        vars(self).update(attributes)


@pytest.mark.parametrize(("attributes", "message"), [
    ({"num_layers": 0}, "OddBackend.num_layers must be an int of at least 1, not 0"),
    ({"num_layers": 2.0}, "OddBackend.num_layers must be an int of at least 1, not 2.0"),
    ({"num_layers": None}, "OddBackend.num_layers must be an int of at least 1, not None"),
    ({"pool_names": ()}, "OddBackend.pool_names must be names"),
    ({"pool_names": "kv"}, "as in ('kv',), not 'kv'"),
    ({"pool_names": (1, 2)}, "OddBackend.pool_names must be names"),
    ({"pool_names": ("kv", "kv")}, "OddBackend.pool_names names a pool twice"),
])  # fmt: skip
def test_a_backend_whose_shape_makes_no_sense_is_refused_when_the_scheduler_is_made(
    device: EmulatedDevice, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HiCacheSchedError) as refused:
        TransferScheduler(OddBackend(device, **attributes), runtime=device)
    assert message in str(refused.value)


def test_an_object_that_is_no_backend_is_refused_when_the_scheduler_is_made(device: EmulatedDevice) -> None:
    with pytest.raises(AttributeError, match="num_layers"):
        TransferScheduler(cast(Any, object()), runtime=device)


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"on_ack": 5}, "on_ack must be a function"), ({"config": {}}, "must be a SchedulerConfig")],
)
def test_an_argument_of_the_wrong_kind_is_refused_when_the_scheduler_is_made(
    device: EmulatedDevice, argument: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        TransferScheduler(LaunchingBackend(device), runtime=device, **argument)


def test_pools_that_do_not_fit_are_refused_when_they_are_paired() -> None:
    small, large = make_pair(num_layers=2), make_pair(num_layers=3)
    with pytest.raises(ValueError, match="layers differ, 2 on the host and 3 on the device"):
        PoolPair("kv", small.host, large.device)

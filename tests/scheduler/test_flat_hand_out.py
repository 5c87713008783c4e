"""`load` and the hand-out make the same calls however much is loaded, and run no torch op but the event records."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hicache_sched import LoadHandle, LoadOp, PoolTransfer, TransferScheduler
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler

MILLION = 1_000_000


def big_op(node_id: int, num_tokens: int) -> LoadOp:
    """An op that moves as much in a side pool as in the anchor."""
    tokens = torch.arange(num_tokens)
    return LoadOp(node_id, tokens, tokens, (PoolTransfer("indexer", tokens, tokens),))


@contextmanager
def calls_made() -> Iterator[list[str]]:
    """Lists every Python and C function that the calling thread calls inside."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)
        elif event == "c_call":
            calls.append(arg.__qualname__)

    gc.disable()  # its callbacks would be counted, too
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


class TorchOps(TorchDispatchMode):
    """Lists what torch dispatches inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class TorchFunctions(TorchFunctionMode):
    """Lists the torch functions that are called inside, attributes of tensors apart."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "__get__":
            self.functions.append(torch.overrides.resolve_name(func) or func.__name__)
        return func(*args, **(kwargs or {}))


def hand_out_sync(scheduler: TransferScheduler) -> LoadHandle | None:
    return scheduler.start_loading_sync()


def hand_out_async(scheduler: TransferScheduler) -> LoadHandle | None:
    """Drive the coroutine by hand: with a free slot it does not suspend."""
    try:
        scheduler.start_loading().send(None)
    except StopIteration as returned:
        handle: LoadHandle | None = returned.value
        return handle
    raise AssertionError("it suspended")


HAND_OUTS = pytest.mark.parametrize("start_loading", [hand_out_sync, hand_out_async], ids=["sync", "async"])
LOADS = pytest.mark.parametrize(("num_ops", "num_tokens"), [(1, MILLION), (1000, 1), (1000, 1000)])


@pytest.fixture
def scheduler(device: EmulatedDevice, make_scheduler: MakeScheduler) -> TransferScheduler:
    """Its data plane is blocked in `prepare`, and takes no part."""
    backend = LaunchingBackend(device, pool_names=("kv", "indexer"))
    scheduler = make_scheduler(backend, num_slots=2, fence_stream=device.Stream())
    backend.gate.clear()
    device.current_stream()  # a thread's default stream is made when it is first asked for
    return scheduler


@HAND_OUTS
@LOADS
def test_a_hand_out_makes_the_same_calls_for_one_token_as_for_many_tokens_or_ops(
    scheduler: TransferScheduler,
    start_loading: Callable[[TransferScheduler], LoadHandle | None],
    num_ops: int,
    num_tokens: int,
) -> None:
    scheduler.load(big_op(1, 1))
    with calls_made() as calls_for_one:
        one = start_loading(scheduler)
    for node_id in range(num_ops):
        scheduler.load(big_op(node_id, num_tokens))
    with calls_made() as calls_for_many:
        many = start_loading(scheduler)

    assert one is not None
    assert many is not None
    assert many.num_tokens == num_ops * num_tokens
    assert calls_for_many == calls_for_one
    assert "TransferProtocol.look_for_slot" in calls_for_one, "the calls were noted"


def test_a_load_makes_the_same_calls_for_one_token_as_for_a_million_and_behind_a_thousand_ops(
    scheduler: TransferScheduler,
) -> None:
    ops = [big_op(1, 1), big_op(2, MILLION)]
    scheduler.load(big_op(0, 1))  # the first makes the queue
    with calls_made() as calls_for_one:
        scheduler.load(ops[0])
    with calls_made() as calls_for_a_million:
        scheduler.load(ops[1])
    for node_id in range(1000):
        scheduler.load(big_op(node_id, 1))
    with calls_made() as calls_behind_many:
        scheduler.load(ops[0])

    assert calls_for_a_million == calls_for_one
    assert calls_behind_many == calls_for_one
    assert "OpQueue.append" in calls_for_one, "the calls were noted"


@HAND_OUTS
@LOADS
def test_a_hand_out_makes_the_same_device_calls_for_one_token_as_for_many_tokens_or_ops(
    device: EmulatedDevice,
    scheduler: TransferScheduler,
    start_loading: Callable[[TransferScheduler], LoadHandle | None],
    num_ops: int,
    num_tokens: int,
) -> None:
    def device_calls(ops: list[LoadOp]) -> list[str]:
        for op in ops:
            scheduler.load(op)
        recorded = device.record_calls()
        assert start_loading(scheduler) is not None
        return [f"{call} on {on_stream(stream)}" for call, _, stream, thread in recorded if thread == "MainThread"]

    def on_stream(stream: Any) -> str:
        return "fence" if stream is scheduler.fence_stream else "current" if stream.runs_inline else "another"

    expected = ["record on current", "record on fence"]
    assert device_calls([big_op(1, 1)]) == expected
    assert device_calls([big_op(node_id, num_tokens) for node_id in range(num_ops)]) == expected


@HAND_OUTS
def test_neither_load_nor_the_hand_out_runs_a_torch_op(
    scheduler: TransferScheduler, start_loading: Callable[[TransferScheduler], LoadHandle | None]
) -> None:
    ops = [big_op(node_id, 1000) for node_id in range(10)]
    with TorchFunctions() as functions, TorchOps() as dispatched:
        for op in ops:
            scheduler.load(op)
        handle = start_loading(scheduler)

    assert handle is not None
    assert dispatched.ops == []
    assert functions.functions == []


def test_the_modes_see_a_torch_op() -> None:
    tokens = torch.arange(4)
    with TorchFunctions() as functions, TorchOps() as dispatched:
        tokens.max()
    assert dispatched.ops == ["aten.max.default"]
    assert functions.functions == ["torch.Tensor.max"]

"""Bursts that move side pools with the anchor: their own indices, their own layers, one outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched import InvalidLoadError, LoadFailedError, LoadOp, PoolTransfer
from hicache_sched.copy import PooledBackend
from hicache_sched.copy.merge import merge_ops
from hicache_sched.device import EmulatedDevice
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.emulated_core import EngineName
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.pools import PoolPair
from tests.builders import MakeScheduler
from tests.copy.any_pool import MAKERS, AnyPool, Sizes, bytes_after, fill
from tests.copy.builders import Point, move, page_lists, tokens_of

NUM_PAGES, PAGE_SIZE = 6, 2
KV = Sizes(planes=(6, 4), page_size=PAGE_SIZE, num_layers=3, dtype=torch.float16)
INDEXER = Sizes(planes=(8,), page_size=PAGE_SIZE, num_layers=2, dtype=torch.float16)
STATES = Sizes(planes=(40,), page_size=1, num_layers=4, dtype=torch.uint8)

Mapper = Callable[[int], int | None]
DRAFT_LAYER = 3
"""The transfer layer that only the draft model's states have."""


class Side:
    """A pair of pools, and what is where in it."""

    def __init__(self, name: str, sizes: Sizes, kinds: tuple[str, str], mapper: Mapper | None = None) -> None:
        self.host, self.device = (fill(MAKERS[kind](sizes, NUM_PAGES), seed) for seed, kind in enumerate(kinds))
        self.pair = PoolPair(name, self.host.pool, self.device.pool, mapper)
        self.mapper = mapper or (lambda layer: layer if layer < sizes.num_layers else None)

    def expect(self, transfers: Sequence[LoadOp | PoolTransfer], layers: Sequence[int]) -> bytes:
        """The device's memory once `transfers` have landed in those transfer layers."""
        local_layers = [local for local in map(self.mapper, layers) if local is not None]
        return bytes_after(self.host, self.device, transfers, local_layers)


def make_sides() -> list[Side]:
    """Attention in all three layers, indexer keys in layers 2 and 0, and states, of which one is beyond attention."""
    return [
        Side("kv", KV, ("page_first_direct", "layer_first")),
        Side("indexer", INDEXER, ("page_first", "wrapped layers"), {0: 1, 2: 0}.get),
        Side("states", STATES, ("layer_first", "page_first")),
    ]


def backend_of(sides: Sequence[Side]) -> PooledBackend:
    return PooledBackend([side.pair for side in sides])


def transfer(name: str, host: Sequence[int], device: Sequence[int], page_size: int = 1) -> PoolTransfer:
    return PoolTransfer(name, tokens_of(host, page_size), tokens_of(device, page_size))


def op(node_id: int, host: Sequence[int], device: Sequence[int], *transfers: PoolTransfer) -> LoadOp:
    return LoadOp(node_id, tokens_of(host, PAGE_SIZE), tokens_of(device, PAGE_SIZE), transfers)


def shares_of(name: str, ops: Sequence[LoadOp]) -> list[LoadOp | PoolTransfer]:
    """What ops move in one pool."""
    if name == "kv":
        return list(ops)
    return [transfer for op in ops for transfer in op.pool_transfers if transfer.name == name]


TWO_NODES = [
    op(1, [3, 1], [0, 5], transfer("indexer", [2], [4], PAGE_SIZE), transfer("states", [5, 0], [1, 3])),
    op(2, [3], [2], transfer("states", [4], [0])),
]


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[0], [1], [2], [DRAFT_LAYER], [0, 1, 2, DRAFT_LAYER]])
def test_each_transfer_layer_moves_the_layer_that_each_pool_has_for_it(layers: list[int], point: Point) -> None:
    sides = make_sides()
    expected = [side.expect(shares_of(side.pair.name, TWO_NODES), layers) for side in sides]

    move(backend_of(sides), TWO_NODES, layers, point)

    assert [side.device.raw_bytes() == bytes_ for side, bytes_ in zip(sides, expected, strict=True)] == [
        True,
        True,
        True,
    ]


@settings(deadline=None, max_examples=50)  # a busy machine is no failure
@given(data=st.data())
def test_any_mixture_of_pools_and_nodes_arrives(data: st.DataObject, point: Point) -> None:
    sides = make_sides()
    ops: list[LoadOp] = []
    free = {side.pair.name: list(data.draw(st.permutations(range(NUM_PAGES)))) for side in sides}

    def pages(name: str) -> tuple[list[int], list[int]]:
        taken = [free[name].pop() for _ in range(data.draw(st.integers(0, min(2, len(free[name])))))]
        return data.draw(page_lists(NUM_PAGES, len(taken))) if taken else [], taken

    for node_id in range(data.draw(st.integers(1, 3))):
        moved = {side.pair.name: pages(side.pair.name) for side in sides}
        transfers = [
            transfer(name, *moved[name], page_size=PAGE_SIZE if name == "indexer" else 1)
            for name in ("indexer", "states")
            if moved[name][0]
        ]
        if moved["kv"][0] or transfers:
            ops.append(op(node_id, *moved["kv"], *transfers))
    if not ops:
        return
    expected = [side.expect(shares_of(side.pair.name, ops), range(4)) for side in sides]

    move(backend_of(sides), ops, range(4), point)

    assert all(side.device.raw_bytes() == bytes_ for side, bytes_ in zip(sides, expected, strict=True))


def test_a_burst_may_move_side_pools_alone(point: Point) -> None:
    sides = make_sides()
    only_states = [op(1, [], [], transfer("states", [2], [4]))]
    expected = [side.expect(shares_of(side.pair.name, only_states), range(4)) for side in sides]

    move(backend_of(sides), only_states, range(4), point)

    assert all(side.device.raw_bytes() == bytes_ for side, bytes_ in zip(sides, expected, strict=True))


class ListingDevice(EmulatedDevice):
    """An emulated device that lists the batches it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[CopyBatch] = []

    def enqueue_copies(self, batch: CopyBatch, *, engine: EngineName = "h2d") -> None:
        self.batches.append(batch)
        super().enqueue_copies(batch, engine=engine)


def test_a_layer_is_one_batch_in_which_the_anchor_goes_first_and_the_side_pools_follow_in_order() -> None:
    sides = make_sides()

    def pool_at(address: int) -> str:
        for side in sides:
            for tensor in side.device.memory:
                if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes:
                    return side.pair.name
        raise AssertionError("no pool's memory")

    with ListingDevice() as device:
        move(backend_of(sides), TWO_NODES, range(4), Point(DeviceBinding(device)))

    pools = [list(dict.fromkeys(map(pool_at, batch.dst.tolist()))) for batch in device.batches]
    assert pools == [["kv", "indexer", "states"], ["kv", "states"], ["kv", "indexer", "states"], ["states"]]


# -- the burst as a whole -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_an_ack_counts_tokens_per_pool_and_bytes_in_all(make_scheduler: MakeScheduler, mode: str) -> None:
    sides = make_sides()
    scheduler = make_scheduler(backend_of(sides), mode=mode)
    for node in TWO_NODES:
        scheduler.load(node)
    handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None
    ack = handle.result(timeout=30)

    assert (handle.num_layers, ack.num_tokens) == (4, 3 * PAGE_SIZE)
    assert dict(ack.num_tokens_by_pool) == {"kv": 3 * PAGE_SIZE, "indexer": PAGE_SIZE, "states": 3}
    kv, indexer, states = 3 * PAGE_SIZE * (6 + 4) * 2 * 3, PAGE_SIZE * 8 * 2 * 2, 3 * 40 * 4
    assert ack.num_bytes == kv + indexer + states


WRONG = {
    "out of range": (transfer("states", [0], [NUM_PAGES]), "pool 'states': device index 6 of node 1 is out of range"),
    "named twice": (transfer("states", [0, 1], [3, 3]), "pool 'states': device index 3 of node 1 is already"),
    "not a whole page": (transfer("indexer", [0], [0]), "pool 'indexer': node 1 loads 1 tokens"),
}


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_side_pool_that_fails_stops_the_burst_before_a_byte_has_moved(
    make_scheduler: MakeScheduler, mode: str, wrong: str
) -> None:
    sides = make_sides()
    before = [side.expect([], []) for side in sides]
    wrong_transfer, words = WRONG[wrong]
    scheduler = make_scheduler(backend_of(sides), mode=mode)
    scheduler.load(op(1, [0], [0], wrong_transfer))
    handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None

    with pytest.raises(LoadFailedError) as failed:
        handle.result(timeout=30)

    assert isinstance(failed.value.cause, InvalidLoadError)
    assert words in str(failed.value.cause)
    assert all(side.device.raw_bytes() == bytes_ for side, bytes_ in zip(sides, before, strict=True))


def test_a_tensor_that_pools_share_is_read_once() -> None:
    reads: list[torch.Tensor] = []

    class ReadingDevice(DeviceBinding):
        def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            reads.extend(tensors)
            return super().to_host(tensors)

    host, on_device, other = torch.arange(4), torch.arange(4, 8), torch.arange(8, 10)
    transfers = PoolTransfer("indexer", host, on_device), PoolTransfer("states", other, other)
    with EmulatedDevice() as emulated:
        merged = merge_ops(
            [LoadOp(1, host, on_device, transfers)], ReadingDevice(emulated), ["kv", "indexer", "states"]
        )

    assert [tensor.data_ptr() for tensor in reads] == [on_device.data_ptr(), other.data_ptr()]
    assert [merged[name].device.tolist() for name in merged] == [[4, 5, 6, 7], [4, 5, 6, 7], [8, 9]]


def test_side_transfers_of_one_pool_are_merged_in_the_order_of_their_nodes() -> None:
    with EmulatedDevice() as emulated:
        merged = merge_ops(TWO_NODES, DeviceBinding(emulated), ["kv", "indexer", "states"])

    assert merged["states"].node_ids == (1, 2)
    assert merged["states"].host.tolist() == [5, 0, 4]
    assert merged["states"].device.tolist() == [1, 3, 0]
    assert [merged["states"].node_of(position) for position in range(3)] == [1, 1, 2]


# -- layers ---------------------------------------------------------------------------------------------------------


def a_pair(name: str = "kv", mapper: Any = None) -> PoolPair:
    pools: list[AnyPool] = [MAKERS["layer_first"](KV, 2) for _ in range(2)]
    return PoolPair(name, pools[0].pool, pools[1].pool, mapper)


def test_there_are_as_many_transfer_layers_as_the_largest_unmapped_pair_has() -> None:
    backend = backend_of(make_sides())

    assert (backend.num_layers, backend.pool_names) == (4, ("kv", "indexer", "states"))


def test_transfer_layers_can_be_given() -> None:
    assert PooledBackend([a_pair(mapper=lambda layer: layer - 2 if layer >= 2 else None)], num_layers=5).num_layers == 5


@pytest.mark.parametrize(
    ("pairs", "num_layers", "words"),
    [
        ([a_pair(), a_pair()], None, "names of their own"),
        ([a_pair(mapper={0: 0}.get)], None, "pass num_layers"),
        ([a_pair()], 2, r"the 2 transfer layers move the layers \[0, 1\]"),
        ([a_pair(mapper={0: 0, 1: 1}.get)], 3, r"move the layers \[0, 1\]: change its layer_mapper"),
        ([a_pair(mapper=lambda layer: min(layer, 2))], 4, r"move the layers \[0, 1, 2, 2\]"),
        ([a_pair(mapper=lambda layer: layer)], 4, r"move the layers \[0, 1, 2, 3\]"),
    ],
    ids=["same name", "only mapped", "too few", "left out", "twice", "not there"],
)
def test_pairs_that_do_not_fit_together_are_refused(pairs: list[PoolPair], num_layers: int | None, words: str) -> None:
    with pytest.raises(HiCacheSchedError, match=words):
        PooledBackend(pairs, num_layers=num_layers)

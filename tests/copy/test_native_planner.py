"""The native planner: the same plans as `BurstPlanner` makes, and the same refusals."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched import native
from hicache_sched.copy.merge import Indices, MergedOps
from hicache_sched.copy.planner import BurstPlanner, PlanLayout
from hicache_sched.errors import InvalidLoadError
from hicache_sched.pools import PoolPair
from tests.copy.any_pool import MAKERS, SIZES, AnyBurst, Sizes, any_bursts
from tests.copy.builders import Burst, bursts, make_pair, page_lists, tokens_of

pytestmark = pytest.mark.skipif(native.module is None, reason="needs the native part")

Merged = dict[str, MergedOps]
INT64 = np.iinfo(np.int64)
SIDE = Sizes(planes=(5,), page_size=1, num_layers=1, dtype=torch.uint8)


class Sut(NamedTuple):
    """Both planners of some pairs."""

    pairs: Sequence[PoolPair]
    python: BurstPlanner
    native: Any

    def plans_alike(self, merged: Merged) -> bool:
        """Plan a burst with both and compare what they say; whether it is planned and not refused."""
        made = self.native.plan(shares_of(self.pairs, merged))
        try:
            wanted = self.python.plan(merged)
        except InvalidLoadError:
            assert made is None
            return False
        assert made is not None
        src_offsets, dst_offsets, sizes, plane_ends, columns = (np.frombuffer(part, dtype=np.int64) for part in made)
        assert src_offsets.tolist() == wanted.src_offsets.tolist()
        assert dst_offsets.tolist() == wanted.dst_offsets.tolist()
        assert sizes.tolist() == wanted.sizes.tolist()
        assert plane_ends.tolist() == wanted.plane_ends.tolist()
        layout = self.python.layout
        assert layout.src_base[:, columns].tolist() == wanted.src_base.tolist()
        assert layout.dst_base[:, columns].tolist() == wanted.dst_base.tolist()
        return True


def side_pair() -> PoolPair:
    host, device = (MAKERS["layer_first"](SIDE, 8).pool for _ in range(2))
    return PoolPair("side", host, device)


def both_planners(pairs: Sequence[PoolPair]) -> Sut:
    num_layers = max(pair.num_layers for pair in pairs)
    local_layers = [[layer if layer < pair.num_layers else None for layer in range(num_layers)] for pair in pairs]
    python = BurstPlanner(pairs, local_layers)
    return Sut(pairs, python, native.module.Planner(python.layout.pairs, python.layout.planes))


def shares_of(pairs: Sequence[PoolPair], merged: Merged) -> tuple[tuple[int, Indices, Indices, Indices], ...]:
    return tuple(
        (number, merged[pair.name].host, merged[pair.name].device, merged[pair.name].ends)
        for number, pair in enumerate(pairs)
        if pair.name in merged
    )


def ops_of(*ops: tuple[Sequence[int], Sequence[int]]) -> MergedOps:
    """Ops, each given by its host and its device indices, as one."""
    return MergedOps(
        node_ids=tuple(range(len(ops))),
        ends=np.cumsum([len(host) for host, _ in ops], dtype=np.int64),
        host=np.array([index for host, _ in ops for index in host], dtype=np.int64),
        device=np.array([index for _, device in ops for index in device], dtype=np.int64),
    )


def merged_of(burst: AnyBurst | Burst) -> MergedOps:
    return ops_of(*((op.host_indices.tolist(), op.device_indices.tolist()) for op in burst.ops))


def page_ops(host: Sequence[int], device: Sequence[int], page_size: int) -> MergedOps:
    """One op that moves pages."""
    return ops_of((tokens_of(host, page_size).tolist(), tokens_of(device, page_size).tolist()))


# -- several pairs ----------------------------------------------------------------------------------------------------


class Hybrid(NamedTuple):
    """Pairs of any kinds, and bursts that move something of some of them."""

    pairs: Sequence[PoolPair]
    bursts: Sequence[Merged]


@st.composite
def shares(draw: st.DrawFn, pair: PoolPair) -> MergedOps:
    """Some pages of a pair, in any order, in some ops; one of them may be of no tokens."""
    device = draw(page_lists(pair.device.num_pages))
    num_pages = len(device)
    any_pages = st.lists(st.integers(0, pair.host.num_pages - 1), min_size=num_pages, max_size=num_pages)
    host = draw(
        page_lists(pair.host.num_pages, num_pages) | any_pages if num_pages <= pair.host.num_pages else any_pages
    )
    cuts = [0, *sorted(draw(st.lists(st.integers(0, num_pages), max_size=3))), num_pages]
    page_size = pair.device.page_size
    return ops_of(
        *(
            (tokens_of(host[start:end], page_size).tolist(), tokens_of(device[start:end], page_size).tolist())
            for start, end in itertools.pairwise(cuts)
        )
    )


@st.composite
def hybrids(draw: st.DrawFn) -> Hybrid:
    pairs = []
    for number in range(draw(st.integers(1, 3))):
        sizes = draw(SIZES)
        pools = [MAKERS[draw(st.sampled_from(sorted(MAKERS)))](sizes, draw(st.integers(1, 8))) for _ in range(2)]
        pairs.append(PoolPair(f"pair {number}", pools[0].pool, pools[1].pool))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        moved = draw(st.lists(st.sampled_from(pairs), min_size=1, unique_by=lambda pair: pair.name))
        made.append({pair.name: draw(shares(pair)) for pair in moved})
    return Hybrid(pairs, made)


# -- the same plans ---------------------------------------------------------------------------------------------------


@settings(deadline=None)  # a busy machine is no failure
@given(bursts())
def test_a_burst_of_an_attention_pool_is_planned_as_in_python(burst: Burst) -> None:
    assert both_planners([burst.pair]).plans_alike({"kv": merged_of(burst)})


@settings(deadline=None, max_examples=200)
@given(any_bursts())
def test_a_burst_between_any_two_pools_is_planned_as_in_python(burst: AnyBurst) -> None:
    assert both_planners([burst.pair]).plans_alike({"kv": merged_of(burst)})


@settings(deadline=None, max_examples=200)
@given(hybrids())
def test_bursts_of_several_pairs_are_planned_as_in_python_one_after_the_other(hybrid: Hybrid) -> None:
    planners = both_planners(hybrid.pairs)

    for merged in hybrid.bursts:
        assert planners.plans_alike(merged)


@pytest.mark.parametrize("device", MAKERS)
@pytest.mark.parametrize("host", MAKERS)
@pytest.mark.parametrize("planes", [(6, 4), (8, 8)], ids=str)
def test_every_kind_of_pool_is_planned_into_every_other(host: str, device: str, planes: tuple[int, ...]) -> None:
    sizes = Sizes(planes=planes, page_size=4, num_layers=2, dtype=torch.float16)
    pair = PoolPair("kv", MAKERS[host](sizes, 12).pool, MAKERS[device](sizes, 12).pool)
    planners = both_planners([pair])

    for host_pages, device_pages in [
        ([3, 0, 3], [5, 1, 2]),
        ([4, 5, 6, 0, 1, 9], [2, 3, 4, 5, 6, 0]),
        ([7, 8, 9], [0, 1, 2]),
        ([9, 8], [1, 0]),
        ([11], [11]),
    ]:
        assert planners.plans_alike({"kv": page_ops(host_pages, device_pages, 4)})


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 24])
def test_large_bursts_are_planned_as_in_python(page_size: int) -> None:
    pair = make_pair(host_pages=700, device_pages=600, page_size=page_size, host_layout="layer_first")
    planners, rng = both_planners([pair]), np.random.default_rng(page_size)

    for _ in range(3):
        scattered = rng.permutation(600)[:500].tolist()
        assert planners.plans_alike({"kv": page_ops(rng.integers(0, 700, 500).tolist(), scattered, page_size)})
        in_runs = [page for start in rng.permutation(60) for page in range(start * 10, start * 10 + 10)]
        assert planners.plans_alike({"kv": page_ops(in_runs, in_runs, page_size)})


# -- the same refusals ------------------------------------------------------------------------------------------------


small = st.integers(-2, 2)


def near(pool_tokens: int) -> st.SearchStrategy[int]:
    """Indices around the limits of a pool and of int64, and anything else."""
    limits = (0, pool_tokens, 2**31, 2**32, 2**62, -(2**62), INT64.max, INT64.min)
    around = st.builds(lambda limit, by: min(max(limit + by, INT64.min), INT64.max), st.sampled_from(limits), small)
    return around | st.integers(INT64.min, INT64.max)


DAMAGES = ("by some", "any", "copied", "swapped", "page copied", "page moved", "page shifted", "cut", "moved end")


@st.composite
def damaged(draw: st.DrawFn, pair: PoolPair, ops: MergedOps) -> MergedOps:
    """Ops of which something was changed, wrong or not."""
    host, device, ends = ops.host.copy(), ops.device.copy(), ops.ends.copy()
    side = draw(st.sampled_from(("host", "device")))
    tokens, pool = (host, pair.host) if side == "host" else (device, pair.device)
    positions = st.integers(0, len(tokens) - 1)
    one, other = draw(positions), draw(positions)
    page_size = pair.device.page_size
    page, other_page = (slice(at // page_size * page_size, (at // page_size + 1) * page_size) for at in (one, other))
    how = draw(st.sampled_from(DAMAGES))
    if how == "by some":
        tokens[one] += draw(small)
    elif how == "any":
        tokens[one] = draw(near(pool.num_tokens))
    elif how == "copied":
        tokens[one] = tokens[other]
    elif how == "swapped":
        tokens[[one, other]] = tokens[[other, one]]
    elif how == "page copied":
        tokens[page] = tokens[other_page].copy()
    elif how == "page moved":
        first = np.array(draw(near(pool.num_tokens)), dtype=np.int64)
        with np.errstate(over="ignore"):
            tokens[page] = first + np.arange(page_size)
    elif how == "page shifted":
        tokens[page] += draw(small)
    elif how == "cut" and len(tokens) > 1:
        length = draw(st.integers(1, len(tokens) - 1))
        host, device = host[:length].copy(), device[:length].copy()
        ends = np.minimum(ends, length)
    elif how == "moved end" and len(ends) > 1:
        ends[0] = min(max(int(ends[0]) + draw(small), 0), int(ends[1]))
    return ops._replace(host=host, device=device, ends=ends)


@settings(deadline=None, max_examples=250)
@given(hybrid=hybrids(), data=st.data())
def test_what_is_damaged_is_refused_where_python_refuses_it_and_the_next_burst_is_planned(
    hybrid: Hybrid, data: st.DataObject
) -> None:
    planners = both_planners(hybrid.pairs)
    by_name = {pair.name: pair for pair in hybrid.pairs}

    for merged in hybrid.bursts:
        name = data.draw(st.sampled_from(sorted(merged)))
        planners.plans_alike(merged | {name: data.draw(damaged(by_name[name], merged[name]))})
        assert planners.plans_alike(merged)


EXTREMES = [-1, 32, 33, 2**31, 2**32, 2**62, 2**63 - 32, 2**63 - 1, -(2**62), -(2**63) + 31, -(2**63)]


@pytest.mark.parametrize("index", EXTREMES)
@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("position", [0, 3, 7, 15])
def test_an_index_out_of_range_is_refused_anywhere(page_size: int, side: str, index: int, position: int) -> None:
    planners = both_planners([make_pair(host_pages=32 // page_size, device_pages=32 // page_size, page_size=page_size)])
    good = ops_of((range(16), range(16, 32)))
    bad = ops_of((range(16), range(16, 32)))
    (bad.host if side == "host" else bad.device)[position] = index

    assert not planners.plans_alike({"kv": bad})
    assert planners.plans_alike({"kv": good})


@pytest.mark.parametrize("first", [32, -4, 2**62, 2**63 - 4, -(2**63)])
@pytest.mark.parametrize("side", ["host", "device"])
def test_an_aligned_page_out_of_range_is_refused(side: str, first: int) -> None:
    planners = both_planners([make_pair()])
    bad = page_ops([0, 3], [1, 5], 4)
    (bad.host if side == "host" else bad.device)[4:] = first + np.arange(4)

    assert not planners.plans_alike({"kv": bad})


@pytest.mark.parametrize(
    "wrong",
    [
        ops_of((range(3), range(3))),
        ops_of((range(3), range(3)), ([3], [3])),
        ops_of((range(4), range(4)), (range(4, 9), range(4, 9))),
        ops_of(([1, 2, 3, 4], range(4))),
        ops_of((range(4), [1, 2, 3, 4])),
        ops_of(([0, 1, 3, 2], range(4))),
        ops_of((range(4), [3, 2, 1, 0])),
        ops_of((range(8), [0, 1, 2, 7, 4, 5, 6, 3])),
        ops_of((range(8), [0, 1, 2, 3, 0, 1, 2, 3])),
        ops_of((range(4), range(4)), (range(4), range(4))),
    ],
    ids=[
        "a part of a page",
        "a page in two ops",
        "a page and a part",
        "not aligned on the host",
        "not aligned on the device",
        "out of order on the host",
        "backwards on the device",
        "tokens of two pages swapped",
        "a page twice",
        "a page twice in two ops",
    ],
)
@pytest.mark.parametrize("layouts", [("page_first_direct", "layer_first"), ("layer_first", "page_first_direct")])
def test_pages_that_are_cut_or_out_of_order_or_named_twice_are_refused(
    wrong: MergedOps, layouts: tuple[Any, Any]
) -> None:
    planners = both_planners([make_pair(host_layout=layouts[0], device_layout=layouts[1])])

    assert not planners.plans_alike({"kv": wrong})


@pytest.mark.parametrize("distance", [1, 2, 63, 64, 65, 128, 499])
@pytest.mark.parametrize("at", [0, 1, 250])
def test_a_destination_named_twice_is_refused_however_far_apart_and_every_time(at: int, distance: int) -> None:
    planners = both_planners([make_pair(host_pages=500, device_pages=1000, page_size=1)])
    device = np.random.default_rng(1).permutation(1000)[:500].tolist()
    twice = list(device)
    twice[(at + distance) % 500] = twice[at]

    for _ in range(2):
        assert not planners.plans_alike({"kv": ops_of((range(500), twice))})
        assert planners.plans_alike({"kv": ops_of((range(500), device))})


def test_what_one_pair_was_refused_for_does_not_count_for_another() -> None:
    pairs = [make_pair(page_size=1), side_pair()]
    planners = both_planners(pairs)
    scattered, twice = ops_of(([0, 1, 2], [5, 1, 3])), ops_of(([0, 1, 2], [5, 1, 5]))

    assert not planners.plans_alike({"kv": scattered, "side": twice})
    assert not planners.plans_alike({"kv": twice, "side": scattered})
    assert planners.plans_alike({"kv": scattered, "side": scattered})


# -- what Python hands over -------------------------------------------------------------------------------------------


def a_layout() -> PlanLayout:
    """Two pairs, of two planes and one."""
    pairs = [make_pair(), side_pair()]
    return both_planners(pairs).python.layout


def test_the_layout_is_flat_contiguous_int64() -> None:
    layout = a_layout()

    assert [array.shape for array in layout] == [(2 * 5,), (3 * 7,), (2, 3), (2, 3)]
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in layout)
    assert layout.pairs.tolist() == [32, 32, 4, 4, 4, 8, 8, 1, 1, 1]
    assert layout.planes[::7].tolist() == [0, 0, 1]


def test_a_burst_may_move_some_of_the_pairs_only() -> None:
    layout = a_layout()
    planner = native.module.Planner(layout.pairs, layout.planes)
    ends = np.array([1])

    made = planner.plan(((1, np.array([3]), np.array([2]), ends),))

    assert [np.frombuffer(part, dtype=np.int64).tolist() for part in made] == [[3 * 5], [2 * 5], [5], [1], [2]]


def changed(**changes: tuple[int, int]) -> Callable[[], Any]:
    """Makes a planner of layouts of which one number of an array is another."""

    def make() -> Any:
        layout = a_layout()
        arrays = {"pairs": layout.pairs.copy(), "planes": layout.planes.copy()}
        for name, (position, value) in changes.items():
            arrays[name][position] = value
        return native.module.Planner(arrays["pairs"], arrays["planes"])

    return make


def test_the_layouts_that_are_changed_are_accepted_unchanged() -> None:
    changed()()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (changed(pairs=(0, 0)), "pair 0: src_tokens must be positive, not 0"),
        (changed(pairs=(6, -8)), "pair 1: dst_tokens must be positive, not -8"),
        (changed(pairs=(2, 0)), "pair 0: src_page_size must be positive"),
        (changed(pairs=(3, INT64.min)), "pair 0: dst_page_size must be positive"),
        (changed(pairs=(9, 0)), "pair 1: tokens_per_row must be positive"),
        (changed(pairs=(2, 8)), "pair 0: src_page_size and dst_page_size must be the same"),
        (changed(pairs=(0, 33)), "pair 0: src_tokens and dst_tokens must be whole pages"),
        (changed(pairs=(4, 2)), "pair 0: tokens_per_row must be 1 or the page size"),
        (changed(planes=(1, 0)), "pair 0, plane 0, src: stride must be positive"),
        (changed(planes=(7 + 5, 0)), "pair 0, plane 1, dst: parts must be positive"),
        (changed(planes=(14 + 3, -1)), "pair 1, plane 0, src: row_bytes must be positive, not -1"),
        (changed(planes=(2, 4)), "pair 0, plane 0, src: parts must be 1 or the rows of a page, 1, not 4"),
        (changed(planes=(4, 31)), "pair 0, plane 0, dst: rows overlap, as a stride of 31 bytes"),
        (changed(planes=(4, 2**62)), "pair 0, plane 0, dst: a stride of 4611686018427387904 bytes takes the pool"),
        (changed(planes=(3, 1)), "pair 0, plane 0: row_bytes of src and dst must be the same"),
        (changed(planes=(0, -1)), "planes must ascend by their pair, of which there are 2: pair -1 after 0"),
        (changed(planes=(0, 1)), "planes must ascend by their pair, of which there are 2: pair 0 after 1"),
        (changed(planes=(14, 2)), "planes must ascend by their pair, of which there are 2: pair 2 after 0"),
        (changed(planes=(14, 0)), "pair 1: it has no planes"),
        (lambda: native.module.Planner(a_layout().pairs[:-1], a_layout().planes), "pairs must have 5 numbers a pair"),
        (lambda: native.module.Planner(a_layout().pairs[:0], a_layout().planes), "pairs must have 5 numbers a pair"),
        (lambda: native.module.Planner(a_layout().pairs, a_layout().planes[:-1]), "planes must have 7 numbers a plane"),
    ],
)
def test_layouts_that_no_pools_have_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()


def test_a_pool_that_no_memory_could_hold_is_no_crash() -> None:
    tokens = 2**62
    with pytest.raises(MemoryError):
        native.module.Planner(np.array([8, tokens, 1, 1, 1]), np.array([0, 1, 1, 1, 1, 1, 1]))


ONE = np.array([1])


@pytest.mark.parametrize(
    ("shares", "error", "words"),
    [
        ([], TypeError, "takes a tuple of shares"),
        ((1,), TypeError, "a share must be a tuple"),
        (((0, ONE, ONE),), TypeError, "a share must be a tuple"),
        (((1, ONE, ONE, ONE), (1, ONE, ONE, ONE)), ValueError, "shares must ascend by their pair"),
        (((2, ONE, ONE, ONE),), ValueError, "there is no pair 2, only 2 of them"),
        (((-1, ONE, ONE, ONE),), OverflowError, "negative"),
        (((1, ONE, np.array([1, 2]), ONE),), ValueError, "must have the same tokens, and some, not 1 and 2"),
        (((1, ONE[:0], ONE[:0], ONE[:0]),), ValueError, "must have the same tokens, and some, not 0 and 0"),
        (((1, ONE, ONE, np.array([2])),), ValueError, "op_ends of pair 1 must end with its 1 tokens"),
        (((1, ONE, ONE, ONE[:0]),), ValueError, "op_ends of pair 1 must end with its 1 tokens"),
        (((1, ONE.astype(np.int32), ONE, ONE),), TypeError, "src must be a one-dimensional int64 array"),
        (((1, ONE, ONE[None], ONE),), TypeError, "dst must be a one-dimensional int64 array"),
        (((1, ONE, ONE, np.arange(4)[::2]),), ValueError, "not C-contiguous"),
    ],
)
def test_shares_that_are_none_are_refused_in_words(shares: Any, error: type[Exception], words: str) -> None:
    layout = a_layout()
    planner = native.module.Planner(layout.pairs, layout.planes)

    with pytest.raises(error, match=words):
        planner.plan(shares)


def test_other_threads_run_while_a_burst_is_planned() -> None:
    num_tokens = 2**20
    planner = native.module.Planner(np.array([num_tokens, num_tokens, 1, 1, 1]), np.array([0, 8, 1, 4, 8, 1, 4]))
    backwards = np.arange(num_tokens)[::-1].copy()
    may_run, has_run = threading.Event(), threading.Event()

    def run() -> None:
        may_run.wait()
        has_run.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # it runs once we let go of the GIL, and not before
    try:
        may_run.set()
        for _ in range(100):
            assert planner.plan(((0, backwards, backwards, np.array([num_tokens])),)) is not None
            if has_run.is_set():
                break
        assert has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()

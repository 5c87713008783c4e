"""`PagedCache` under real models with random weights: what they compute, what is written, and what layers wait for."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hicache_sched import HiCacheSchedError, LoadHandle
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.integrations.transformers import PagedCache
from hicache_sched.pools import Layout, Pool, PoolPair
from tests.builders import MakeScheduler
from tests.copy.builders import page_op, raw_bytes

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LAYERS, HEADS, HEAD_DIM, VOCAB = 4, 2, 8, 128
SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": HEAD_DIM, "vocab_size": VOCAB}
COUNTS = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS}
# No end-of-sequence token: random weights would end a generation anywhere.
CONFIG: dict[str, Any] = {**SIZES, **COUNTS, "eos_token_id": None, "pad_token_id": 0}
TIMEOUT = 30.0
PAGES = [[7, 1, 4], [0, 9, 2]]  # of up to two sequences, room for 12 tokens each
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def tiny(family: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return family(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(LlamaForCausalLM, LlamaConfig(**CONFIG))


@pytest.fixture(scope="module", params=["llama", "sliding window"])
def any_model(request: pytest.FixtureRequest, model: Any) -> Any:
    return model if request.param == "llama" else tiny(MistralForCausalLM, MistralConfig(**CONFIG, sliding_window=5))


@pytest.fixture
def model_thread(device: EmulatedDevice) -> Iterator[Executor]:
    """A thread for forwards; what a failed test left held is let go of before the thread is joined."""
    with ThreadPoolExecutor(1) as executor:
        yield executor
        device.resume("h2d")


def make_pool(layout: Layout = "layer_first", *, page_size: int = 4, num_pages: int = 10) -> Pool:
    """A pool full of NaN: what is read without having been written shows in the result."""
    pool = Pool.mha(num_pages, page_size, LAYERS, HEADS, HEAD_DIM, torch.float32, layout=layout)
    for plane in pool.planes:
        plane.fill_(torch.nan)
    return pool


def page_in(pool: Pool, plane: torch.Tensor, layer: int, page: int) -> torch.Tensor:
    """One page of a plane, [page_size, num_heads, head_dim], found by the documented shape of its layout."""
    if plane.dim() == 5:
        return plane[page, layer]
    tokens = slice(page * pool.page_size, (page + 1) * pool.page_size)
    return plane[layer, tokens] if len(plane) == LAYERS else plane[tokens, layer]


def tokens(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def states(
    num_new: int, *, batch: int = 1, heads: int = HEADS, dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(batch, heads, num_new, dim).to(dtype)


def logits_of(model: Any, ids: torch.Tensor, cache: Any = None, chunks: int | list[int] = 99) -> torch.Tensor:
    """Logits of every token of `ids`, computed chunk by chunk."""
    with torch.no_grad():
        return torch.cat([model(chunk, cache=cache).logits for chunk in ids.split(chunks, 1)], 1)


def generated(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> list[list[int]]:
    result = model.generate(ids, cache=cache, do_sample=False, max_new_tokens=6, **options)
    return [[int(token) for token in row] for row in result]


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def assert_same_states(ours: Any, theirs: Any) -> None:
    for layer in range(LAYERS):
        torch.testing.assert_close(ours.layers[layer].keys, theirs.layers[layer].keys)
        torch.testing.assert_close(ours.layers[layer].values, theirs.layers[layer].values)


# -- what a model computes ---------------------------------------------------------------------------------------


@in_every_layout
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("chunks", [1, [5, 1, 5], 11])
def test_a_model_computes_what_it_computes_with_a_dynamic_cache(
    model: Any, layout: Layout, batch: int, chunks: int | list[int]
) -> None:
    ids, paged, dynamic = tokens(11, batch), PagedCache(make_pool(layout), PAGES[:batch]), DynamicCache()
    assert_same_logits(logits_of(model, ids, paged, chunks), logits_of(model, ids, dynamic, chunks))
    assert_same_states(paged, dynamic)


@settings(deadline=None, max_examples=40)  # a busy machine is no failure
@given(data=st.data())
def test_neither_chunks_nor_pages_nor_their_order_change_what_a_model_computes(model: Any, data: st.DataObject) -> None:
    batch, page_size, per_sequence = (data.draw(st.integers(1, most)) for most in (3, 5, 4))
    pool = make_pool(data.draw(st.sampled_from(LAYOUTS)), page_size=page_size, num_pages=16)
    order = data.draw(st.permutations(range(16)))
    pages = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(batch)]
    length = data.draw(st.integers(1, per_sequence * page_size))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, length)))), length]
    chunks = [end - begin for begin, end in itertools.pairwise(cuts) if end > begin]
    ids, paged, dynamic = tokens(length, batch), PagedCache(pool, pages), DynamicCache()

    assert_same_logits(logits_of(model, ids, paged, chunks), logits_of(model, ids, dynamic, chunks))
    assert_same_states(paged, dynamic)


@in_every_layout
def test_update_returns_exactly_what_it_was_given_so_far_and_puts_it_into_the_pages_in_order(layout: Layout) -> None:
    pool, keys, values = make_pool(layout), states(8), states(8)
    cache = PagedCache(pool, [7, 1])

    cache.update(keys[:, :, :3], values[:, :, :3], 2)
    returned = cache.update(keys[:, :, 3:], values[:, :, 3:], 2)

    for ours, theirs, plane in zip(returned, (keys, values), pool.planes, strict=True):
        assert torch.equal(ours, theirs)
        in_pages = torch.cat([page_in(pool, plane, 2, page) for page in (7, 1)])
        assert torch.equal(in_pages, theirs[0].transpose(0, 1))


@in_every_layout
def test_nothing_but_the_tokens_of_a_forward_is_written(model: Any, layout: Layout) -> None:
    pool = make_pool(layout)
    logits_of(model, tokens(6), PagedCache(pool, [7, 1, 4]), chunks=2)

    for plane in pool.planes:
        for layer in range(LAYERS):
            written = [not page_in(pool, plane, layer, page).isnan().all() for page in range(10)]
            assert [page for page in range(10) if written[page]] == [1, 7]
            assert page_in(pool, plane, layer, 1)[2:].isnan().all()


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_gives_the_tokens_that_it_gives_without_the_cache(any_model: Any, batch: int) -> None:
    ids = tokens(6, batch)  # the end of what is generated does not see the beginning through a window of 5
    assert generated(any_model, ids, PagedCache(make_pool(), PAGES[:batch])) == generated(any_model, ids)


@pytest.mark.parametrize("num_tokens", [4, 5])  # up to the end of a page, and into one
def test_generate_goes_on_behind_a_prefix_that_pages_hold(any_model: Any, num_tokens: int) -> None:
    ids, pool = tokens(6), make_pool()
    logits_of(any_model, ids[:, :num_tokens], PagedCache(pool, PAGES[0]))
    assert generated(any_model, ids, PagedCache(pool, PAGES[0], num_tokens=num_tokens)) == generated(any_model, ids)


def test_generate_takes_back_the_guesses_of_a_prompt_lookup(model: Any) -> None:
    ids, cache = tokens(6).repeat(1, 2), PagedCache(make_pool(), range(10))
    assert generated(model, ids, cache, prompt_lookup_num_tokens=3) == generated(model, ids)


def test_a_cache_that_was_set_back_takes_another_number_of_tokens_from_there(model: Any) -> None:
    ids, cache = tokens(11), PagedCache(make_pool(), PAGES[0])
    logits_of(model, ids[:, :3], cache)
    cache.num_tokens = 0
    assert_same_logits(logits_of(model, ids, cache), logits_of(model, ids))


def test_no_gradient_flows_into_the_pool(model: Any) -> None:
    pool = make_pool()
    cache: Any = PagedCache(pool, PAGES[0])
    model(tokens(3), cache=cache)
    assert not any(states.requires_grad for states in (*pool.planes, cache.layers[0].keys, cache.layers[0].values))


# -- shared pages ------------------------------------------------------------------------------------------------


@pytest.fixture
def shared_prefix(model: Any) -> tuple[Pool, torch.Tensor]:
    """Two sequences of 12 tokens whose first 8 are the same, and a pool that holds those in its pages 7 and 1."""
    ids, pool = tokens(12, 2), make_pool()
    ids[:, :8] = ids[0, :8]
    logits_of(model, ids[:1, :8], PagedCache(pool, [7, 1]))
    return pool, ids


def test_caches_over_the_same_prefix_pages_go_on_each_in_its_own(model: Any, shared_prefix: Any) -> None:
    pool, ids = shared_prefix
    caches = [PagedCache(pool, [7, 1, own], num_tokens=8) for own in (4, 9)]

    # A token of one, a token of the other.
    steps = [[logits_of(model, ids[i : i + 1, at : at + 1], caches[i]) for i in (0, 1)] for at in range(8, 12)]

    ours = torch.cat([torch.cat([step[i] for step in steps], 1) for i in (0, 1)])
    assert_same_logits(ours, logits_of(model, ids)[:, 8:])


def test_sequences_of_a_batch_share_pages_that_are_full(model: Any, shared_prefix: Any) -> None:
    pool, ids = shared_prefix
    ours = logits_of(model, ids[:, 8:], PagedCache(pool, [[7, 1, 4], [7, 1, 9]], num_tokens=8), chunks=1)
    assert_same_logits(ours, logits_of(model, ids)[:, 8:])


# -- loads -------------------------------------------------------------------------------------------------------


class LandsWhenWaitedFor:
    """A load of whole pages whose layers land as late as they may: in the first wait for each."""

    def __init__(self, host: Pool, device: Pool, pages: Sequence[int]) -> None:
        self.waits: list[int] = []
        self._host, self._device, self._pages = host, device, pages

    def wait_layer(self, layer: int) -> None:
        self.waits.append(layer)
        if self.waits.count(layer) == 1:
            for there, here in zip(self._host.planes, self._device.planes, strict=True):
                for page in self._pages:
                    page_in(self._device, here, layer, page).copy_(page_in(self._host, there, layer, page))


class FailsAtLayer(PooledBackend):
    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        if layer == 2:
            raise RuntimeError("no copies from layer 2 on")
        super().enqueue_layer(prepared, layer)


def host_with(model: Any, ids: torch.Tensor, pages: Sequence[int]) -> Pool:
    """A host pool whose pages hold the keys and values of `ids`, and NaN behind them."""
    pool = make_pool()  # the layout that goes with any other
    logits_of(model, ids, PagedCache(pool, pages))
    return pool


def reload(
    model: Any, pool: Pool, make_scheduler: MakeScheduler, backend: Callable[[Any], PooledBackend] = PooledBackend
) -> tuple[PagedCache, LoadHandle]:
    """Hand out a load of the first 6 of `tokens(11)`, and make the cache that goes on behind them."""
    scheduler = make_scheduler(backend([PoolPair("kv", host_with(model, tokens(11)[:, :6], [0, 2]), pool)]))
    scheduler.load(page_op(1, [0, 2], [7, 1]))
    handle = scheduler.start_loading_sync(timeout=TIMEOUT)
    assert handle is not None
    return PagedCache(pool, [7, 1, 4], num_tokens=6, loads=[handle]), handle


@in_every_layout
@pytest.mark.parametrize("prefix", [6, 8])  # with 6, new tokens share a page with loaded ones
def test_a_layers_pages_are_neither_read_nor_written_before_it_was_waited_for(
    model: Any, layout: Layout, prefix: int
) -> None:
    ids, pool = tokens(11), make_pool(layout)
    load = LandsWhenWaitedFor(host_with(model, ids[:, :prefix], [7, 1]), pool, [7, 1])

    ours = logits_of(model, ids[:, prefix:], PagedCache(pool, [7, 1, 4], num_tokens=prefix, loads=[load]), chunks=2)

    assert_same_logits(ours, logits_of(model, ids)[:, prefix:])


def test_a_forward_waits_for_each_layer_of_each_load_once(model: Any) -> None:
    pool = make_pool()
    loads = [LandsWhenWaitedFor(pool, pool, []) for _ in range(2)]
    logits_of(model, tokens(5), PagedCache(pool, PAGES[0], loads=loads))
    assert [load.waits for load in loads] == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("what", ["keys", "values"])
def test_reading_a_layer_waits_for_that_layer_only(model: Any, what: str) -> None:
    ids, pool = tokens(6), make_pool()
    host = host_with(model, ids, [7, 1])
    load = LandsWhenWaitedFor(host, pool, [7, 1])
    cache = PagedCache(pool, [7, 1], num_tokens=6, loads=[load])

    read = getattr(cache.layers[2], what)

    assert torch.equal(read, getattr(PagedCache(host, [7, 1], num_tokens=6).layers[2], what))
    assert load.waits == [2]


def test_loads_set_later_are_waited_for_in_place_of_the_first() -> None:
    pool = make_pool()
    first, second = (LandsWhenWaitedFor(pool, pool, []) for _ in range(2))
    cache = PagedCache(pool, PAGES[0], loads=[first])

    cache.loads = [second]
    cache.update(states(1), states(1), 3)

    assert (first.waits, second.waits) == ([], [3])


@in_every_layout
def test_a_forward_follows_the_copies_layer_by_layer(
    model: Any, device: EmulatedDevice, make_scheduler: MakeScheduler, model_thread: Executor, layout: Layout
) -> None:
    device.hold("h2d")
    cache, _ = reload(model, make_pool(layout), make_scheduler)

    passed: SimpleQueue[int] = SimpleQueue()
    with ExitStack() as hooks:
        for layer, module in enumerate(model.model.layers):
            hooks.enter_context(module.register_forward_hook(lambda *_, layer=layer: passed.put(layer)))
        forward = model_thread.submit(logits_of, model, tokens(11)[:, 6:], cache)
        for layer in range(LAYERS):
            assert passed.empty()
            device.step("h2d")  # one operation copies a layer
            assert passed.get(timeout=TIMEOUT) == layer

    assert_same_logits(forward.result(TIMEOUT), logits_of(model, tokens(11))[:, 6:])


def test_a_failed_burst_lets_the_forward_end_and_its_handle_says_so(model: Any, make_scheduler: MakeScheduler) -> None:
    cache, handle = reload(model, make_pool(), make_scheduler, FailsAtLayer)
    logits_of(model, tokens(11)[:, 6:], cache)
    assert handle.stale


def test_after_a_failed_burst_the_same_cache_computes_again(model: Any, make_scheduler: MakeScheduler) -> None:
    cache, _ = reload(model, make_pool(), make_scheduler, FailsAtLayer)
    assert logits_of(model, tokens(11)[:, 6:], cache).isnan().all()  # half of the prefix never came

    cache.num_tokens = 0

    assert_same_logits(logits_of(model, tokens(11), cache), logits_of(model, tokens(11)))


# -- what it refuses ---------------------------------------------------------------------------------------------

SHARED = [[7, 1], [7, 2]]
# A write would broadcast sizes of 1.
WRONG_STATES: list[dict[str, Any]] = [{"batch": 2}, {"heads": 1}, {"dim": 1}, {"dtype": torch.float16}]


@pytest.mark.parametrize(
    ("page_ids", "num_tokens", "message"),
    [
        ([7, 10], 0, "from 0 to 9"),
        ([-1, 7], 0, "from 0 to 9"),
        ([7, 1, 7], 0, "twice in one sequence"),
        ([], 0, "page_ids must be"),
        ([[[7]]], 0, "page_ids must be"),
        (SHARED, 0, "tokens 0 to 7 would be written to a page that another sequence has"),
        (SHARED, 3, "tokens 3 to 7 would be written to a page that another sequence has"),
        ([[7, 1], [1, 2]], 4, "tokens 4 to 7 would be written to a page that another sequence has"),
        ([7, 1], 9, "num_tokens must be from 0 to 8"),
        ([7, 1], -1, "num_tokens must be from 0 to 8"),
    ],
)
def test_pages_that_do_not_fit_are_refused(page_ids: Any, num_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache(make_pool(), page_ids, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("page_ids", "num_tokens"),
    [([0.5, 1.5], 0), (torch.tensor([True, False]), 0), (torch.tensor([1j]), 0), ([7, 1], 2.5), ([7, 1], True)],
)
def test_numbers_that_are_not_whole_are_refused(page_ids: Any, num_tokens: Any) -> None:
    with pytest.raises(TypeError, match=r"whole numbers|must be an int"):
        PagedCache(make_pool(), page_ids, num_tokens=num_tokens)


def test_a_pool_of_one_plane_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the tokens of this one are \(1, 16\)"):
        PagedCache(Pool.mla(10, 4, LAYERS, 16, torch.float32), [7, 1])


@pytest.mark.parametrize("wrong_values", [False, True])
@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_states_of_another_shape_or_type_are_refused_and_nothing_is_written(
    wrong: dict[str, Any], wrong_values: bool
) -> None:
    keys, values = (states(3), states(3, **wrong)) if wrong_values else (states(3, **wrong), states(3))
    assert_refused(keys, values, "values" if wrong_values else "keys")


@pytest.mark.parametrize("num_values", [1, 2])
def test_values_of_other_tokens_than_the_keys_are_refused_and_nothing_is_written(num_values: int) -> None:
    assert_refused(states(3), states(num_values), "values")


def test_states_that_are_no_batch_are_refused_and_nothing_is_written() -> None:
    assert_refused(states(3)[0], states(3)[0], "keys")


def assert_refused(keys: torch.Tensor, values: torch.Tensor, wrong: str) -> None:
    pool = make_pool()
    cache, before = PagedCache(pool, [7, 1]), raw_bytes(pool)

    with pytest.raises(ValueError, match=f"layer 3: the cache takes {wrong} of shape"):
        cache.update(keys, values, 3)

    assert (raw_bytes(pool), cache.get_seq_length(3)) == (before, 0)


@pytest.mark.parametrize(
    ("page_ids", "num_tokens", "num_new", "message"),
    [([7, 1], 6, 3, "no room for 3 more tokens"), (SHARED, 3, 1, "tokens 3 to 3 would be written")],
)
def test_tokens_without_pages_of_their_own_are_refused_and_nothing_is_written(
    model: Any, page_ids: Any, num_tokens: int, num_new: int, message: str
) -> None:
    pool = make_pool()
    cache, before = PagedCache(pool, page_ids, num_tokens=4), raw_bytes(pool)
    cache.num_tokens = num_tokens  # for the shared page, back into it

    with pytest.raises(ValueError, match=message):
        logits_of(model, tokens(num_new, len(SHARED) if page_ids is SHARED else 1), cache)

    assert (raw_bytes(pool), cache.num_tokens) == (before, num_tokens)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda cache: setattr(cache, "num_tokens", -1), "num_tokens must be from 0 to 8"),
        (lambda cache: setattr(cache, "num_tokens", 9), "num_tokens must be from 0 to 8"),
        (lambda cache: cache.crop(1), "from -5 to 0"),
        (lambda cache: cache.crop(-6), "from -5 to 0"),
    ],
)
def test_a_length_that_the_pages_cannot_have_is_refused(ask: Callable[[PagedCache], None], message: str) -> None:
    cache = PagedCache(make_pool(), [7, 1], num_tokens=5)
    with pytest.raises(ValueError, match=message):
        ask(cache)
    assert cache.num_tokens == 5


@pytest.mark.parametrize(("forget", "left"), [(lambda cache: cache.crop(-3), 3), (lambda cache: cache.reset(), 0)])
def test_crop_and_reset_forget_tokens_in_every_layer_and_touch_no_page(
    model: Any, forget: Callable[[PagedCache], None], left: int
) -> None:
    pool = make_pool()
    cache = PagedCache(pool, [7, 1])
    logits_of(model, tokens(6), cache)
    before = raw_bytes(pool)

    forget(cache)

    assert (raw_bytes(pool), [cache.get_seq_length(layer) for layer in range(LAYERS)]) == (before, [left] * LAYERS)


def test_a_pool_with_fewer_layers_than_the_model_is_refused(model: Any) -> None:
    pool = Pool.mha(10, 4, LAYERS - 1, HEADS, HEAD_DIM, torch.float32)
    with pytest.raises(IndexError, match="the model has a layer 3 and the pool 3 layers"):
        logits_of(model, tokens(3), PagedCache(pool, [7, 1]))


def test_a_pool_with_more_layers_than_the_model_is_refused_at_the_next_forward(model: Any) -> None:
    cache = PagedCache(Pool.mha(10, 4, LAYERS + 1, HEADS, HEAD_DIM, torch.float32), [7, 1])
    logits_of(model, tokens(3), cache)
    with pytest.raises(HiCacheSchedError, match="the model has fewer layers than the pool"):
        logits_of(model, tokens(1), cache)


def test_a_forward_after_one_that_raised_has_to_be_told_where_to_go_on(model: Any) -> None:
    class BreaksDown:
        def wait_layer(self, layer: int) -> None:
            if layer == 2:
                raise TimeoutError

    cache = PagedCache(make_pool(), [7, 1], loads=[BreaksDown()])
    with pytest.raises(TimeoutError):
        logits_of(model, tokens(3), cache)
    cache.loads = []
    with pytest.raises(HiCacheSchedError, match="set num_tokens back"):
        logits_of(model, tokens(3), cache)
    cache.num_tokens = 0
    assert_same_logits(logits_of(model, tokens(3), cache), logits_of(model, tokens(3)))


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(IndexError, match=f"the model has a layer {layer}"):
        PagedCache(make_pool(), [7, 1]).update(states(1), states(1), layer)


def test_a_cache_that_was_made_in_inference_mode_works_outside_it() -> None:
    pool = make_pool()
    with torch.inference_mode():
        cache = PagedCache(pool, [7, 1])
    cache.update(states(3), states(3), 0)
    assert cache.num_tokens == 3


def test_page_ids_may_change_afterwards() -> None:
    page_ids = torch.tensor([7, 1])
    pool = make_pool()
    cache = PagedCache(pool, page_ids)
    page_ids += 1
    cache.update(states(3), states(3), 0)
    assert not torch.isnan(page_in(pool, pool.planes[0], 0, 7)[:3]).any()


def test_a_cache_knows_its_batch_size() -> None:
    assert PagedCache(make_pool(), PAGES).batch_size == 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: cache.offload(0),
        lambda cache: cache.prefetch(0),
        copy.copy,
        copy.deepcopy,
        lambda cache: cache.layers[0].prefetch(),
    ],
)
def test_what_would_move_pages_of_the_engine_is_refused(ask: Callable[[PagedCache], None]) -> None:
    with pytest.raises(HiCacheSchedError, match="a PagedCache cannot"):
        ask(PagedCache(make_pool(), [7, 1], num_tokens=5))

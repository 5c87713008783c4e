"""Prefixes are found where they are, evicted coldest first, and own each page once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chat_engine.memory import KvShape, Memory
from chat_engine.prefix_cache import Lease, PrefixCache
from chat_engine.prefix_index import Content, PrefixIndex
from hicache_sched.device import EmulatedDevice
from tests.chat_engine.builders import PAGE_SIZE, TOKENS_PER_NODE, prompt_of


def a_cache(device: EmulatedDevice, device_nodes: int, host_nodes: int) -> tuple[PrefixCache, Memory]:
    pages = TOKENS_PER_NODE // PAGE_SIZE
    memory = Memory(KvShape(2, 1, 2, torch.float32), PAGE_SIZE, device_nodes * pages, host_nodes * pages, device)
    return PrefixCache(memory, TOKENS_PER_NODE), memory


def compute(lease: Lease) -> None:
    """What the model does."""
    for node in lease.nodes:
        node.content = Content.READY


def acquire(cache: PrefixCache, seed: int, num_nodes: int) -> Lease:
    """A request for that many nodes and a page of its own."""
    lease = cache.acquire(prompt_of(seed, num_nodes * TOKENS_PER_NODE + 1), 1)
    assert lease is not None
    return lease


def push(cache: PrefixCache, num_nodes: int) -> None:
    """A request that comes and goes before anything is computed: all it leaves is the room it made."""
    cache.release(acquire(cache, 1000, num_nodes))


def use(cache: PrefixCache, seed: int, num_nodes: int) -> Lease:
    """A request that comes, is computed and goes."""
    lease = acquire(cache, seed, num_nodes)
    compute(lease)
    cache.release(lease)
    return lease


# -- the index ------------------------------------------------------------------------------------------------------


def test_prompts_share_the_keys_of_their_common_prefix() -> None:
    index = PrefixIndex(TOKENS_PER_NODE)
    one, other = (index.keys_of(prompt_of(1, 20) + prompt_of(seed, 20)) for seed in (2, 3))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_the_same_tokens_behind_other_tokens_are_another_node() -> None:
    keys = PrefixIndex(TOKENS_PER_NODE).keys_of([5] * 25)
    assert len(set(keys)) == 3


@pytest.mark.parametrize(("num_tokens", "num_nodes"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_the_last_token_is_in_no_node(num_tokens: int, num_nodes: int) -> None:
    assert len(PrefixIndex(TOKENS_PER_NODE).keys_of(prompt_of(1, num_tokens))) == num_nodes


# -- leases ---------------------------------------------------------------------------------------------------------


def test_pages_of_a_lease_hold_the_prompt_and_the_reply(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 8, 0)
    lease = cache.acquire(prompt_of(1, 19), 6)
    assert lease is not None
    assert len(set(lease.page_ids)) == len(lease.page_ids) == -(-(19 + 6) // PAGE_SIZE)


def test_a_request_for_which_there_is_no_room_changes_nothing(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 4, 4)
    use(cache, 1, 2)
    held = cache.acquire(prompt_of(2, 2 * TOKENS_PER_NODE), 1)
    before = [(node.id, node.device_pages, node.host_pages, node.users) for node in cache.index]
    assert cache.acquire(prompt_of(3, 3 * TOKENS_PER_NODE), 1) is None
    assert [(node.id, node.device_pages, node.host_pages, node.users) for node in cache.index] == before
    assert held is not None


def test_what_is_shared_with_a_request_under_way_takes_no_room(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 4, 0)
    first, second = (acquire(cache, 1, 2) for _ in range(2))  # two times two nodes and a page would not fit
    assert first.nodes == second.nodes
    assert not set(first.own_pages) & set(second.own_pages)


def test_a_node_nobody_computed_is_forgotten_with_its_last_user(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 8, 8)
    lease = cache.acquire(prompt_of(1, 20), 1)
    assert lease is not None
    cache.release(lease)
    assert len(cache.index) == 0
    assert cache.leaks() == []


# -- eviction -------------------------------------------------------------------------------------------------------


def test_the_coldest_prefix_is_evicted_from_its_end(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 6, 6)
    cold, warm = use(cache, 1, 2), use(cache, 2, 2)
    use(cache, 3, 2)
    assert [node.device_pages is None for node in cold.nodes + warm.nodes] == [False, True, False, False]


def test_what_is_used_again_is_warm_again(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 6, 6)
    first, second = use(cache, 1, 2), use(cache, 2, 2)
    use(cache, 1, 2)
    use(cache, 3, 2)
    assert [node.device_pages is None for node in first.nodes + second.nodes] == [False, False, False, True]


def test_evicted_bytes_are_on_the_host_and_have_to_be_loaded(device: EmulatedDevice) -> None:
    cache, memory = a_cache(device, 3, 8)
    lease = acquire(cache, 1, 2)
    compute(lease)
    for plane in memory.device_pool.planes:
        plane.normal_()
    before = [memory.read(node.device_pages or []) for node in lease.nodes]
    cache.release(lease)
    use(cache, 2, 2)
    memory.evict_stream.synchronize()
    assert memory.host_pool is not None
    for node, planes in zip(lease.nodes, before, strict=True):
        for plane, host in zip(planes, memory.host_pool.planes, strict=True):
            assert torch.equal(host[node.host_pages].transpose(0, 1), plane)
    assert acquire(cache, 1, 2).to_load == lease.nodes


def test_what_is_on_the_host_already_is_not_copied_again(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, memory = a_cache(device, 3, 8)
    num_copied = []
    monkeypatch.setattr(memory, "copy_to_host", lambda device_pages, host_pages: num_copied.append(len(host_pages)))
    for seed in (1, 2, 1, 2):
        use(cache, seed, 2)
    pages_per_prefix = 2 * TOKENS_PER_NODE // PAGE_SIZE
    assert num_copied == [pages_per_prefix, pages_per_prefix], "once each"


def test_a_full_host_forgets_its_coldest(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 3, 2)
    first = use(cache, 1, 2)
    second = use(cache, 2, 2)
    use(cache, 3, 2)
    known = cache.index.find(cache.index.keys_of(prompt_of(1, 2 * TOKENS_PER_NODE + 1)))
    assert known == []
    assert [node.host_pages is None for node in first.nodes + second.nodes] == [True, True, False, False]


def test_what_comes_before_a_node_on_the_device_is_not_forgotten_by_a_full_host(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 8, 3)
    two_cold = [acquire(cache, seed, 1) for seed in (2, 3)]
    for lease in two_cold:
        compute(lease)
    use(cache, 1, 3)
    push(cache, 4)  # of which all three nodes go to the host, and fill it
    for lease in two_cold:
        cache.release(lease)

    # Two of the three fail to load for one request, while the third is loaded for another.
    first, second = acquire(cache, 1, 2), acquire(cache, 1, 3)
    for node in first.to_load:
        node.content = Content.MISSING
    for node in second.to_load:
        node.content = Content.READY
    cache.release(first)
    cache.release(second)
    assert [node.device_pages is None for node in second.nodes] == [True, True, False]

    push(cache, 5)  # the first cold one goes to the host, where the third node gives way
    use(cache, 2, 1)  # which makes the cold one a warm one
    push(cache, 5)  # the second cold one
    assert cache.index.find(cache.index.keys_of(prompt_of(1, 3 * TOKENS_PER_NODE + 1))) == second.nodes
    assert cache.leaks() == []


def test_without_a_host_pool_the_evicted_is_forgotten(device: EmulatedDevice) -> None:
    cache, _ = a_cache(device, 3, 0)
    use(cache, 1, 2)
    second = use(cache, 2, 2)
    assert set(cache.index) == set(second.nodes)


def test_nodes_are_whole_pages(device: EmulatedDevice) -> None:
    _, memory = a_cache(device, 3, 0)
    with pytest.raises(ValueError, match="multiple of the page size"):
        PrefixCache(memory, PAGE_SIZE + 1)


# -- any course of events -------------------------------------------------------------------------------------------


class AnyCourse(RuleBasedStateMachine):
    """Requests and reloads that come and go, in any order and with any outcome, leave every page with one owner."""

    @initialize(device_nodes=st.integers(3, 8), host_nodes=st.integers(0, 6))
    def start(self, device_nodes: int, host_nodes: int) -> None:
        self.device = EmulatedDevice()
        self.cache, self.memory = a_cache(self.device, device_nodes, host_nodes)
        self.leases: list[Lease] = []
        self.reloads: list[Lease] = []

    @rule(seed=st.integers(0, 2), num_tokens=st.integers(1, 40), other=st.integers(0, 3))
    def acquire(self, seed: int, num_tokens: int, other: int) -> None:
        lease = self.cache.acquire(prompt_of(seed, num_tokens) + prompt_of(other, 9), 2)
        if lease is not None:
            self.leases.append(lease)
            if lease.to_load:
                self.cache.hold(lease.nodes)
                self.reloads.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def compute_next(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        missing = [node for node in lease.nodes if node.content is Content.MISSING]
        if missing:
            missing[0].content = Content.READY

    @precondition(lambda self: self.reloads)
    @rule(data=st.data(), content=st.sampled_from([Content.READY, Content.MISSING]))
    def settle(self, data: Any, content: Content) -> None:
        lease = data.draw(st.sampled_from(self.reloads))
        self.reloads.remove(lease)
        for node in lease.to_load:
            node.content = content
        self.cache.let_go(lease.nodes)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.cache.release(lease)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        if not hasattr(self, "cache"):
            return
        owned = [page for node in self.cache.index for page in node.device_pages or ()]
        owned += [page for lease in self.leases for page in lease.own_pages]
        assert len(owned) == len(set(owned))
        for lease in self.leases:
            assert set(lease.page_ids) <= set(owned)
            assert all(node.device_pages for node in lease.nodes)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lease in self.reloads:
            for node in lease.to_load:
                node.content = Content.READY
            self.cache.let_go(lease.nodes)
        for lease in self.leases:
            self.cache.release(lease)
        assert self.cache.leaks() == []
        self.memory.evict_stream.synchronize()
        self.device.close()


TestAnyCourse = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

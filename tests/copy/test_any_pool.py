"""Bursts between pools of any kind, checked on every byte of their memory, and of what lies between them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

from hicache_sched.pools import PoolPair
from tests.copy.any_pool import APART, MAKERS, AnyBurst, Sizes, any_bursts, fill, is_pair
from tests.copy.builders import Point, load, load_with_torch, page_op


@settings(deadline=None, max_examples=200)  # a busy machine is no failure
@given(burst=any_bursts())
def test_every_byte_named_arrives_and_no_other_changes(burst: AnyBurst, point: Point) -> None:
    expected, host_before = burst.expected_bytes(), burst.host.raw_bytes()

    load(burst.pair, burst.ops, point)

    assert burst.device.raw_bytes() == expected
    assert burst.host.raw_bytes() == host_before


@settings(deadline=None, max_examples=100)
@given(burst=any_bursts())
def test_the_torch_submitter_moves_the_same_bytes(burst: AnyBurst, point: Point) -> None:
    expected = burst.expected_bytes()

    load_with_torch(burst.pair, burst.ops, point.device)

    assert burst.device.raw_bytes() == expected


PAIRS = [(host, device) for host, device in itertools.product(MAKERS, MAKERS) if is_pair(host, device)]


@pytest.mark.parametrize(("host", "device"), PAIRS)
def test_every_kind_of_pool_is_loaded_into_every_other(host: str, device: str, point: Point) -> None:
    sizes = Sizes(planes=(6, 4), page_size=4, num_layers=2, dtype=torch.float16)
    on_host, on_device = fill(MAKERS[host](sizes, 5), 1), fill(MAKERS[device](sizes, 6), 2)
    ops = [page_op(1, [3, 0], [5, 1]), page_op(2, [3], [2])]
    burst = AnyBurst(PoolPair("kv", on_host.pool, on_device.pool), on_host, on_device, ops)
    expected = burst.expected_bytes()

    load(burst.pair, ops, point)

    assert on_device.raw_bytes() == expected


@pytest.mark.parametrize(("pages", "tokens"), APART)
def test_pages_that_lie_apart_are_no_pair_with_tokens_that_do(pages: str, tokens: str) -> None:
    sizes = Sizes(planes=(6, 4), page_size=4, num_layers=2, dtype=torch.float16)
    with_pages, with_tokens = (MAKERS[kind](sizes, 5).pool for kind in (pages, tokens))

    with pytest.raises(ValueError, match="those of the host pool would have to be copied one by one"):
        PoolPair("kv", with_pages, with_tokens)
    with pytest.raises(ValueError, match="those of the device pool would have to be copied one by one"):
        PoolPair("kv", with_tokens, with_pages)

"""Bursts between pools of any kind, checked on every byte of their memory, and of what lies between them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

from hicache_sched.pools import PoolPair
from tests.copy.any_pool import MAKERS, AnyBurst, Sizes, any_bursts, fill
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


@pytest.mark.parametrize(("host", "device"), list(itertools.product(MAKERS, MAKERS)))
def test_every_kind_of_pool_is_loaded_into_every_other(host: str, device: str, point: Point) -> None:
    sizes = Sizes(planes=(6, 4), page_size=4, num_layers=2, dtype=torch.float16)
    on_host, on_device = fill(MAKERS[host](sizes, 5), 1), fill(MAKERS[device](sizes, 6), 2)
    ops = [page_op(1, [3, 0], [5, 1]), page_op(2, [3], [2])]
    burst = AnyBurst(PoolPair("kv", on_host.pool, on_device.pool), on_host, on_device, ops)
    expected = burst.expected_bytes()

    load(burst.pair, ops, point)

    assert on_device.raw_bytes() == expected


def test_planes_of_odd_sizes_are_staged_one_behind_the_other(point: Point) -> None:
    sizes = Sizes(planes=(6, 4, 10), page_size=1, num_layers=1, dtype=torch.uint8)
    on_host, on_device = fill(MAKERS["wrapped layers"](sizes, 3), 1), fill(MAKERS["wrapped layers"](sizes, 4), 2)
    ops = [page_op(1, [0, 2, 0], [0, 3, 1], page_size=1)]
    burst = AnyBurst(PoolPair("kv", on_host.pool, on_device.pool), on_host, on_device, ops)
    expected = burst.expected_bytes()

    load_with_torch(burst.pair, ops, point.device)

    assert on_device.raw_bytes() == expected

"""Small pools, page lists and load ops for the tests of the copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from hicache_sched.copy.merge import merge_ops
from hicache_sched.copy.plan import CopyPlan
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.copy.pooled import PooledBackend
from hicache_sched.copy.staged import StagedSubmitter
from hicache_sched.copy.submit import BurstCopies
from hicache_sched.device.binding import DeviceBinding
from hicache_sched.load_op import LoadOp
from hicache_sched.pools import Layout, Pool, PoolPair

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first_direct")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def make_pair(
    *,
    host_pages: int = 8,
    device_pages: int = 8,
    page_size: int = 4,
    num_layers: int = 2,
    num_heads: int = 1,
    head_dim: int = 4,
    dtype: torch.dtype = torch.float16,
    host_layout: Layout = "page_first_direct",
    device_layout: Layout = "layer_first",
    device: str = "cpu",
    seed: int = 0,
) -> PoolPair:
    """A pair "kv" whose pools are full of random bytes."""
    pair = PoolPair(
        "kv",
        Pool.mha(host_pages, page_size, num_layers, num_heads, head_dim, dtype, layout=host_layout),
        Pool.mha(device_pages, page_size, num_layers, num_heads, head_dim, dtype, layout=device_layout, device=device),
    )
    rng = np.random.default_rng(seed)
    for plane in (*pair.host.planes, *pair.device.planes):
        raw = plane.view(torch.uint8)
        raw.copy_(torch.from_numpy(rng.integers(0, 256, raw.shape, dtype=np.uint8)))
    return pair


def tokens_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """Indices of all tokens of `pages`."""
    firsts = torch.tensor(pages, dtype=torch.int64) * page_size
    return (firsts[:, None] + torch.arange(page_size)).reshape(-1)


def page_op(node_id: int, host_pages: Sequence[int], device_pages: Sequence[int], page_size: int = 4) -> LoadOp:
    return LoadOp(node_id, tokens_of(host_pages, page_size), tokens_of(device_pages, page_size))


def token_op(node_id: int, host: Sequence[int], device: Sequence[int]) -> LoadOp:
    return LoadOp(node_id, torch.tensor(host, dtype=torch.int64), torch.tensor(device, dtype=torch.int64))


def token_in(plane: torch.Tensor, layer: int, token: int, page_size: int) -> torch.Tensor:
    """One token of a plane, [num_heads, head_dim], found by the documented shape of its layout."""
    page, offset = divmod(token, page_size)
    return plane[layer, token] if plane.dim() == 4 else plane[page, layer, offset]


def raw_bytes(pool: Pool) -> bytes:
    return _raw(pool.planes)


def expected_bytes(pair: PoolPair, ops: Sequence[LoadOp], layers: Sequence[int] | None = None) -> bytes:
    """What the device pool holds once `ops` have landed (in `layers`), made token by token."""
    planes = [plane.to("cpu", copy=True) for plane in pair.device.planes]
    # Of "page_first" layers come second; there are other numbers of layers and tokens here.
    host_planes = [
        plane.transpose(0, 1) if plane.dim() == 4 and len(plane) != pair.num_layers else plane
        for plane in pair.host.planes
    ]
    page_size = pair.device.page_size
    for plane, host_plane in zip(planes, host_planes, strict=True):
        for layer in range(pair.num_layers) if layers is None else layers:
            for op in ops:
                for src, dst in zip(op.host_indices.tolist(), op.device_indices.tolist(), strict=True):
                    token_in(plane, layer, dst, page_size).copy_(token_in(host_plane, layer, src, page_size))
    return _raw(planes)


def _raw(planes: Sequence[torch.Tensor]) -> bytes:
    return b"".join(plane.view(torch.uint8).cpu().numpy().tobytes() for plane in planes)


@dataclass
class Point:
    """A scheduler, as far as `bind` looks at one."""

    device: DeviceBinding

    def __post_init__(self) -> None:
        self.runtime: Any = self.device.runtime
        self.h2d_stream: Any = self.device.new_stream()
        self.index_stream: Any = self.device.new_stream()


def bound(pair: PoolPair, point: Point) -> PooledBackend:
    backend = PooledBackend([pair])
    backend.bind(point)
    return backend


def move(backend: PooledBackend, ops: Sequence[LoadOp], layers: Sequence[int], point: Point) -> None:
    """Move some layers of a burst as a scheduler does."""
    backend.bind(point)
    with point.runtime.stream(point.index_stream):
        prepared = backend.prepare(ops)
    with point.runtime.stream(point.h2d_stream):
        for layer in layers:
            backend.enqueue_layer(prepared, layer)
    point.h2d_stream.synchronize()
    backend.finish(prepared)


def load(pair: PoolPair, ops: Sequence[LoadOp], point: Point) -> None:
    """Move a burst of one pair as a scheduler does."""
    move(PooledBackend([pair]), ops, range(pair.num_layers), point)


def plan_of(pair: PoolPair, ops: Sequence[LoadOp], device: DeviceBinding) -> CopyPlan:
    """The plan of a burst of one pair."""
    return BurstPlanner([pair], [range(pair.num_layers)]).plan(merge_ops(ops, device, [pair.name]))


def staged(pair: PoolPair, ops: Sequence[LoadOp], device: DeviceBinding) -> BurstCopies:
    """A burst of one pair that is made with torch calls."""
    submitter = StagedSubmitter([pair], [range(pair.num_layers)], device, "it is tested")
    return submitter.begin(plan_of(pair, ops, device))


def load_with_torch(pair: PoolPair, ops: Sequence[LoadOp], device: DeviceBinding) -> None:
    """Move a burst with the torch submitter, whose calls are done at once on CPU tensors."""
    copies = staged(pair, ops, device)
    for layer in range(pair.num_layers):
        copies.submit_layer(layer)
    copies.release()


class Burst(NamedTuple):
    pair: PoolPair
    ops: list[LoadOp]


@st.composite
def bursts(draw: st.DrawFn) -> Burst:
    """Any pair of pools and any valid burst between them."""
    page_size = draw(st.sampled_from((1, 2, 4)))
    pair = make_pair(
        host_pages=draw(st.integers(1, 12)),
        device_pages=draw(st.integers(1, 12)),
        page_size=page_size,
        num_layers=draw(st.integers(1, 3)),
        num_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from((1, 3, 4))),
        dtype=draw(st.sampled_from(DTYPES)),
        host_layout=draw(st.sampled_from(LAYOUTS)),
        device_layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 99)),
    )
    device_pages = draw(page_lists(pair.device.num_rows))
    num_pages = len(device_pages)
    repeated = st.lists(st.integers(0, pair.host.num_rows - 1), min_size=num_pages, max_size=num_pages)
    host_pages = draw(
        page_lists(pair.host.num_rows, num_pages) | repeated if num_pages <= pair.host.num_rows else repeated
    )
    cuts = sorted(draw(st.sets(st.integers(1, num_pages - 1), max_size=3))) if num_pages > 1 else []
    ops = [
        page_op(node_id, host_pages[start:end], device_pages[start:end], page_size)
        for node_id, (start, end) in enumerate(zip([0, *cuts], [*cuts, num_pages], strict=True))
    ]
    return Burst(pair, ops)


@st.composite
def page_lists(draw: st.DrawFn, pool_pages: int, num_pages: int | None = None) -> list[int]:
    """Different pages of a pool: one, some or all of them, in a run or shuffled."""
    if num_pages is None:
        num_pages = draw(st.sampled_from((1, pool_pages)) | st.integers(1, pool_pages))
    first = draw(st.integers(0, pool_pages - num_pages))
    run = list(range(first, first + num_pages))
    return draw(st.just(run) | st.permutations(range(pool_pages)).map(lambda pages: list(pages[:num_pages])))

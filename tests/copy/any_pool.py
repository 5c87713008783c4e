"""Every kind of pool in every layout, with an account of where its tokens are that knows nothing of geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from hicache_sched.load_op import LoadOp, PoolTransfer
from hicache_sched.pools import Layout, Pool, PoolPair
from tests.copy.builders import page_lists, page_op

TokenIn = Callable[[int, int, int], torch.Tensor]
"""Plane, layer and token to the token's elements, a view."""


class AnyPool(NamedTuple):
    """A pool whose memory is full of random bytes.

    Attributes:
        pool: under test.
        token: where a token is.
        memory: the tensors that hold the pool, and whatever else is in them.
    """

    pool: Pool
    token: TokenIn
    memory: Sequence[torch.Tensor]

    def raw_bytes(self) -> bytes:
        """Everything in the tensors, also what is no part of the pool."""
        return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in self.memory)


@dataclass(frozen=True)
class Sizes:
    """What two pools of a pair have in common.

    Attributes:
        planes: elements of a token, per plane.
    """

    planes: tuple[int, ...]
    page_size: int
    num_layers: int
    dtype: torch.dtype


Maker = Callable[[Sizes, int], AnyPool]
"""Sizes and a number of pages to a pool."""


def allocated(layout: Layout) -> Maker:
    def make(sizes: Sizes, num_pages: int) -> AnyPool:
        page_size, layers, dtype = sizes.page_size, sizes.num_layers, sizes.dtype
        if len(sizes.planes) == 2:
            k, v = sizes.planes
            pool = Pool.mha(num_pages, page_size, layers, 2, k // 2, dtype, v_head_dim=v // 2, layout=layout)
        elif dtype is torch.uint8 and page_size == 1:
            pool = Pool.state(num_pages, layers, sizes.planes[0], layout=layout)
        else:
            pool = Pool.mla(num_pages, page_size, layers, sizes.planes[0], dtype, layout=layout)

        def token(plane: int, layer: int, token: int) -> torch.Tensor:
            tensor = pool.planes[plane]
            if layout == "layer_first":
                return tensor[layer, token]
            if layout == "page_first":
                return tensor[token, layer]
            return tensor[token // page_size, layer, token % page_size]

        return AnyPool(pool, token, pool.planes)

    return make


def wrapped_layers(sizes: Sizes, num_pages: int) -> AnyPool:
    """A tensor per plane and layer, none of them at the start of its storage."""
    num_tokens = num_pages * sizes.page_size
    planes = [
        [
            torch.zeros(num_tokens * elements + 1, dtype=sizes.dtype)[1:].view(num_tokens, elements)
            for _ in range(sizes.num_layers)
        ]
        for elements in sizes.planes
    ]
    pool = Pool.wrap(planes, sizes.page_size)
    return AnyPool(
        pool, lambda plane, layer, token: planes[plane][layer][token], [layer for plane in planes for layer in plane]
    )


def alternating_tokens(sizes: Sizes, num_pages: int) -> AnyPool:
    """All planes of a token behind each other in one tensor, and something else behind them."""
    ends = np.cumsum(sizes.planes).tolist()
    tensor = torch.zeros(sizes.num_layers, num_pages * sizes.page_size, ends[-1] + 3, dtype=sizes.dtype)
    planes = [tensor[..., end - elements : end] for end, elements in zip(ends, sizes.planes, strict=True)]
    pool = Pool.wrap(planes, sizes.page_size)
    return AnyPool(pool, lambda plane, layer, token: planes[plane][layer, token], [tensor])


def alternating_pages(sizes: Sizes, num_pages: int) -> AnyPool:
    """All planes of a page behind each other in one tensor, and something else behind them."""
    ends = (np.cumsum(sizes.planes) * sizes.page_size).tolist()
    tensor = torch.zeros(sizes.num_layers, num_pages, ends[-1] + 3, dtype=sizes.dtype)
    planes = [
        tensor[..., end - elements * sizes.page_size : end].unflatten(-1, (sizes.page_size, elements))
        for end, elements in zip(ends, sizes.planes, strict=True)
    ]
    pool = Pool.wrap(planes, sizes.page_size, paged=True)
    return AnyPool(
        pool,
        lambda plane, layer, token: planes[plane][layer, token // sizes.page_size, token % sizes.page_size],
        [tensor],
    )


MAKERS: dict[str, Maker] = {
    "layer_first": allocated("layer_first"),
    "page_first": allocated("page_first"),
    "page_first_direct": allocated("page_first_direct"),
    "wrapped layers": wrapped_layers,
    "alternating tokens": alternating_tokens,
    "alternating pages": alternating_pages,
}


class AnyBurst(NamedTuple):
    pair: PoolPair
    host: AnyPool
    device: AnyPool
    ops: list[LoadOp]

    def expected_bytes(self) -> bytes:
        """What the device's memory holds once the burst has landed."""
        return bytes_after(self.host, self.device, self.ops, range(self.pair.num_layers))


def bytes_after(
    host: AnyPool, device: AnyPool, transfers: Sequence[LoadOp | PoolTransfer], layers: Sequence[int]
) -> bytes:
    """What the device's memory holds once `transfers` have landed in `layers`, made token by token and undone."""
    before = [tensor.clone() for tensor in device.memory]
    for transfer in transfers:
        for source, to in zip(transfer.host_indices.tolist(), transfer.device_indices.tolist(), strict=True):
            for plane in range(len(device.pool.geometry)):
                for layer in layers:
                    token = host.token(plane, layer, source)
                    device.token(plane, layer, to).view(-1).copy_(token.reshape(-1))
    after = device.raw_bytes()
    for tensor, old in zip(device.memory, before, strict=True):
        tensor.copy_(old)
    return after


def fill(pool: AnyPool, seed: int) -> AnyPool:
    rng = np.random.default_rng(seed)
    for tensor in pool.memory:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.from_numpy(rng.integers(0, 256, raw.shape, dtype=np.uint8)))
    return pool


SIZES = st.one_of(
    st.builds(
        Sizes,
        planes=st.sampled_from([(6, 4), (8, 8), (2, 6)]),
        page_size=st.sampled_from([1, 2, 4]),
        num_layers=st.integers(1, 3),
        dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    ),
    st.builds(
        Sizes,
        planes=st.sampled_from([(5,), (8,)]),
        page_size=st.sampled_from([1, 4]),
        num_layers=st.integers(1, 3),
        dtype=st.sampled_from([torch.uint8, torch.float16]),
    ),
)


@st.composite
def any_bursts(draw: st.DrawFn) -> AnyBurst:
    """A pair of any two kinds, and a burst of some of their pages, in any order, in one or two ops."""
    sizes = draw(SIZES)
    host_kind, device_kind = draw(st.tuples(*[st.sampled_from(sorted(MAKERS))] * 2))
    host = fill(MAKERS[host_kind](sizes, draw(st.integers(1, 8))), seed=1)
    device = fill(MAKERS[device_kind](sizes, draw(st.integers(1, 8))), seed=2)
    device_pages = draw(page_lists(device.pool.num_pages))
    host_pages = draw(
        st.lists(st.integers(0, host.pool.num_pages - 1), min_size=len(device_pages), max_size=len(device_pages))
    )
    cut = draw(st.integers(0, len(device_pages) - 1))
    ops = [
        page_op(node_id, host_pages[part], device_pages[part], sizes.page_size)
        for node_id, part in enumerate((slice(0, cut), slice(cut, None)))
        if device_pages[part]
    ]
    return AnyBurst(PoolPair("kv", host.pool, device.pool), host, device, ops)

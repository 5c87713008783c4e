"""Pools and pairs: geometry that agrees with the tensors, and clear words for what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched.pools import Layout, Pool, PoolPair

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first_direct")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def small_pool(**changes: Any) -> Pool:
    arguments: dict[str, Any] = {
        "num_pages": 5,
        "page_size": 4,
        "num_layers": 3,
        "num_heads": 2,
        "head_dim": 8,
        "dtype": torch.float16,
    }
    return Pool.mha(**(arguments | changes))


@pytest.mark.parametrize(
    ("layout", "shape"), [("layer_first", (3, 20, 2, 8)), ("page_first_direct", (5, 3, 4, 2, 8))], ids=LAYOUTS
)
def test_mha_makes_k_and_v_in_the_shape_of_the_layout(layout: Layout, shape: tuple[int, ...]) -> None:
    pool = small_pool(layout=layout)

    assert [tuple(plane.shape) for plane in pool.planes] == [shape, shape]
    assert {plane.dtype for plane in pool.planes} == {torch.float16}
    assert pool.planes[0].data_ptr() != pool.planes[1].data_ptr()


def test_a_new_pool_is_zero() -> None:
    assert not any(plane.any() for plane in small_pool().planes)


@settings(deadline=None)  # a busy machine is no failure
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    page_size=st.sampled_from((1, 2, 16)),
    num_pages=st.integers(1, 5),
    num_layers=st.integers(1, 4),
    data=st.data(),
)
def test_every_token_lies_where_the_geometry_says(
    layout: Layout, dtype: torch.dtype, page_size: int, num_pages: int, num_layers: int, data: st.DataObject
) -> None:
    pool = small_pool(
        layout=layout, dtype=dtype, page_size=page_size, num_pages=num_pages, num_layers=num_layers, head_dim=3
    )
    layer = data.draw(st.integers(0, num_layers - 1))
    token = data.draw(st.integers(0, pool.num_tokens - 1))
    page, offset = divmod(token, page_size)

    for plane, geometry in zip(pool.planes, pool.geometry, strict=True):
        element = plane[layer, token] if layout == "layer_first" else plane[page, layer, offset]
        token_bytes = geometry.row_bytes // pool.tokens_per_row
        row, within = divmod(token, pool.tokens_per_row)
        assert geometry.base[layer] + row * geometry.row_stride + within * token_bytes == element.data_ptr()
        assert token_bytes == element.numel() * element.element_size()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_views_are_the_pools_own_memory(layout: Layout) -> None:
    pool = small_pool(layout=layout)
    keys = pool.geometry[0]
    assert [tuple(layer.shape) for layer in keys.layers] == [(5, keys.row_bytes)] * 3

    for layer in keys.layers:
        layer.fill_(0xFF)

    assert (pool.planes[0].view(torch.uint8) == 0xFF).all()
    assert not pool.planes[1].any()


def test_a_page_of_one_token_makes_rows_of_one_token() -> None:
    pool = small_pool(page_size=1)

    assert (pool.num_rows, pool.tokens_per_row, pool.num_tokens) == (5, 1, 5)
    assert pool.geometry[0].row_bytes == 2 * 8 * 2


def test_memory_is_pinned_by_default_exactly_where_cuda_is_present() -> None:
    assert small_pool().planes[0].is_pinned() == torch.cuda.is_available()
    assert not small_pool(pin=False).planes[0].is_pinned()


@pytest.mark.parametrize("name", ["num_pages", "page_size", "num_layers", "num_heads", "head_dim"])
def test_a_size_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        small_pool(**{name: 0})


@pytest.mark.parametrize("size", [2.0, "2", True, None])
def test_a_size_that_is_no_int_is_refused(size: object) -> None:
    with pytest.raises(TypeError, match="num_pages must be an int"):
        small_pool(num_pages=size)


def test_what_is_not_a_torch_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype"):
        small_pool(dtype="float16")


def test_an_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown layout 'page_last'.*layer_first, page_first_direct"):
        small_pool(layout="page_last")


def test_pinning_memory_of_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="only CPU memory can be pinned"):
        small_pool(device="meta", pin=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is present, so memory can be pinned")
def test_pinning_without_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match="pin=True needs CUDA"):
        small_pool(pin=True)


def test_a_pair_may_differ_in_layout_and_in_number_of_pages() -> None:
    pair = PoolPair("kv", small_pool(layout="page_first_direct", num_pages=9), small_pool())

    assert pair.num_layers == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 2}, "layers differ, 2 on the host and 3 on the device"),
        ({"page_size": 2}, "page size differ, 2 on the host and 4 on the device"),
        ({"num_heads": 1}, "bytes per token and plane differ"),
        ({"dtype": torch.bfloat16}, "dtype differ"),
        ({"device": "meta"}, "the host pool is on meta"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_pair_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PoolPair("kv", host=small_pool(**changes), device=small_pool())


def test_a_pair_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        PoolPair("", small_pool(), small_pool())

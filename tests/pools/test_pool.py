"""Pools and pairs: geometry that agrees with the tensors, and clear words for what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_sched.pools import Layout, Pool, PoolPair

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first", "page_first_direct")
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
    ("layout", "shape"),
    [("layer_first", (3, 20)), ("page_first", (20, 3)), ("page_first_direct", (5, 3, 4))],
    ids=LAYOUTS,
)
def test_every_constructor_makes_planes_in_the_shape_of_the_layout(layout: Layout, shape: tuple[int, ...]) -> None:
    mha, mla = small_pool(layout=layout, v_head_dim=3), Pool.mla(5, 4, 3, 7, torch.bfloat16, layout=layout)

    assert [tuple(plane.shape) for plane in mha.planes] == [(*shape, 2, 8), (*shape, 2, 3)]
    assert [tuple(plane.shape) for plane in mla.planes] == [(*shape, 1, 7)]
    assert {plane.dtype for plane in mha.planes} == {torch.float16}
    assert mha.planes[0].data_ptr() != mha.planes[1].data_ptr()
    assert (mha.token_shapes, mla.token_shapes) == (((2, 8), (2, 3)), ((1, 7),))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("layer_first", (3, 5, 40)), ("page_first", (5, 3, 40)), ("page_first_direct", (5, 3, 1, 40))],
    ids=LAYOUTS,
)
def test_a_state_is_one_row_of_bytes_in_each_layer(layout: Layout, shape: tuple[int, ...]) -> None:
    pool = Pool.state(5, 3, 40, layout=layout)

    assert [tuple(plane.shape) for plane in pool.planes] == [shape]
    assert (pool.dtype, pool.page_size, pool.tokens_per_row, pool.num_rows) == (torch.uint8, 1, 1, 5)
    assert pool.geometry[0].row_bytes == 40


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
        where = {
            "layer_first": (layer, token),
            "page_first": (token, layer),
            "page_first_direct": (page, layer, offset),
        }[layout]
        element = plane[where]
        token_bytes = geometry.row_bytes // pool.tokens_per_row
        row, within = divmod(token, pool.tokens_per_row)
        assert geometry.base[layer] + row * geometry.row_stride + within * token_bytes == element.data_ptr()
        assert token_bytes == element.numel() * element.element_size()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_views_are_the_pools_own_memory(layout: Layout) -> None:
    pool = small_pool(layout=layout)
    keys = pool.geometry[0]
    assert [tuple(layer.shape) for layer in keys.layers] == [(pool.num_rows, keys.row_bytes)] * 3
    assert pool.num_pages == 5

    for layer in keys.layers:
        layer.fill_(0xFF)

    assert (pool.planes[0].view(torch.uint8) == 0xFF).all()
    assert not pool.planes[1].any()


def test_a_page_of_one_token_makes_rows_of_one_token() -> None:
    pool = small_pool(page_size=1)

    assert (pool.num_rows, pool.tokens_per_row, pool.num_tokens) == (5, 1, 5)
    assert pool.geometry[0].row_bytes == 2 * 8 * 2


def test_a_wrapped_pool_is_the_engines_memory() -> None:
    tensor = torch.zeros(3, 20, 2, 8)  # [num_layers, num_tokens, K and V, elements]
    pool = Pool.wrap([tensor[:, :, 0], tensor[:, :, 1]], page_size=4)

    for layer in pool.geometry[1].layers:
        layer.fill_(0xFF)

    assert not tensor[:, :, 0].any()
    assert (tensor[:, :, 1].view(torch.uint8) == 0xFF).all()
    assert (pool.num_layers, pool.num_tokens, pool.num_pages, pool.tokens_per_row) == (3, 20, 5, 1)
    assert pool.token_shapes == ((8,), (8,))


def test_tokens_that_lie_side_by_side_make_rows_of_pages() -> None:
    assert Pool.wrap([torch.zeros(3, 20, 8)], page_size=4).tokens_per_row == 4
    assert Pool.wrap([[torch.zeros(20, 8) for _ in range(3)]], page_size=4).num_layers == 3


def test_pages_can_lie_apart_where_they_are_given_as_pages() -> None:
    tensor = torch.zeros(5, 2, 4, 8)  # [num_pages, K and V, page_size, elements], one layer
    pool = Pool.wrap([[tensor[:, 0]], [tensor[:, 1]]], page_size=4, paged=True)

    assert (pool.num_layers, pool.num_tokens, pool.tokens_per_row) == (1, 20, 4)
    assert [plane.row_stride for plane in pool.geometry] == [2 * 4 * 8 * 4] * 2
    assert [plane.row_bytes for plane in pool.geometry] == [4 * 8 * 4] * 2


@pytest.mark.parametrize(
    ("planes", "options", "words"),
    [
        ([], {}, r"a pool needs a plane, and for each of its layers a tensor \[num_tokens, \.\.\.\]"),
        ([torch.zeros(3, 20)], {}, "a pool needs a plane"),
        ([torch.zeros(3, 5, 4)], {"paged": True}, r"a tensor \[num_pages, page_size, \.\.\.\]"),
        ([torch.zeros(3, 20, 8), torch.zeros(2, 20, 8)], {}, "same number of layers; these have 2 and 3"),
        ([torch.zeros(3, 20, 8), torch.zeros(3, 16, 8)], {}, "same num_tokens"),
        ([[torch.zeros(20, 8), torch.zeros(20, 8, dtype=torch.int8)]], {}, "same dtype"),
        ([[torch.zeros(20, 8), torch.zeros(20, 8, device="meta")]], {}, "same device"),
        ([[torch.zeros(20, 8), torch.zeros(20, 9)]], {}, "same shape in plane 0"),
        ([[torch.zeros(20, 8), torch.zeros(20, 9)[:, :8]]], {}, "same strides in plane 0"),
        ([torch.zeros(3, 20, 16)[..., ::2]], {}, "plane 0: each token must lie in one piece"),
        ([torch.zeros(3, 1, 8).expand(3, 20, 8)], {}, "none on top of another"),
        ([torch.zeros(3, 5, 4, 16)[..., :8]], {"paged": True}, "plane 0: each page must lie in one piece"),
        ([torch.zeros(3, 18, 8)], {}, "not tokens in pages of 4"),
        ([torch.zeros(3, 10, 2, 8)], {"paged": True}, "not tokens in pages of 4"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_tensors_that_make_no_pool_are_refused(planes: Any, options: dict[str, bool], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pool.wrap(planes, 4, **options)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Pool.mla(5, 4, 3, 0, torch.float16), "latent_dim"),
        (lambda: Pool.state(0, 3, 40), "num_states"),
        (lambda: Pool.state(5, 3, 0), "row_bytes"),
        (lambda: Pool.wrap([torch.zeros(3, 20, 8)], 0), "page_size"),
        (lambda: small_pool(v_head_dim=0), "v_head_dim"),
    ],
)
def test_every_constructor_names_the_size_that_is_wrong(make: Callable[[], Pool], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        make()


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
    with pytest.raises(ValueError, match=r"unknown layout 'page_last'.*layer_first, page_first, page_first_direct"):
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


# -- memory of its own ----------------------------------------------------------------------------------------------


def test_tokens_of_one_element_may_lie_apart() -> None:
    scales = torch.arange(12, dtype=torch.float32).view(6, 2)
    pool = Pool.wrap([[scales[:, ::2]], [scales[:, 1::2]]], page_size=2)

    assert [plane.row_bytes for plane in pool.geometry] == [4, 4]
    assert [plane.layers[0].view(torch.float32).flatten().tolist() for plane in pool.geometry] == [
        [0, 2, 4, 6, 8, 10],
        [1, 3, 5, 7, 9, 11],
    ]


MEMORY = torch.zeros(4, 8, 12)
ON_TOP: dict[str, Any] = {
    "the same layer": [[MEMORY[0], MEMORY[0]]],
    "expanded layers": [torch.zeros(1, 8, 12).expand(3, 8, 12)],
    "the same plane": [MEMORY, MEMORY],
    "half a row apart": [[MEMORY.flatten()[:96].view(8, 12), MEMORY.flatten()[6:102].view(8, 12)]],
    "half a token": [MEMORY[..., :8], MEMORY[..., 6:]],
    "other strides": [[MEMORY[0]], [MEMORY.flatten()[90:122].view(8, 4)]],
    "into the next row": [[MEMORY[0, :, :8]], [MEMORY.flatten()[10:106].view(8, 12)[:, :8]]],
}


@pytest.mark.parametrize("planes", ON_TOP.values(), ids=ON_TOP)
def test_planes_and_layers_on_top_of_each_other_are_refused(planes: Any) -> None:
    with pytest.raises(ValueError, match="lies on top of layer"):
        Pool.wrap(planes, page_size=1)


APART: dict[str, Any] = {
    "layers": [MEMORY],
    "alternating": [MEMORY[..., :8], MEMORY[..., 8:]],
    "tokens first": [MEMORY.transpose(0, 1)],
    "other strides": [[MEMORY[0]], [MEMORY[1].flatten()[:32].view(8, 4)]],
    "other strides, alternating": [[MEMORY[0, :4, :4]], [MEMORY[0, :, 4:8][::2]]],
}


@pytest.mark.parametrize("planes", APART.values(), ids=APART)
def test_planes_and_layers_that_only_lie_between_each_other_are_accepted(planes: Any) -> None:
    assert Pool.wrap(planes, page_size=1).num_tokens in (4, 8)


@pytest.mark.parametrize(
    ("planes", "words"),
    [
        ([torch.zeros(())], "and not one number"),
        ([[torch.zeros(4, 2, dtype=torch.complex64).conj()]], "resolve it first"),
    ],
)
def test_tensors_that_are_not_the_bytes_they_show_are_refused(planes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pool.wrap(planes, page_size=1)

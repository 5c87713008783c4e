"""A pool: geometry over memory somebody owns, and everything that copies are planned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_sched.device.cuda_driver import initialised_driver
from hicache_sched.pools.pinned import pinned_bytes

Layout: TypeAlias = Literal["layer_first", "page_first", "page_first_direct"]


@dataclass(frozen=True, slots=True, eq=False)
class PlaneGeometry:
    """Where one plane (K, V, ...) of a pool lies.

    Row `r` of layer `l` is the `row_bytes` bytes at address `base[l] + r * row_stride`.

    Attributes:
        base: int64 [num_layers], address of row 0 of each layer.
        row_stride: bytes from one row to the next.
        row_bytes: bytes of a row.
        layers: the same memory as a view per layer, each uint8 [num_rows, row_bytes].
    """

    base: NDArray[np.int64]
    row_stride: int
    row_bytes: int
    layers: tuple[torch.Tensor, ...]

    @classmethod
    def of_layers(cls, layers: Sequence[torch.Tensor]) -> PlaneGeometry:
        """Geometry of a plane given as one view [num_rows, elements per row] per layer, elements contiguous."""
        # torch gives the stride of a dimension of one element no meaning, but `view` looks at it.
        rows = tuple(
            layer.as_strided(layer.shape, (layer.stride(0), 1), layer.storage_offset()).view(torch.uint8)
            for layer in layers
        )
        base = np.array([layer.data_ptr() for layer in rows], dtype=np.int64)
        return cls(base=base, row_stride=rows[0].stride(0), row_bytes=rows[0].shape[1], layers=rows)

    @property
    def extent(self) -> int:
        """Bytes from `base[l]` to the end of the last row of layer `l`."""
        return (len(self.layers[0]) - 1) * self.row_stride + self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Geometry of a pool; made by one of the constructors below, never changed afterwards.

    A token's index is `page * page_size + offset`. A pool holds its tensors, so its memory lives as long as it.

    A layout is the order of the dimensions of a plane, as in SGLang's HiCache: `layer_first` is [num_layers,
    num_tokens, ...], `page_first` [num_tokens, num_layers, ...], `page_first_direct` [num_pages, num_layers,
    page_size, ...], each followed by the shape of a token. A row, which is what copies move, is a page where the
    layout keeps a page of a layer together, and else a token.

    Attributes:
        planes: the tensors, one per plane (K, then V), shaped as the layout says; of a wrapped pool as they were given,
            those of one plane and several layers one after the other.
        geometry: the same planes as addresses and strides.
        token_shapes: shape of a token, per plane.
        num_layers: layers of the pool.
        num_rows: rows of each plane and layer.
        tokens_per_row: tokens of a row.
        page_size: tokens of a page.
        dtype: element type of the planes.
        device: where the planes are.
    """

    planes: tuple[torch.Tensor, ...]
    geometry: tuple[PlaneGeometry, ...]
    token_shapes: tuple[tuple[int, ...], ...]
    num_layers: int
    num_rows: int
    tokens_per_row: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.tokens_per_row

    @property
    def num_pages(self) -> int:
        return self.num_tokens // self.page_size

    @classmethod
    def mha(
        cls,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        v_head_dim: int | None = None,
        layout: Layout = "layer_first",
        device: str | torch.device = "cpu",
        pin: bool | None = None,
    ) -> Pool:
        """Allocate a zero-filled pool of multi-head attention keys and values: two planes, K and V.

        :param num_pages: pages of the pool.
        :param page_size: tokens of a page.
        :param num_layers: layers of the pool.
        :param num_heads: KV heads.
        :param head_dim: elements of a head, of V only where `v_head_dim` is None.
        :param dtype: element type.
        :param v_head_dim: elements of a head of V, where they differ from those of K.
        :param layout: see the class; the shape of a token is [num_heads, head_dim].
        :param device: where to allocate.
        :param pin: page-lock the memory, each plane by one registration; None does so for CPU memory where CUDA is
            present.
        :raises ValueError: an argument is out of range, or memory is to be pinned and there is no CUDA.
        :raises HiCacheSchedError: the memory cannot be page-locked; none of it is then.
        :raises TypeError: an argument has the wrong type.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        _check_sizes(num_heads=num_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        token_shapes = (num_heads, head_dim), (num_heads, v_head_dim)
        return cls._allocate(token_shapes, num_pages, page_size, num_layers, dtype, layout, device, pin)

    @classmethod
    def mla(
        cls,
        num_pages: int,
        page_size: int,
        num_layers: int,
        latent_dim: int,
        dtype: torch.dtype,
        *,
        layout: Layout = "layer_first",
        device: str | torch.device = "cpu",
        pin: bool | None = None,
    ) -> Pool:
        """Allocate a zero-filled pool of multi-head latent attention: one plane, the latents.

        :param latent_dim: elements of a token's latent, the part with rotary embeddings included; the shape of a token
            is [1, latent_dim].

        The other parameters and what is raised are as for `mha`.
        """
        _check_sizes(latent_dim=latent_dim)
        return cls._allocate(((1, latent_dim),), num_pages, page_size, num_layers, dtype, layout, device, pin)

    @classmethod
    def state(
        cls,
        num_states: int,
        num_layers: int,
        row_bytes: int,
        *,
        layout: Layout = "layer_first",
        device: str | torch.device = "cpu",
        pin: bool | None = None,
    ) -> Pool:
        """Allocate a zero-filled pool of opaque states, as of SSM layers: one plane of bytes, without pages.

        What is a token elsewhere is here the state of a request: load ops name states by their indices.

        :param num_states: states of the pool.
        :param num_layers: layers of the pool.
        :param row_bytes: bytes of a state in one layer; the shape of a token is [row_bytes].

        The other parameters and what is raised are as for `mha`.
        """
        _check_sizes(num_states=num_states, row_bytes=row_bytes)
        return cls._allocate(((row_bytes,),), num_states, 1, num_layers, torch.uint8, layout, device, pin)

    @classmethod
    def wrap(
        cls, planes: Sequence[torch.Tensor | Sequence[torch.Tensor]], page_size: int, *, paged: bool = False
    ) -> Pool:
        """A pool over an engine's own tensors, as they are.

        Tokens may lie apart, as when K and V alternate in one tensor, or pages may, where they are given as such; but
        by the same distance everywhere in a plane, and each in one piece.

        :param planes: for each plane a tensor [num_layers, num_tokens, ...], or one [num_tokens, ...] per layer.
        :param page_size: tokens of a page.
        :param paged: the tensors have [num_pages, page_size, ...] in place of [num_tokens, ...].
        :raises ValueError: the tensors do not fit together or the page size, or what has to be in one piece is not.
        :raises TypeError: `page_size` is not an int.
        """
        _check_sizes(page_size=page_size)
        if any(isinstance(plane, torch.Tensor) and not plane.dim() for plane in planes):
            raise ValueError("a plane is a tensor [num_layers, num_tokens, ...] or one per layer, and not one number")
        layered = [list(plane) for plane in planes]
        tensors = [layer for layers in layered for layer in layers]
        where = ["num_pages", "page_size"] if paged else ["num_tokens"]
        if not tensors or min(layer.dim() for layer in tensors) <= len(where):
            raise ValueError(f"a pool needs a plane, and for each of its layers a tensor [{', '.join(where)}, ...]")
        _check_alike("number of layers", [len(layers) for layers in layered])
        _check_alike(" and ".join(where), [tuple(layer.shape[: len(where)]) for layer in tensors])
        _check_alike("dtype", [layer.dtype for layer in tensors])
        _check_alike("device", [layer.device for layer in tensors])
        for number, layers in enumerate(layered):
            _check_alike(f"shape in plane {number}", [tuple(layer.shape) for layer in layers])
            _check_alike(f"strides in plane {number}", [layer.stride() for layer in layers])
            _check_pieces(number, "page" if paged else "token", layers[0])
        num_tokens = tensors[0].shape[: len(where)].numel()
        if (paged and tensors[0].shape[1] != page_size) or not num_tokens or num_tokens % page_size:
            raise ValueError(f"{tuple(tensors[0].shape)} are not tokens in pages of {page_size}")
        has_pages = paged or all(layers[0].stride(0) == layers[0][0].numel() for layers in layered)
        num_rows = num_tokens // page_size if has_pages else num_tokens
        geometry = tuple(PlaneGeometry.of_layers([_in_rows(layer, num_rows) for layer in layers]) for layers in layered)
        _check_apart(geometry)
        given = [[plane] if isinstance(plane, torch.Tensor) else plane for plane in planes]
        return cls(
            planes=tuple(tensor for plane in given for tensor in plane),
            geometry=geometry,
            token_shapes=tuple(tuple(layers[0].shape[len(where) :]) for layers in layered),
            num_layers=len(layered[0]),
            num_rows=num_rows,
            tokens_per_row=num_tokens // num_rows,
            page_size=page_size,
            dtype=tensors[0].dtype,
            device=tensors[0].device,
        )

    @classmethod
    def _allocate(
        cls,
        token_shapes: tuple[tuple[int, ...], ...],
        num_pages: int,
        page_size: int,
        num_layers: int,
        dtype: torch.dtype,
        layout: Layout,
        device: str | torch.device,
        pin: bool | None,
    ) -> Pool:
        _check_sizes(num_pages=num_pages, page_size=page_size, num_layers=num_layers)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, not {dtype!r}")
        if layout not in get_args(Layout):
            raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(get_args(Layout))}")
        where = torch.device(device)
        pinned = _resolve_pin(pin, where)

        dimensions, layer_dimension, tokens_per_row = {
            "layer_first": ((num_layers, num_pages * page_size), 0, page_size),
            "page_first": ((num_pages * page_size, num_layers), 1, 1),
            "page_first_direct": ((num_pages, num_layers, page_size), 1, page_size),
        }[layout]
        shapes = [(*dimensions, *token_shape) for token_shape in token_shapes]
        if pinned and torch.version.cuda is not None:
            pieces = pinned_bytes([prod(shape) * dtype.itemsize for shape in shapes], initialised_driver())
            planes = tuple(piece.view(dtype).view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        else:
            planes = tuple(torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned) for shape in shapes)
        num_rows = num_pages * page_size // tokens_per_row
        return cls(
            planes=planes,
            geometry=tuple(
                PlaneGeometry.of_layers([layer.view(num_rows, -1) for layer in plane.unbind(layer_dimension)])
                for plane in planes
            ),
            token_shapes=token_shapes,
            num_layers=num_layers,
            num_rows=num_rows,
            tokens_per_row=tokens_per_row,
            page_size=page_size,
            dtype=dtype,
            device=planes[0].device,
        )


def _in_rows(layer: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A layer, [num_rows, ...] or adjacent tokens, as [num_rows, elements per row]; a view."""
    return layer.flatten(1) if len(layer) == num_rows else layer.view(num_rows, -1)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be an int, not {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def _check_alike(what: str, values: Sequence[object]) -> None:
    if len(different := sorted(set(map(str, values)))) > 1:
        raise ValueError(f"the tensors of a pool must have the same {what}; these have {' and '.join(different)}")


def _check_pieces(plane: int, what: str, layer: torch.Tensor) -> None:
    if layer.is_conj() or layer.is_neg():
        raise ValueError(
            f"plane {plane}: a conjugate or negative view is not the bytes that it shows: resolve it first"
        )
    if not layer.numel() or not layer[0].is_contiguous() or layer.stride(0) < layer[0].numel():
        raise ValueError(
            f"plane {plane}: each {what} must lie in one piece, and none on top of another; the shape of a layer is "
            f"{tuple(layer.shape)} and its strides are {layer.stride()}"
        )


def _check_apart(planes: Sequence[PlaneGeometry]) -> None:
    """Refuse planes and layers of which one lies on top of another."""
    where = [(number, layer) for number, plane in enumerate(planes) for layer in range(len(plane.base))]
    order = np.argsort(np.concatenate([plane.base for plane in planes]), kind="stable")
    by_address = [(planes[number], number, layer) for number, layer in (where[index] for index in order)]
    for position, (plane, number, layer) in enumerate(by_address):
        for other, other_number, other_layer in by_address[position + 1 :]:
            distance = int(other.base[other_layer] - plane.base[layer])
            if distance >= plane.extent:
                break
            if _overlap(plane, other, distance):
                raise ValueError(
                    f"layer {other_layer} of plane {other_number} lies on top of layer {layer} of plane {number}; a "
                    "pool needs memory of its own for each"
                )


def _overlap(plane: PlaneGeometry, other: PlaneGeometry, distance: int) -> bool:
    """Whether rows share bytes; `other` begins `distance` behind `plane`, and before its end."""
    if plane.row_stride == other.row_stride:
        row, into_row = divmod(distance, plane.row_stride)
        begins_in_a_row = into_row < plane.row_bytes
        reaches_the_next = row + 1 < len(plane.layers[0]) and plane.row_stride - into_row < other.row_bytes
        return begins_in_a_row or reaches_the_next
    starts = np.arange(len(plane.layers[0])) * plane.row_stride
    other_starts = np.arange(len(other.layers[0])) * other.row_stride + distance
    # The rows of `plane` that each row of `other` begins behind, and ends behind.
    begins = np.searchsorted(starts, other_starts, side="right")
    ends = np.searchsorted(starts, other_starts + other.row_bytes, side="left")
    before = starts[np.maximum(begins - 1, 0)] + plane.row_bytes > other_starts
    return bool((before | (ends > begins)).any())


def _resolve_pin(pin: bool | None, device: torch.device) -> bool:
    if pin is None:
        return device.type == "cpu" and torch.cuda.is_available()
    if pin and device.type != "cpu":
        raise ValueError(f"only CPU memory can be pinned, not memory on {device}: leave pin at None")
    if pin and not torch.cuda.is_available():
        raise ValueError("pin=True needs CUDA, and there is none here: leave pin at None to pin where it is possible")
    return pin

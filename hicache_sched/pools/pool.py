"""A pool: geometry over memory somebody owns, and everything that copies are planned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

Layout: TypeAlias = Literal["layer_first", "page_first_direct"]


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
        rows = tuple(layer.view(torch.uint8) for layer in layers)
        base = np.array([layer.data_ptr() for layer in rows], dtype=np.int64)
        return cls(base=base, row_stride=rows[0].stride(0), row_bytes=rows[0].shape[1], layers=rows)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Geometry of a KV pool; made by one of the constructors below, never changed afterwards.

    A token's index is `page * page_size + offset`. A pool holds its tensors, so its memory lives as long as it.

    Attributes:
        planes: the tensors, one per plane (K, then V), shaped as the layout says.
        geometry: the same planes as addresses and strides.
        num_layers: layers of the pool.
        num_rows: rows of each plane and layer.
        tokens_per_row: tokens of a row; a row is a page.
        page_size: tokens of a page.
        dtype: element type of the planes.
        device: where the planes are.
    """

    planes: tuple[torch.Tensor, ...]
    geometry: tuple[PlaneGeometry, ...]
    num_layers: int
    num_rows: int
    tokens_per_row: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.tokens_per_row

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
        layout: Layout = "layer_first",
        device: str | torch.device = "cpu",
        pin: bool | None = None,
    ) -> Pool:
        """Allocate a zero-filled pool of multi-head attention keys and values: two planes, K and V.

        :param num_pages: pages of the pool.
        :param page_size: tokens of a page.
        :param num_layers: layers of the pool.
        :param num_heads: KV heads.
        :param head_dim: elements of a head.
        :param dtype: element type.
        :param layout: shape of each plane: `layer_first` is [num_layers, num_pages * page_size, num_heads,
            head_dim], `page_first_direct` is [num_pages, num_layers, page_size, num_heads, head_dim].
        :param device: where to allocate.
        :param pin: page-lock the memory; None does so for CPU memory where CUDA is present.
        :raises ValueError: an argument is out of range, or memory is to be pinned that cannot be.
        :raises TypeError: an argument has the wrong type.
        """
        sizes = {
            "num_pages": num_pages,
            "page_size": page_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            _check_size(name, size)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, not {dtype!r}")
        if layout not in get_args(Layout):
            raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(get_args(Layout))}")
        where = torch.device(device)

        shape: tuple[int, ...]
        if layout == "layer_first":
            shape = (num_layers, num_pages * page_size, num_heads, head_dim)
        else:
            shape = (num_pages, num_layers, page_size, num_heads, head_dim)
        pinned = _resolve_pin(pin, where)
        planes = tuple(torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned) for _ in ("k", "v"))

        if layout == "layer_first":
            rows = [plane.view(num_layers, num_pages, -1) for plane in planes]
        else:
            rows = [plane.flatten(2).transpose(0, 1) for plane in planes]
        geometry = tuple(PlaneGeometry.of_layers([plane[layer] for layer in range(num_layers)]) for plane in rows)
        return cls(
            planes=planes,
            geometry=geometry,
            num_layers=num_layers,
            num_rows=num_pages,
            tokens_per_row=page_size,
            page_size=page_size,
            dtype=dtype,
            device=planes[0].device,
        )


def _check_size(name: str, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int, not {size!r}")
    if size < 1:
        raise ValueError(f"{name} must be at least 1, not {size}")


def _resolve_pin(pin: bool | None, device: torch.device) -> bool:
    if pin is None:
        return device.type == "cpu" and torch.cuda.is_available()
    if pin and device.type != "cpu":
        raise ValueError(f"only CPU memory can be pinned, not memory on {device}: leave pin at None")
    if pin and not torch.cuda.is_available():
        raise ValueError("pin=True needs CUDA, and there is none here: leave pin at None to pin where it is possible")
    return pin

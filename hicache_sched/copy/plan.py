"""What a burst copies, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hicache_sched.errors import InvalidLoadError

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """A burst as arrays that can be executed without Python: every copy of every layer.

    A plane is one of a pool's (K, V, ...); the planes of a plan are those of all its pools, the anchor's first. Copies
    are in order of their planes, those of plane `p` from `plane_ends[p - 1]` (0 for the first) to `plane_ends[p]`, and
    the same in each layer: in transfer layer `l`, copy `i` of plane `p` moves `sizes[i]` bytes from `src_base[l, p] +
    src_offsets[i]` to `dst_base[l, p] + dst_offsets[i]`.

    All arrays are int64 and C-contiguous.

    Attributes:
        src_offsets: [num_copies], bytes; the same source may come twice.
        dst_offsets: [num_copies], bytes; no destination overlaps another, in this plane and layer or any other.
        sizes: [num_copies], bytes.
        plane_ends: [num_planes].
        src_base: [num_layers, num_planes], addresses on the host; 0 where the layer has no such plane.
        dst_base: [num_layers, num_planes], addresses on the device; 0 where the layer has no such plane.
        src_extent: [num_planes], bytes from a base on that belong to the plane and layer.
        dst_extent: [num_planes], the same on the device.
        src_stride: [num_planes], bytes from row to row, by which errors name rows.
        dst_stride: [num_planes], the same on the device.
        pools: [num_planes], which of the backend's `pool_names` a plane belongs to, ascending.
    """

    src_offsets: Int64s
    dst_offsets: Int64s
    sizes: Int64s
    plane_ends: Int64s
    src_base: Int64s
    dst_base: Int64s
    src_extent: Int64s
    dst_extent: Int64s
    src_stride: Int64s
    dst_stride: Int64s
    pools: Int64s

    @property
    def num_bytes(self) -> int:
        """Bytes that the burst moves, all planes and layers together."""
        return int((self.plane_bytes * (self.dst_base != 0)).sum())

    @property
    def plane_bytes(self) -> Int64s:
        """Bytes that the burst moves in one layer, [num_planes]."""
        until = np.append(0, np.cumsum(self.sizes))
        planes: Int64s = until[self.plane_ends] - until[np.append(0, self.plane_ends[:-1])]
        return planes

    def name_copy(self, copy: int, layer: int, pool_names: Sequence[str]) -> str:
        """A copy in words: its pool, plane, layer and rows."""
        plane = int(np.searchsorted(self.plane_ends, copy, side="right"))
        pool = int(self.pools[plane])
        number = plane - int(np.searchsorted(self.pools, pool))
        first, last = (
            (int(offset) // int(stride), (int(offset) + int(self.sizes[copy]) - 1) // int(stride))
            for offset, stride in (
                (self.dst_offsets[copy], self.dst_stride[plane]),
                (self.src_offsets[copy], self.src_stride[plane]),
            )
        )
        return (
            f"pool {pool_names[pool]!r}, plane {number}, layer {layer}, {_rows(*first)} of the device pool from "
            f"{_rows(*last)} of the host pool"
        )


def _rows(first: int, last: int) -> str:
    return f"row {first}" if first == last else f"rows {first} to {last}"


def check_plan(plan: CopyPlan, num_layers: int, num_pools: int) -> None:
    """Refuse a plan that is not what `CopyPlan` says; for plans that are not made here.

    Whether planes and layers lie apart is not looked at, as pools need not be laid out plane by plane.

    :raises InvalidLoadError: naming the array that has to change.
    """
    if not isinstance(plan, CopyPlan):
        raise InvalidLoadError(f"plan() must return a CopyPlan or None, not {plan!r}")
    for field in fields(plan):
        array = getattr(plan, field.name)
        if not isinstance(array, np.ndarray) or array.dtype != np.int64 or not array.flags.c_contiguous:
            raise InvalidLoadError(f"a plan's {field.name} must be a C-contiguous int64 array, not {_kind(array)}")
        if not array.ndim:
            raise InvalidLoadError(f"a plan's {field.name} must be an array with a dimension, not {array!r}")
    num_copies, num_planes = len(plan.sizes), len(plan.plane_ends)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("src_offsets", "dst_offsets", "sizes"), (num_copies,))
    shapes |= dict.fromkeys(("src_base", "dst_base"), (num_layers, num_planes))
    for field in fields(plan):
        array, shape = getattr(plan, field.name), shapes.get(field.name, (num_planes,))
        if array.shape != shape:
            raise InvalidLoadError(f"a plan's {field.name} must have the shape {shape}, not {array.shape}")
    ends = np.append(0, plan.plane_ends)
    if not num_planes or (np.diff(ends) < 0).any() or ends[-1] != num_copies:
        raise InvalidLoadError(
            f"a plan's plane_ends must ascend to the number of copies, {num_copies}, not {plan.plane_ends.tolist()}"
        )
    if (np.diff(plan.pools) < 0).any() or (plan.pools < 0).any() or (plan.pools >= num_pools).any():
        raise InvalidLoadError(
            f"a plan's pools must ascend within the {num_pools} pools of the backend, not {plan.pools.tolist()}"
        )
    for name in ("src_stride", "dst_stride"):
        if (getattr(plan, name) < 1).any():
            raise InvalidLoadError(f"a plan's {name} must be positive")
    if (plan.sizes < 1).any():
        raise InvalidLoadError(f"a plan's sizes must be positive: copy {np.argmin(plan.sizes)} moves no byte")
    if ((plan.src_base == 0) != (plan.dst_base == 0)).any() or (plan.src_base < 0).any() or (plan.dst_base < 0).any():
        raise InvalidLoadError("a plan's src_base and dst_base must be 0 for the same planes and layers, none negative")
    for side in ("src", "dst"):
        base, extent = getattr(plan, f"{side}_base"), getattr(plan, f"{side}_extent")
        if (extent < 0).any() or (base > np.iinfo(np.int64).max - extent).any():
            raise InvalidLoadError(f"a plan's {side}_extent must be bytes that are there, not {extent.tolist()}")
    planes = np.repeat(np.arange(num_planes), np.diff(ends))
    for side in ("src", "dst"):
        offsets, extent = getattr(plan, f"{side}_offsets"), getattr(plan, f"{side}_extent")[planes]
        # Subtracted rather than added, so that nothing overflows.
        outside = (offsets < 0) | (offsets > extent - plan.sizes)
        if outside.any():
            copy = int(np.argmax(outside))
            raise InvalidLoadError(
                f"a plan's {side}_offsets must stay within their planes: copy {copy} moves {plan.sizes[copy]} bytes "
                f"at offset {offsets[copy]} of {extent[copy]}"
            )
    order = np.lexsort((plan.dst_offsets, planes))
    starts, lasts = plan.dst_offsets[order], plan.dst_offsets[order] + plan.sizes[order]
    twice = (starts[1:] < lasts[:-1]) & (planes[order[1:]] == planes[order[:-1]])
    if twice.any():
        first, second = sorted(order[int(np.argmax(twice)) : int(np.argmax(twice)) + 2].tolist())
        raise InvalidLoadError(
            f"a plan's destinations must not overlap, as copies {first} and {second} of plane {planes[first]} do"
        )


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{'a strided' if not value.flags.c_contiguous else 'an'} array of {value.dtype}"
    return repr(value)

"""Plans in place of SGLang's own copies, for pools that are plain tensors: the native data plane makes those copies.

What SGLang copies of them, its transfers say; a plan says the same in flat arrays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache_sched.copy.merge import MergedOps
from hicache_sched.copy.plan import CopyPlan
from hicache_sched.copy.planner import BurstPlanner
from hicache_sched.errors import InvalidLoadError
from hicache_sched.pools import Pool, PoolPair

LAYOUTS = ("layer_first", "page_first_direct")
_POOLS = {"MHATokenToKVPoolHost": "MHATokenToKVPool", "MLATokenToKVPoolHost": "MLATokenToKVPool"}
_DELAY = "SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES"


@dataclass(frozen=True)
class NoPlans:
    """
    Attributes:
        reason: why bursts of a controller are not planned.
    """

    reason: str


class EnginePlans:
    """Plans bursts of a controller's pools.

    :param names: names of the pairs, the anchor's first, by the identities of their host and device pool.

    Attributes:
        pool_names: the same names.
    """

    def __init__(self, planner: BurstPlanner, names: dict[tuple[int, int], str]) -> None:
        self._planner = planner
        self._names = names
        self.pool_names = tuple(names.values())

    def plan(self, node_ids: Sequence[int], transfers: Sequence[Any]) -> CopyPlan | None:
        """What these transfers copy; None for what only SGLang can copy, or does not check as a plan is checked.

        :param node_ids: the burst's.
        :param transfers: `L2Transfer`s; indices on the device are read in order of the current stream, which blocks.
        """
        merged: dict[str, MergedOps] = {}
        for transfer in transfers:
            name = self._names.get((id(transfer.host_pool), id(transfer.device_pool)))
            if name is None or name in merged or transfer.is_draft:
                return None
            host, device = _numbers(transfer.host_indices), _numbers(transfer.device_indices)
            if host.shape != device.shape:
                return None
            ends = np.array([len(host)], dtype=np.int64)
            merged[name] = MergedOps(tuple(node_ids[:1]), ends, host, device)
        if not merged:
            return None
        try:
            return self._planner.plan(merged)
        except InvalidLoadError:  # pages that are not aligned, say; SGLang may copy them all the same
            return None


def plans_for(controller: Any) -> EnginePlans | NoPlans:
    """Plans for a controller, if all its pools are known to be plain tensors."""
    if os.environ.get(_DELAY, "0") not in ("", "0"):
        return NoPlans(f"{_DELAY} delays the copies of SGLang's transfer engine")
    num_layers = controller.transfer_layer_id_max
    pairs: list[PoolPair] = []
    layers: list[list[int | None]] = []
    names: dict[tuple[int, int], str] = {}
    for number, (name, host, device, mapper) in enumerate(_entries(controller)):
        if (reason := _why_not(name, host, device)) is not None:
            return NoPlans(reason)
        try:
            pairs.append(PoolPair(name, _host_pool(host), _device_pool(device, host.page_size)))
        except ValueError as exc:
            return NoPlans(str(exc))
        names[id(host), id(device)] = name
        last = num_layers if number == 0 else host.layer_num
        own = range(num_layers)
        layers.append([mapper(layer) if mapper is not None else layer if layer < last else None for layer in own])
    return EnginePlans(BurstPlanner(pairs, layers), names)


def _entries(controller: Any) -> list[tuple[str, Any, Any, Any]]:
    """(name, host pool, device pool, layer mapper) of each of a controller's pools, the anchor first."""
    group = controller.mem_pool_host
    if not hasattr(group, "entries"):
        return [("kv", group, controller.mem_pool_device, None)]
    entries = sorted(group.entries, key=lambda entry: entry is not group.anchor_entry)
    return [(str(entry.name.value), entry.host_pool, entry.device_pool, entry.layer_mapper) for entry in entries]


def _why_not(name: str, host: Any, device: Any) -> str | None:
    """Why a pool is not plain tensors that are copied as they are."""
    kinds = type(host).__name__, type(device).__name__
    if _POOLS.get(kinds[0]) != kinds[1]:
        return f"pool {name!r} is a {kinds[0]} over a {kinds[1]}"
    if host.layout not in LAYOUTS:
        return f"pool {name!r} has the layout {host.layout}"
    if getattr(device, "host_transfer_translate", None) is not None or getattr(host, "dcp_size", 1) > 1:
        return f"pool {name!r} translates its indices"
    if getattr(host, "_layer_shard_enabled", False) or getattr(host, "_is_dummy", False):
        return f"pool {name!r} has its layers spread over ranks"
    if getattr(host, "shared_allocation_domain", None) is not None:
        return f"pool {name!r} shares memory that is moved"
    return None


def _host_pool(host: Any) -> Pool:
    buffers = [host.k_buffer, host.v_buffer] if hasattr(host, "k_buffer") else [host.kv_buffer]
    is_paged = host.layout == "page_first_direct"
    planes = [buffer.transpose(0, 1) if is_paged else buffer for buffer in buffers]
    return Pool.wrap(planes, host.page_size, paged=is_paged)


def _device_pool(device: Any, page_size: int) -> Pool:
    planes = [device.k_buffer, device.v_buffer] if hasattr(device, "k_buffer") else [device.kv_buffer]
    return Pool.wrap(planes, page_size)


def _numbers(indices: torch.Tensor) -> Any:
    """On the host, for nobody else to write."""
    return np.array(indices.to(device="cpu", dtype=torch.int64).numpy())

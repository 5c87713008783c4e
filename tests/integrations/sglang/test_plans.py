"""Plain pools of SGLang's own are loaded by plans, whose copies are those that its transfer engine would make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry, base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hicache_sched import native
from hicache_sched.integrations.sglang import plans as sglang_plans
from hicache_sched.integrations.sglang import plugin
from tests.integrations.sglang.engine import Engine

PAGE, SIZE, LAYERS = 4, 64, 3
COMMON = {"size": SIZE, "page_size": PAGE, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}


def host_of(kind: Any, device: Any, layout: str, layers: int, **more: Any) -> Any:
    """A host pool of SGLang's for a device pool."""
    (info,) = device.get_device_pool_infos()
    return kind(
        info.buffer_info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=SIZE,
        start_layer=0,
        end_layer=layers - 1,
        **more,
    )


def mha_pools(layout: str, layers: int = LAYERS) -> tuple[Any, Any]:
    """SGLang's (host pool, device pool) of keys and values."""
    device = MHATokenToKVPool(head_num=2, head_dim=3, layer_num=layers, **COMMON)
    return host_of(MHATokenToKVPoolHost, device, layout, layers), device


def mla_pools(layout: str, layers: int = LAYERS) -> tuple[Any, Any]:
    """SGLang's (host pool, device pool) of latents."""
    device = MLATokenToKVPool(kv_lora_rank=8, qk_rope_head_dim=2, layer_num=layers, **COMMON)
    return host_of(MLATokenToKVPoolHost, device, layout, layers, target_layer_num=layers), device


KINDS: dict[str, Callable[..., tuple[Any, Any]]] = {"mha": mha_pools, "mla": mla_pools}


def layers_of(host: Any, device: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every layer of every plane, [num_tokens, ...] on the host and on the device."""
    on_host = [host.k_buffer, host.v_buffer] if hasattr(host, "k_buffer") else [host.kv_buffer]
    on_device = [device.k_buffer, device.v_buffer] if hasattr(device, "k_buffer") else [device.kv_buffer]
    made = []
    for plane, layers in zip(on_host, on_device, strict=True):
        for number, layer in enumerate(layers):
            tokens = plane[:, number].flatten(0, 1) if host.layout == "page_first_direct" else plane[number]
            made.append((tokens, layer))
    return made


def fill(host: Any, device: Any) -> None:
    for on_host, on_device in layers_of(host, device):
        on_host.copy_(torch.rand_like(on_host))
        on_device.zero_()


def loaded(host: Any, device: Any, host_tokens: torch.Tensor, device_tokens: torch.Tensor) -> bool:
    """Whether these tokens, and no others, are on the device."""
    for on_host, on_device in layers_of(host, device):
        wanted = torch.zeros_like(on_device)
        wanted[device_tokens] = on_host[host_tokens]
        if not torch.equal(wanted, on_device):
            return False
    return True


@pytest.fixture(autouse=True)
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


def controller_of(engine: Engine, entries: list[PoolEntry], layers: int = LAYERS) -> Any:
    pool = entries[0].device_pool
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE, torch.float32, "cpu", pool, need_sort=False)
    return engine._made(
        HybridCacheController(
            allocator,
            HostPoolGroup(entries),
            PAGE,
            None,
            threading.Event(),
            io_backend="direct",
            transfer_layer_id_max=layers,
        )
    )


def anchor(host: Any, device: Any) -> PoolEntry:
    return PoolEntry(PoolName.KV, host, device, lambda layer: layer, is_primary_index_anchor=True)


def finish(controller: Any) -> Any:
    slot = controller.start_loading()
    ack = controller.ack_load_queue[-1]
    ack.finish_event.synchronize()
    assert slot >= 0
    return ack


@pytest.fixture
def no_engine(async_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """SGLang's transfer engine makes no copy."""
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

    def submitted(*args: Any, **more: Any) -> None:
        raise AssertionError("submitted by SGLang's engine")

    monkeypatch.setattr(L2TransferEngine, "submit_host_to_device", submitted)
    return async_engine


@pytest.mark.parametrize("layout", sglang_plans.LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_burst_is_planned_and_loaded(no_engine: Engine, kind: str, layout: str, logs: list[Any]) -> None:
    host, device = KINDS[kind](layout)
    fill(host, device)
    controller = controller_of(no_engine, [anchor(host, device)])
    tokens = torch.cat([torch.arange(page * PAGE, page * PAGE + PAGE) for page in (7, 2, 9)])
    placed = [controller.load(part, node_id=node) for node, part in enumerate(tokens.split(2 * PAGE))]
    ack = finish(controller)
    assert loaded(host, device, tokens, torch.cat(placed))
    assert (ack.num_tokens, ack.num_tokens_by_pool, ack.node_ids) == (12, {"kv": 12}, [0, 1])
    assert ack.num_bytes == 12 * host.size_per_token
    assert "HiCache async load enqueue: copies are planned" in [entry["event"] for entry in logs]
    if native.module is not None:
        loader = plugin._started_loader(controller)
        assert loader is not None
        assert loader.scheduler.stats().plane == "native"


@pytest.mark.parametrize("sides", [True, False])
def test_side_pools_with_their_own_layers_are_planned_with_the_anchor(no_engine: Engine, sides: bool) -> None:
    host, device = mha_pools("page_first_direct")
    side_host, side_device = mla_pools("layer_first", layers=2)
    side_device.alloc = lambda count: torch.arange(SIZE - count, SIZE)
    side_device.free = lambda indices: None
    mapper = {1: 0, 4: 1}.get
    kv = PoolEntry(
        PoolName.KV, host, device, lambda layer: layer if layer < LAYERS else None, is_primary_index_anchor=True
    )
    controller = controller_of(no_engine, [kv, PoolEntry(PoolName.SWA, side_host, side_device, mapper)], layers=5)
    fill(host, device)
    fill(side_host, side_device)
    tokens, side_tokens = torch.arange(8, 16), torch.arange(20, 24)
    extra = [PoolTransfer(PoolName.SWA, host_indices=side_tokens)] if sides else None
    placed = controller.load(tokens, node_id=1, extra_pools=extra)
    ack = finish(controller)
    assert loaded(host, device, tokens, placed)
    nothing = torch.empty(0, dtype=torch.int64)
    side_placed = torch.arange(SIZE - 4, SIZE) if sides else nothing
    assert loaded(side_host, side_device, side_tokens if sides else nothing, side_placed)
    assert ack.num_tokens_by_pool == ({"kv": 8, "swa": 4} if sides else {"kv": 8})


def test_pages_that_are_not_aligned_are_left_to_sglang(async_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = mha_pools("page_first_direct")
    fill(host, device)
    controller = controller_of(async_engine, [anchor(host, device)])
    copied: list[tuple[int, list[int], list[int]]] = []

    def copy(device_pool: Any, on_host: Any, on_device: Any, layer: int, io_backend: str, **more: Any) -> None:
        copied.append((layer, on_host.tolist(), on_device.tolist()))

    monkeypatch.setattr(host, "load_to_device_per_layer", copy)
    controller.load(torch.arange(8, 12), node_id=1, device_indices=torch.arange(5, 9))
    finish(controller)
    assert copied == [(layer, [8, 9, 10, 11], [5, 6, 7, 8]) for layer in range(LAYERS)]


def why_not(engine: Engine, host: Any, device: Any) -> str:
    found = sglang_plans.plans_for(controller_of(engine, [anchor(host, device)]))
    assert isinstance(found, sglang_plans.NoPlans)
    return found.reason


def test_pools_of_another_layout_are_left_to_sglang(async_engine: Engine) -> None:
    assert why_not(async_engine, *mha_pools("page_first")) == "pool 'kv' has the layout page_first"


def test_pools_of_another_class_are_left_to_sglang(async_engine: Engine) -> None:
    class OtherHost(MHATokenToKVPoolHost):  # type: ignore[misc]
        pass

    host, device = mha_pools("layer_first")
    host.__class__ = OtherHost
    assert why_not(async_engine, host, device) == "pool 'kv' is a OtherHost over a MHATokenToKVPool"


def test_pools_whose_indices_are_translated_are_left_to_sglang(async_engine: Engine) -> None:
    host, device = mha_pools("layer_first")
    device.host_transfer_translate = lambda indices: indices
    assert why_not(async_engine, host, device) == "pool 'kv' translates its indices"


def test_pools_whose_layers_are_spread_over_ranks_are_left_to_sglang(async_engine: Engine) -> None:
    host, device = mla_pools("layer_first")
    host._layer_shard_enabled = True
    assert why_not(async_engine, host, device) == "pool 'kv' has its layers spread over ranks"


def test_pools_that_do_not_fit_are_left_to_sglang(async_engine: Engine) -> None:
    (host, _), (_, device) = mha_pools("layer_first"), mha_pools("layer_first", layers=2)
    assert "layers differ" in why_not(async_engine, host, device)


def test_copies_that_are_to_be_delayed_are_left_to_sglang(
    async_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES", "100")
    assert "delays the copies" in why_not(async_engine, *mha_pools("layer_first"))

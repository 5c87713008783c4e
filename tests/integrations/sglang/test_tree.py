"""SGLang's own radix tree, host pools and controller: a prefix is backed up, evicted, loaded back, and the same."""

from __future__ import annotations

import sys
import types
import unittest
from array import array
from typing import Any

import pytest
import torch

from hicache_sched.integrations.sglang import plugin
from tests.integrations.sglang.engine import Engine
from tests.scheduler.crowd import eventually

PAGE = 4


@pytest.fixture
def tree(async_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tree with HiCache on the emulated device; what CUDA's kernels copy is copied by operations of it."""
    # The real module imports packages that tests of ours have no use for; the fixtures want one class of it.
    test_utils = types.ModuleType("sglang.test.test_utils")
    test_utils.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.test.test_utils", test_utils)
    from sglang.srt.mem_cache.pool_host import base, common, mha
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.test.kits.unified_radix_cache import fixtures
    from sglang.test.kits.unified_radix_cache.config import CacheConfig

    def starts(indices: torch.Tensor) -> list[int]:
        first_of_pages: list[int] = indices[::PAGE].tolist()
        return first_of_pages

    def load(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
        def copy() -> None:
            for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
                for host, device in zip(starts(src_indices), starts(dst_indices), strict=True):
                    dst[device : device + PAGE] = src[host // PAGE, layer_id]

        async_engine.device.launch(copy, engine="h2d")

    def back_up(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int, **_: Any) -> None:
        def copy() -> None:
            num_layers = len(src_ptrs) // 2
            for half, dst in enumerate(dst_ptrs):
                for layer, src in enumerate(src_ptrs[half * num_layers : (half + 1) * num_layers]):
                    for device, host in zip(starts(src_indices), starts(dst_indices), strict=True):
                        dst[host // PAGE, layer] = src[device : device + PAGE]

        async_engine.device.launch(copy, engine="d2h")

    monkeypatch.setattr(mha, "transfer_kv_per_layer_direct_pf_lf", load, raising=False)
    monkeypatch.setattr(mha, "transfer_kv_all_layer_direct_lf_pf", back_up, raising=False)
    monkeypatch.setattr(common, "_cuda_host_register", lambda *args, **more: None)
    for module in (mha, base):
        monkeypatch.setattr(module, "_cuda_host_unregister", lambda *args, **more: None)
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    monkeypatch.setattr(fixtures, "get_device", lambda *args: "cpu")
    config = CacheConfig(
        page_size=PAGE,
        components=(ComponentType.FULL,),
        kv_size=64,
        num_layers=3,
        head_num=2,
        head_dim=4,
        dtype=torch.float32,
    )
    cache, allocator = fixtures.build_fixture(config)[:2]
    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
    )
    set_global_server_args_for_scheduler(arguments)
    cache.init_hicache(arguments, cache.cache_init_params)
    async_engine._made(cache.cache_controller)
    cache.load_back_threshold = 0
    cache.write_through_threshold = 1 << 30
    return cache, allocator, fixtures.write_backup


def test_a_prefix_that_was_evicted_comes_back(tree: Any, async_engine: Engine, logs: list[Any]) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache, allocator, write_backup = tree
    key = RadixKey(array("q", range(100, 116)))
    slots, pool = allocator.alloc(16), allocator.get_kvcache()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = torch.randn(16, 2, 4)
    wanted = [buffer[slots].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    cache.insert(InsertParams(key=key, value=slots))
    node = cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
    write_backup(cache, node, write_back=True)
    cache.writing_check(write_back=True)
    cache.evict(EvictParams(num_tokens=16))
    assert cache.match_prefix(MatchPrefixParams(key=key)).host_hit_length == 16
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.zero_()

    async_engine.device.hold("h2d")
    assert cache.load_back(node)
    slot = cache.ready_to_load_host_cache()
    controller = cache.cache_controller
    assert (slot, len(controller.ack_load_queue), list(cache.ongoing_load_back)) == (0, 1, [node])
    assert plugin._started_loader(controller) is not None
    assert not cache.is_load_back_event_done(slot)
    cache.check_hicache_events()
    assert controller.has_inflight_device_transfers()
    async_engine.device.resume("h2d")
    eventually(lambda: cache.is_load_back_event_done(slot))
    controller.ack_load_queue[0].finish_event.synchronize()
    cache.check_hicache_events()
    assert (controller.ack_load_queue, list(cache.ongoing_load_back)) == ([], [])
    got = cache.path_device_indices(node)
    assert [torch.equal(b[got], w) for b, w in zip((*pool.k_buffer, *pool.v_buffer), wanted, strict=True)] == [True] * 6
    cache.release_host_resources()
    assert "HiCache async load enqueue: downgraded to inline (HybridCacheController)" in [
        each["event"] for each in logs
    ]

"""The least of an engine that SGLang's controllers and tree can work in."""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry

from hicache_sched.device import EmulatedDevice
from hicache_sched.integrations.sglang import plugin

PAGE, NUM_TOKENS, WIDTH, NUM_LAYERS = 4, 64, 3, 3
WAIT = 20.0
"""Seconds after which something counts as hung."""


class DevicePool:
    """What the controllers ask of a device pool, over tensors [num_tokens, width] of each layer."""

    def __init__(self, num_layers: int) -> None:
        self.device = "cpu"
        self.layer_num = num_layers
        self.layers = [torch.zeros(NUM_TOKENS, WIDTH) for _ in range(num_layers)]
        self.counter: Any = None

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.counter = counter

    def alloc(self, num_tokens: int) -> torch.Tensor:
        return torch.arange(NUM_TOKENS - num_tokens, NUM_TOKENS)

    def free(self, indices: torch.Tensor) -> None:
        """It allocates the same again."""


class HostPool:
    """What the controllers ask of a host pool; its copies are operations of the emulated h2d engine.

    Attributes:
        made: (pool, "prepare") and (pool, layer, host tokens) when copies are submitted, in order; shared by pools.
        failures: what to raise at a layer, once.
        before: called on entry of a layer.
    """

    storage_format_tag = None
    can_use_write_back_jit = False
    page_size, size, logical_size = PAGE, NUM_TOKENS, NUM_TOKENS
    size_per_token = 10
    device = "cpu"

    def __init__(self, emulated: EmulatedDevice, name: str, num_layers: int, layout: str, made: list[Any]) -> None:
        self.name, self.layout, self.layer_num, self.made = name, layout, num_layers, made
        self.layers = [torch.rand(NUM_TOKENS, WIDTH) for _ in range(num_layers)]
        self.failures: dict[int, BaseException] = {}
        self.before: Callable[[int], object] = lambda layer: None
        self._emulated = emulated

    def prepare_transfer_indices(self, host: torch.Tensor, device: torch.Tensor, io_backend: str) -> Any:
        self.made.append((self.name, "prepare"))
        return host, device

    def load_to_device_per_layer_physical(
        self,
        device_pool: DevicePool,
        host: torch.Tensor,
        device: torch.Tensor,
        layer: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        self.before(layer)
        if (failure := self.failures.pop(layer, None)) is not None:
            raise failure
        self.made.append((self.name, layer, host.tolist()))

        mode = torch.is_inference_mode_enabled()  # a kernel has that of who launches it

        def copy() -> None:
            with torch.inference_mode(mode):
                device_pool.layers[layer][device] = self.layers[layer][host]

        self._emulated.launch(copy, engine="h2d")


class Allocator:
    """What the controllers ask of the allocator of device tokens.

    Attributes:
        transfer_done: what it was told to wait for before it gives pages away, by key.
    """

    def __init__(self, pool: DevicePool) -> None:
        self.transfer_done: dict[Any, Any] = {}
        self._pool = pool
        self._next = 0

    def get_kvcache(self) -> DevicePool:
        return self._pool

    def alloc(self, num_tokens: int) -> torch.Tensor:
        self._next += num_tokens
        return torch.arange(self._next - num_tokens, self._next)

    def set_hicache_transfer_done_event(self, key: Any, event: Any) -> None:
        self.transfer_done[key] = event


class Engine:
    """SGLang's modules on an emulated device.

    Attributes:
        calls: every stream and event call, as `EmulatedDevice.record_calls` lists them.
        made: what host pools submitted, see `HostPool`.
    """

    def __init__(self, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.calls = device.record_calls()
        self.made: list[Any] = []
        self._controllers: list[Any] = []
        monkeypatch.setattr(cache_controller, "device_module", device)
        monkeypatch.setattr(l2_transfer, "device_module", device)
        l2_transfer._timing_events_supported.cache_clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in ("compute", "h2d", "d2h"):
            self.device.resume(name)
        for controller in self._controllers:
            if (loader := plugin._started_loader(controller)) is not None:
                loader.close()

    def plain(self, layout: str = "page_first_direct", num_layers: int = NUM_LAYERS) -> Any:
        """A `HiCacheController`."""
        pool = DevicePool(num_layers)
        host = HostPool(self.device, "kv", num_layers, layout, self.made)
        return self._made(HiCacheController(Allocator(pool), host, PAGE, None, threading.Event(), io_backend="direct"))

    def hybrid(
        self, layout: str = "page_first_direct", num_layers: int = NUM_LAYERS, transfer_layers: int | None = None
    ) -> Any:
        """A `HybridCacheController` with a side pool of two layers, which are the second and the last."""
        last = (transfer_layers or num_layers) - 1
        side_layers = {1: 0, last: 1}
        pool, side = DevicePool(num_layers), DevicePool(2)
        entries = [
            PoolEntry(
                PoolName.KV,
                HostPool(self.device, "kv", num_layers, layout, self.made),
                pool,
                lambda layer: layer if layer < num_layers else None,
                is_primary_index_anchor=True,
            ),
            PoolEntry(PoolName.SWA, HostPool(self.device, "swa", 2, layout, self.made), side, side_layers.get),
        ]
        return self._made(
            HybridCacheController(
                Allocator(pool),
                HostPoolGroup(entries),
                PAGE,
                None,
                threading.Event(),
                io_backend="direct",
                transfer_layer_id_max=transfer_layers,
            )
        )

    def _made(self, controller: Any) -> Any:
        self._controllers.append(controller)
        return controller


def load(controller: Any, node: int, tokens: list[int], side_tokens: list[int] | None = None) -> torch.Tensor:
    """Queue a node's tokens; gives where they go in the anchor's device pool."""
    extra = {}
    if side_tokens is not None:
        extra["extra_pools"] = [PoolTransfer(PoolName.SWA, host_indices=torch.tensor(side_tokens))]
    indices: torch.Tensor = controller.load(torch.tensor(tokens), node_id=node, **extra)
    return indices


def anchor_host(controller: Any) -> HostPool:
    """The anchor's host pool."""
    pool = controller.mem_pool_host
    found: HostPool = pool if isinstance(pool, HostPool) else pool.anchor_entry.host_pool
    return found


def has_loaded(controller: Any, device: torch.Tensor, tokens: list[int], layers: range | None = None) -> bool:
    """Whether device tokens of the anchor are those of the host, in these layers and in no other."""
    host, pool = anchor_host(controller), controller.mem_pool_device
    wanted = range(host.layer_num) if layers is None else layers
    return all(
        torch.equal(pool.layers[layer][device], host.layers[layer][tokens]) == (layer in wanted)
        for layer in range(host.layer_num)
    )


def tree_of(controller: Any, **attributes: Any) -> Any:
    """A `UnifiedRadixCache` with what its load-back methods need and nothing of a tree."""
    tree = object.__new__(UnifiedRadixCache)
    released: list[Any] = []
    tree.__dict__.update(
        cache_controller=controller,
        linker=None,
        buffer_pipeline=None,
        host_pool_group=None,
        metrics_collector=None,
        pp_rank=0,
        ongoing_load_back={},
        released=released,
        dec_lock_ref=lambda node, params: released.append(node),
        dec_host_lock_ref=lambda node, params: None,
        tree_core=SimpleNamespace(write_back_duplicate_reclaim_digest=0, finish_load_back=lambda node: None),
        _all_reduce=lambda *args: None,
    )
    tree.__dict__.update(attributes)
    return tree


class Metrics:
    """A metrics collector that keeps what it is told of load-back."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.num_bytes = 0
        self.durations: list[float] = []

    def increment_load_back_num_tokens(self, num_tokens: int, pool: str) -> None:
        self.tokens[pool] = self.tokens.get(pool, 0) + num_tokens

    def increment_load_back_num_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def observe_load_back_duration(self, seconds: float) -> None:
        self.durations.append(seconds)


@contextmanager
def patched(register_more: Callable[[], object] = lambda: None) -> Iterator[None]:
    """With the plug-in's hooks, registered and applied as SGLang does it; afterwards as before.

    :param register_more: registers hooks of another plug-in.
    """
    owners = [target.rsplit(".", 1) for target in {hook.target for hook in plugin._HOOKS}]
    before = [(pkgutil.resolve_name(owner), name) for owner, name in owners]
    originals = [owner.__dict__[name] for owner, name in before]
    plugin.register()
    register_more()
    HookRegistry.apply_hooks()
    try:
        yield
    finally:
        for (owner, name), original in zip(before, originals, strict=True):
            setattr(owner, name, original)
        HookRegistry.reset()
        HookRegistry._patched.clear()

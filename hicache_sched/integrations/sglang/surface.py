"""The parts of SGLang that the plug-in builds on, and whether they are what it knows."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

VERSIONS = ("0.5.23",)

CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
COUNTER = "sglang.srt.managers.cache_controller.LayerDoneCounter"
DEVICE_MODULE = "sglang.srt.managers.cache_controller.device_module"
_LOADING_EVENT = "sglang.srt.managers.cache_controller.LayerLoadingEvent"
_ENGINE = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"


@dataclass(frozen=True)
class _Method:
    """
    Attributes:
        parameters: their names, in order; None where they do not matter.
        digest: of its source, where it is replaced and not only called.
    """

    target: str
    parameters: tuple[str, ...] | None
    digest: str | None = None


_METHODS = (
    _Method(f"{CONTROLLER}.__init__", None),
    _Method(f"{HYBRID}.__init__", None),
    _Method(f"{CONTROLLER}.start_loading", ("self",), "3120806593e5e17e"),
    _Method(f"{CONTROLLER}.reset", ("self",)),
    _Method(f"{CONTROLLER}._move_op_indices", ("self", "op")),
    _Method(f"{CONTROLLER}._l2_load_transfers", ("self", "host_indices", "device_indices", "pool_transfers")),
    _Method(f"{CONTROLLER}._num_tokens_by_pool", ("self", "op")),
    _Method(f"{CONTROLLER}._transfer_num_bytes", ("self", "op")),
    _Method("sglang.srt.managers.cache_controller.CacheOperation.merge_ops", ("ops",)),
    _Method(f"{TREE}.restore_kv_cache", ("self", "req", "backup")),
    _Method(f"{TREE}.release_host_resources", ("self",)),
    _Method(f"{COUNTER}.update_producer", ("self",), "283025c9b80c80ad"),
    _Method(f"{COUNTER}.set_consumer", ("self", "index")),
    _Method(f"{COUNTER}.wait_until", ("self", "threshold")),
    _Method(f"{_LOADING_EVENT}.complete", ("self", "layer_index")),
    _Method(f"{_LOADING_EVENT}.wait", ("self", "layer_index")),
    _Method(
        f"{_ENGINE}.submit_host_to_device",
        ("self", "transfers", "transfer_layer_id_max", "start_event", "on_layer_done"),
        "876a0b5d6dc6ae33",
    ),
)
_ACK = "sglang.srt.managers.cache_controller.HiCacheAck"
_ACK_FIELDS = (
    "start_event",
    "finish_event",
    "node_ids",
    "num_tokens",
    "timing_enabled",
    "num_tokens_by_pool",
    "num_bytes",
)


def differences() -> list[str]:
    """What of the installed SGLang is not as known; empty where all is."""
    return list(_differences())


def _differences() -> Iterator[str]:
    if (installed := version("sglang")) not in VERSIONS:
        yield f"its version is {installed}, and not {' or '.join(VERSIONS)}"
    for method in _METHODS:
        function = _find(method.target)
        if not callable(function):
            yield f"there is no {method.target}()"
            continue
        parameters = tuple(inspect.signature(function).parameters)
        if method.parameters is not None and parameters != method.parameters:
            yield f"{method.target}() takes {parameters}, and not {method.parameters}"
        if method.digest is not None and digest(function) != method.digest:
            yield f"{method.target}() does something else"
    fields = getattr(_find(_ACK), "_fields", None)
    if fields != _ACK_FIELDS:
        yield f"{_ACK} has the fields {fields}, and not {_ACK_FIELDS}"
    if _find(DEVICE_MODULE) is None:
        yield f"there is no {DEVICE_MODULE}"


def is_known(target: str) -> bool:
    """Whether a function is what the plug-in knows, its source included."""
    function = _find(target)
    return callable(function) and digest(function) == next(m.digest for m in _METHODS if m.target == target)


def digest(function: Any) -> str:
    """Of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _find(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None

"""The plug-in: what SGLang loads, and the hooks that it then applies.

The hooks hold no reference to a function of SGLang's in a global: SGLang rebinds every module's globals that are a
function it has patched (`plugins.hook_registry`).
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, cast

from hicache_sched.integrations.sglang import surface
from hicache_sched.integrations.sglang.announce import announce
from hicache_sched.integrations.sglang.loader import AsyncLoader, FailurePolicy

GATE = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"
ON_FAILURE = "SGLANG_HICACHE_ASYNC_LOAD_ON_FAILURE"
_POLICIES = ("raise", "serve")
_LOADER, _INLINE = "_hicache_sched_loader", "_hicache_sched_inline"


def register() -> None:
    """The entry point: register the hooks, where they are wanted and SGLang is as known; raises nothing."""
    if not _is_wanted():
        announce("info", "disabled")
        return
    if (different := surface.differences()) or (different := _setting_errors()):
        announce("error", "disabled: " + "; ".join(different))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    if _on_failure() == "serve":
        announce(
            "warning",
            f"{ON_FAILURE}=serve: after a failed load requests are served from stale pages, and the prefixes stay",
        )
    for hook in _HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind())


# -- the hooks --------------------------------------------------------------------------------------------------------


class _Hook(NamedTuple):
    target: str
    type_name: str
    function: Callable[..., Any]

    def kind(self) -> Any:
        from sglang.srt.plugins.hook_registry import HookType

        return HookType[self.type_name]

    def is_applied(self) -> bool:
        """Whether SGLang has patched it in; other plug-ins' hooks may lie above and below."""
        return any(_holds(function, self.function) for function in _wrappers(pkgutil.resolve_name(self.target)))


def _wrappers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _holds(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether a function closes over a hook; its cells may hold anything, or nothing."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):
            if cell.cell_contents is hook:
                return True
    return False


def _built(result: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    # A hybrid controller is not complete when its base's constructor returns, whose hook this is, too.
    _say_once(controller)


def _base_built(result: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    if not isinstance(controller, pkgutil.resolve_name(surface.HYBRID)):
        _say_once(controller)


def _start_loading(original: Callable[[Any], int], controller: Any) -> int:
    loader = _loader_of(controller)
    return original(controller) if loader is None else loader.start_loading()


def _before_reset(controller: Any) -> None:
    if (loader := _started_loader(controller)) is not None:
        loader.reset()


def _before_restore(tree: Any, *args: Any, **kwargs: Any) -> None:
    # It submits on the stream that bursts are submitted on, from another thread, and waits for that: behind them.
    if (loader := _started_loader(tree.cache_controller)) is not None:
        loader.drain()


def _before_release(tree: Any) -> None:
    if (loader := _started_loader(tree.cache_controller)) is not None:
        loader.close()
        _load_inline(tree.cache_controller)


_HOOKS = (
    _Hook(f"{surface.CONTROLLER}.__init__", "AFTER", _base_built),
    _Hook(f"{surface.HYBRID}.__init__", "AFTER", _built),
    _Hook(f"{surface.CONTROLLER}.start_loading", "AROUND", _start_loading),
    _Hook(f"{surface.CONTROLLER}.reset", "BEFORE", _before_reset),
    _Hook(f"{surface.TREE}.restore_kv_cache", "BEFORE", _before_restore),
    _Hook(f"{surface.TREE}.release_host_resources", "BEFORE", _before_release),
)


# -- loaders of controllers -------------------------------------------------------------------------------------------


def _started_loader(controller: Any) -> AsyncLoader | None:
    return cast(AsyncLoader | None, getattr(controller, _LOADER, None))


def _loader_of(controller: Any) -> AsyncLoader | None:
    """A controller's loader, made the first time it loads: by then it is complete; None where it loads inline."""
    loader = _started_loader(controller)
    if loader is not None or getattr(controller, _INLINE, False):
        return loader
    if not controller.load_queue:
        return None  # the original says that there is nothing to load
    if (reason := _why_inline(controller)) is not None:
        _load_inline(controller, reason)
        return None
    loader = AsyncLoader(controller, pkgutil.resolve_name(surface.DEVICE_MODULE), _on_failure())
    setattr(controller, _LOADER, loader)
    return loader


def _why_inline(controller: Any) -> str | None:
    missing = [hook.target for hook in _HOOKS if not hook.is_applied()]
    if missing:
        return f"SGLang has not applied the hooks on {', '.join(missing)}"
    counter = type(controller.layer_done_counter)
    if counter is not pkgutil.resolve_name(surface.COUNTER) or not surface.is_known(
        f"{surface.COUNTER}.update_producer"
    ):
        return f"its layers are counted by another {counter.__name__}"
    if replaced := [hook.target for hook in _HOOKS if _is_replaced(hook.target)]:
        return f"another plug-in replaces {', '.join(replaced)}"
    return None


def _is_replaced(target: str) -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    return any(kind == HookType.REPLACE for kind, *_ in HookRegistry._hooks.get(target, ()))


def _load_inline(controller: Any, reason: str | None = None) -> None:
    """From now on it loads as without the plug-in."""
    setattr(controller, _LOADER, None)
    setattr(controller, _INLINE, True)
    why = "" if reason is None else f": {reason}"
    announce("warning", f"downgraded to inline ({type(controller).__name__}){why}")


# -- settings and logs ------------------------------------------------------------------------------------------------


def _is_wanted() -> bool:
    """The gate, as SGLang reads its booleans."""
    from sglang.srt.environ import EnvBool

    gate = EnvBool(False)
    gate.name = GATE
    return bool(gate.get())


def _on_failure() -> FailurePolicy:
    return cast(FailurePolicy, os.environ.get(ON_FAILURE, "raise").strip().lower())


def _setting_errors() -> list[str]:
    policy = _on_failure()
    return [] if policy in _POLICIES else [f"{ON_FAILURE} must be one of {', '.join(_POLICIES)}, not {policy!r}"]


def _say_once(controller: Any) -> None:
    announce("info", f"enabled ({type(controller).__name__})")

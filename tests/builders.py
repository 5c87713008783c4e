"""Small things that many tests are made of."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hicache_sched import LoadOp, SchedulerConfig, TransferScheduler
from hicache_sched.copy.backend import BurstBackend
from hicache_sched.device import EmulatedDevice


def load_op(node_id: int = 1, num_tokens: int = 4) -> LoadOp:
    """A load op of the tokens 0 to `num_tokens` - 1 on both sides."""
    return LoadOp(node_id, torch.arange(num_tokens), torch.arange(num_tokens))


class LaunchingBackend:
    """A backend whose layers are operations on the emulated h2d engine, to be held, stepped and failed.

    Attributes:
        events: what has happened, in order: ("prepare", node ids), ("enqueue", first node, layer) when a layer is
            submitted, ("copy", first node, layer) when it has been copied, ("finish", first node).
        gate: cleared, it blocks the data plane in `prepare`.
        layer_gates: events to wait for inside `enqueue_layer`, by layer.
        preparing: set when `prepare` has been entered.
        failures: exceptions to raise, once each, by "prepare", "finish", "bind" or the number of a layer.
    """

    def __init__(self, device: EmulatedDevice, num_layers: int = 4, pool_names: Sequence[str] = ("kv",)) -> None:
        self.num_layers = num_layers
        self.pool_names = pool_names
        self.events: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.layer_gates: dict[int, threading.Event] = {}
        self.entered_layers: dict[int, threading.Event] = {}
        self.preparing = threading.Event()
        self.failures: dict[str | int, BaseException] = {}
        self.bound: list[Any] = []
        self._device = device

    def bind(self, scheduler: Any) -> None:
        self._fail("bind")
        self.bound.append(scheduler)

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        node_ids = [op.node_id for op in ops]
        self.events.append(("prepare", node_ids))
        self.preparing.set()
        self.gate.wait()
        self._fail("prepare")
        return node_ids

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        if layer in self.entered_layers:
            self.entered_layers[layer].set()
        if layer in self.layer_gates:
            self.layer_gates[layer].wait()
        self._fail(layer)
        self.events.append(("enqueue", prepared[0], layer))
        self._device.launch(lambda: self.events.append(("copy", prepared[0], layer)), engine="h2d")

    def finish(self, prepared: Any) -> None:
        self.events.append(("finish", prepared[0]))
        self._fail("finish")

    def hold_layer(self, layer: int) -> threading.Event:
        """Block the data plane inside `enqueue_layer(layer)` from now on; gives the event that is set on entry."""
        self.layer_gates[layer] = threading.Event()
        self.entered_layers[layer] = threading.Event()
        return self.entered_layers[layer]

    def release(self) -> None:
        """Open all gates."""
        self.gate.set()
        for gate in self.layer_gates.values():
            gate.set()

    def copied(self) -> list[tuple[int, int]]:
        """(first node, layer) of every copy made so far, in order."""
        return [(node, layer) for kind, node, *rest in self.events if kind == "copy" for layer in rest]

    def _fail(self, where: str | int) -> None:
        if where in self.failures:
            raise self.failures.pop(where)


class MakeScheduler(Protocol):
    def __call__(
        self,
        backend: BurstBackend | None = None,
        *,
        on_ack: Callable[[Any], object] | None = None,
        fence_stream: Any = None,
        runtime: Any = None,
        start: bool = True,
        **config: Any,
    ) -> TransferScheduler: ...


class Schedulers:
    """The schedulers of one test.

    :param plane: their data plane, where nothing else is said and there is one.
    """

    def __init__(self, device: EmulatedDevice, plane: str = "auto") -> None:
        self._device = device
        self._plane = plane
        self._made: list[tuple[TransferScheduler, BurstBackend]] = []

    def make(
        self,
        backend: BurstBackend | None = None,
        *,
        on_ack: Callable[[Any], object] | None = None,
        fence_stream: Any = None,
        runtime: Any = None,
        start: bool = True,
        **config: Any,
    ) -> TransferScheduler:
        backend = backend or LaunchingBackend(self._device)
        # A device whose calls do something else has no native plane.
        if type(runtime or self._device) is EmulatedDevice:
            config.setdefault("plane", self._plane)
        scheduler = TransferScheduler(
            backend,
            runtime=runtime or self._device,
            config=SchedulerConfig(**config),
            fence_stream=fence_stream,
            on_ack=on_ack,
        )
        self._made.append((scheduler, backend))
        if start:
            scheduler.start()
        return scheduler

    def close(self) -> None:
        for _, backend in self._made:
            if isinstance(backend, LaunchingBackend):
                backend.release()
        for engine in ("compute", "h2d", "d2h"):
            self._device.resume(engine)
        for scheduler, _ in self._made:
            scheduler.close(timeout=30)


def hand_out(scheduler: TransferScheduler, *node_ids: int, num_tokens: int = 4) -> Any:
    """Load one op per node and hand them out as one burst."""
    for node_id in node_ids:
        scheduler.load(load_op(node_id, num_tokens))
    handle = scheduler.start_loading_sync(timeout=30)
    assert handle is not None
    return handle


def running_functions(thread_ident: int) -> list[str]:
    """Names of the functions that a thread is in, the innermost first; empty once it has ended.

    A garbage collection inside `sys._current_frames` deadlocks CPython 3.11 (gh-106883), so there is none meanwhile.
    """
    gc.disable()
    try:
        frame = sys._current_frames().get(thread_ident)
    finally:
        gc.enable()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names

"""Reloads that fail on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_sched import BurstBackend, LoadOp
from hicache_sched.copy import TransferPoint


class InjectedError(RuntimeError):
    """A copy that was made to fail."""


class FailingBackend:
    """A `BurstBackend` that passes everything on to another, but fails one burst half way through its layers.

    :param backend: what makes the copies.
    :param burst: number of the burst to fail, from 1.
    """

    def __init__(self, backend: BurstBackend, burst: int) -> None:
        self._backend = backend
        self._burst = burst
        self._prepared = 0

    @property
    def num_layers(self) -> int:
        return self._backend.num_layers

    @property
    def pool_names(self) -> Sequence[str]:
        return self._backend.pool_names

    def bind(self, scheduler: TransferPoint) -> None:
        self._backend.bind(scheduler)

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        self._prepared += 1
        return self._backend.prepare(ops)

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        if self._prepared == self._burst and layer == self.num_layers // 2:
            raise InjectedError(f"burst {self._burst} was made to fail at layer {layer}")
        self._backend.enqueue_layer(prepared, layer)

    def finish(self, prepared: Any) -> None:
        self._backend.finish(prepared)

"""Alive until landed: what a burst uses is kept until its finish event has completed, and not longer."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from hicache_sched import LoadOp
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler


class Prepared:
    """What `prepare` made; nobody but the scheduler holds it."""


class ForgetfulBackend(LaunchingBackend):
    """Keeps nothing of what it is given or makes."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__(device)
        self.prepared: weakref.ref[Prepared] | None = None
        self.has_finished = threading.Event()

    def prepare(self, ops: Any) -> Any:
        prepared = Prepared()
        self.prepared = weakref.ref(prepared)
        return prepared

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        self._device.launch(lambda: None, engine="h2d")

    def finish(self, prepared: Any) -> None:
        self.has_finished.set()


@pytest.mark.parametrize("mode", ["async", "inline"])
async def test_index_tensors_and_plans_live_until_the_burst_has_landed(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    backend = ForgetfulBackend(device)
    scheduler = make_scheduler(backend, mode=mode)
    device.hold("h2d")
    host_indices, device_indices = torch.arange(4), torch.arange(4)
    references = [weakref.ref(host_indices), weakref.ref(device_indices)]
    scheduler.load(LoadOp(1, host_indices, device_indices))
    del host_indices, device_indices
    handle = await scheduler.start_loading()
    assert handle is not None
    await handle.enqueued(3)
    device.step("h2d", 3)
    gc.collect()
    assert [reference() is not None for reference in references] == [True, True]
    assert backend.prepared is not None
    assert backend.prepared() is not None
    assert not backend.has_finished.is_set()
    device.step("h2d", 1)
    await handle
    await scheduler.aclose(timeout=30)  # no thread of the scheduler is in the middle of dropping them
    gc.collect()
    assert [reference() for reference in references] == [None, None], "the handle alone does not keep them"
    assert backend.prepared() is None
    assert handle.node_ids == (1,)

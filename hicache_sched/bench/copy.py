"""`bench copy`: what a burst's copies cost, on the link and on the CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch

from hicache_sched import LoadOp, TransferScheduler
from hicache_sched.bench.measure import Series, measure
from hicache_sched.bench.report import Report, Row
from hicache_sched.bench.workload import PAGE_SIZE, make_op, make_pair, runtime_of
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.pools import Layout, PoolPair

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class CopyBench:
    """What to measure.

    Attributes:
        device: "emulated" or "cuda".
        pages: pages of a burst, scattered over pools of twice as many.
        layers: layers of the pools.
        row_bytes: bytes of a page in one layer of K, and of V.
        rounds: how often each side is measured.
        seed: of the pages and of the order of the sides.
    """

    device: str
    pages: int
    layers: int
    row_bytes: int
    rounds: int
    seed: int

    @property
    def nbytes(self) -> int:
        """Bytes of a burst."""
        return self.pages * self.layers * self.row_bytes * 2

    @property
    def num_rounds(self) -> int:
        """How often `on_round` will be called."""
        return 2 * len(LAYOUTS) * (self.rounds + 1)

    def run(self, on_round: Callable[[], None]) -> Report:
        """
        :param on_round: called now and then, for progress.
        """
        rows = []
        for layout in LAYOUTS:
            rng = random.Random(self.seed)
            op = make_op(self.pages, self.seed)
            with runtime_of(self.device) as runtime:
                throughput = self._throughput(self._pair(layout, self.device == "cuda"), op, runtime, rng, on_round)
            planning = self._planning(self._pair(layout, False), layout, op, rng, on_round)
            copied = self.row_bytes // (PAGE_SIZE if layout == "page_first" else 1)  # that layout keeps tokens apart
            case = f"{layout}, {copied} bytes a copy"
            target = ">= 0.9" if copied >= 65536 else None
            rows.append(Row.ratio("throughput", case, "GB/s", throughput, target))
            rows.append(Row.ratio("planning a layer", case, "us", planning))
        return Report("copy", asdict(self) | {"burst_bytes": self.nbytes}, self._notes(), tuple(rows))

    def _notes(self) -> tuple[str, ...]:
        notes = (
            "throughput: from hand-out to landed, planning included, against one copy of as many adjacent bytes",
            "planning: CPU time of the planning thread per layer of one pair (K and V), submitting to an emulated "
            "device included, against building a pair of views per page and plane as an engine would; no byte is moved",
        )
        if self.device == "cuda":
            return notes
        return (*notes, "the device is emulated: copies are made by the CPU, both sides of them")

    def _pair(self, layout: Layout, on_cuda: bool) -> PoolPair:
        return make_pair(self.pages, self.layers, self.row_bytes, layout, on_cuda=on_cuda)

    # -- throughput -----------------------------------------------------------------------------------------------

    def _throughput(
        self, pair: PoolPair, op: LoadOp, runtime: Any, rng: random.Random, on_round: Callable[[], None]
    ) -> dict[str, Series]:
        """GB/s of a burst and of one copy."""
        is_cuda = self.device == "cuda"
        source = torch.ones(self.nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        target = torch.ones(self.nbytes, dtype=torch.uint8, device="cuda" if is_cuda else "cpu")
        stream = runtime.Stream()
        with TransferScheduler(PooledBackend([pair], stable_host=True), runtime=runtime) as scheduler:

            def burst() -> dict[str, float]:
                start = time.perf_counter()
                scheduler.load(op)
                handle = scheduler.start_loading_sync()
                assert handle is not None
                handle.result()
                return {"GB/s": self.nbytes / (time.perf_counter() - start) / 1e9}

            def one_copy() -> dict[str, float]:
                start = time.perf_counter()
                with runtime.stream(stream):
                    if is_cuda:
                        target.copy_(source, non_blocking=True)
                    else:
                        runtime.enqueue_copies(_one_copy(target, source))
                stream.synchronize()
                return {"GB/s": self.nbytes / (time.perf_counter() - start) / 1e9}

            sides = measure({"burst": burst, "one copy": one_copy}, rounds=self.rounds, rng=rng, on_round=on_round)
            return {name: side["GB/s"] for name, side in sides.items()}

    # -- planning -------------------------------------------------------------------------------------------------

    def _planning(
        self, pair: PoolPair, layout: Layout, op: LoadOp, rng: random.Random, on_round: Callable[[], None]
    ) -> dict[str, Series]:
        """Microseconds of CPU time to say what one layer copies, with views of pages and with a plan."""
        pages = [(indices[::PAGE_SIZE] // PAGE_SIZE).tolist() for indices in (op.host_indices, op.device_indices)]
        planes = list(zip(pair.host.planes, pair.device.planes, strict=True))
        backend = PooledBackend([pair])
        with EmulatedDevice() as device, TransferScheduler(backend, runtime=device) as scheduler:

            def loop() -> dict[str, float]:
                start = time.thread_time()
                for layer in range(self.layers):
                    for host, on_device in planes:
                        _views(host, layout, layer, pages[0])
                        _views(on_device, "layer_first", layer, pages[1])
                return {"us": (time.thread_time() - start) / self.layers * 1e6}

            def plan() -> dict[str, float]:
                device.hold("h2d")  # the copies are made afterwards
                with device.stream(scheduler.h2d_stream):
                    start = time.thread_time()
                    prepared = backend.prepare([op])
                    for layer in range(self.layers):
                        backend.enqueue_layer(prepared, layer)
                    taken = time.thread_time() - start
                device.resume("h2d")
                scheduler.h2d_stream.synchronize()
                backend.finish(prepared)
                return {"us": taken / self.layers * 1e6}

            sides = measure({"loop over pages": loop, "plan": plan}, rounds=self.rounds, rng=rng, on_round=on_round)
            return {name: side["us"] for name, side in sides.items()}


def _one_copy(target: torch.Tensor, source: torch.Tensor) -> CopyBatch:
    to, from_, size = (
        np.array([value], dtype=np.int64) for value in (target.data_ptr(), source.data_ptr(), source.nbytes)
    )
    return CopyBatch(to, from_, size, source.nbytes, owner=(target, source))


def _views(plane: torch.Tensor, layout: Layout, layer: int, pages: list[int]) -> list[torch.Tensor]:
    """One layer of each page, as an engine that copies page by page takes it from the pool."""
    if layout == "page_first_direct":
        return [plane[page, layer] for page in pages]
    if layout == "page_first":
        return [plane[page * PAGE_SIZE : (page + 1) * PAGE_SIZE, layer] for page in pages]
    return [plane[layer, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] for page in pages]

"""`bench copy`: what a burst's copies cost, on the link and on the CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch

from hicache_sched import LoadOp, TransferScheduler
from hicache_sched.bench.measure import Ratio, measure
from hicache_sched.bench.report import Report, Row
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.pools import Layout, Pool, PoolPair

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PAGE_SIZE = 16
HEADS = 2


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
    def head_dim(self) -> int:
        """Elements of a head, of one byte each."""
        return self.row_bytes // (PAGE_SIZE * HEADS)

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
            op = self._op()
            with self._runtime() as runtime:
                throughput = self._throughput(self._pair(layout, self.device), op, runtime, rng, on_round)
            planning = self._planning(self._pair(layout, "emulated"), layout, op, rng, on_round)
            copied = self.row_bytes // (PAGE_SIZE if layout == "page_first" else 1)  # that layout keeps tokens apart
            case = f"{layout}, {copied} bytes a copy"
            target = 0.9 if copied >= 65536 else None
            rows.append(Row("throughput", case, "burst", "one copy", "GB/s", throughput, target))
            rows.append(Row("planning a layer", case, "loop over pages", "plan", "us", planning))
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

    def _pair(self, layout: Layout, device: str) -> PoolPair:
        sizes: dict[str, Any] = {
            "num_pages": 2 * self.pages,
            "page_size": PAGE_SIZE,
            "num_layers": self.layers,
            "num_heads": HEADS,
            "head_dim": self.head_dim,
            "dtype": torch.uint8,
        }
        host = Pool.mha(**sizes, layout=layout, pin=device == "cuda")
        for plane in host.planes:
            plane.fill_(1)  # memory that was never written is one page of zeros, and faster to read
        target = Pool.mha(**sizes, device="cuda" if device == "cuda" else "cpu", pin=False)
        for plane in target.planes:
            plane.fill_(2)
        return PoolPair("kv", host, target)

    def _op(self) -> LoadOp:
        rng = np.random.default_rng(self.seed)
        host, device = (rng.permutation(2 * self.pages)[: self.pages] for _ in range(2))
        offsets = np.arange(PAGE_SIZE)
        host_indices, device_indices = (
            torch.from_numpy((pages[:, None] * PAGE_SIZE + offsets).ravel()) for pages in (host, device)
        )
        return LoadOp(1, host_indices, device_indices)

    @contextmanager
    def _runtime(self) -> Iterator[Any]:
        if self.device == "cuda":
            yield torch.cuda
        else:
            with EmulatedDevice() as device:
                yield device

    # -- throughput -----------------------------------------------------------------------------------------------

    def _throughput(
        self, pair: PoolPair, op: LoadOp, runtime: Any, rng: random.Random, on_round: Callable[[], None]
    ) -> Ratio:
        """GB/s of a burst and of one copy."""
        is_cuda = self.device == "cuda"
        source = torch.ones(self.nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        target = torch.ones(self.nbytes, dtype=torch.uint8, device="cuda" if is_cuda else "cpu")
        stream = runtime.Stream()
        with TransferScheduler(PooledBackend([pair], stable_host=True), runtime=runtime) as scheduler:

            def burst() -> float:
                start = time.perf_counter()
                scheduler.load(op)
                handle = scheduler.start_loading_sync()
                assert handle is not None
                handle.result()
                return self.nbytes / (time.perf_counter() - start) / 1e9

            def one_copy() -> float:
                start = time.perf_counter()
                with runtime.stream(stream):
                    if is_cuda:
                        target.copy_(source, non_blocking=True)
                    else:
                        runtime.enqueue_copies(_one_copy(target, source))
                stream.synchronize()
                return self.nbytes / (time.perf_counter() - start) / 1e9

            return measure(burst, one_copy, rounds=self.rounds, rng=rng, on_round=on_round)

    # -- planning -------------------------------------------------------------------------------------------------

    def _planning(
        self, pair: PoolPair, layout: Layout, op: LoadOp, rng: random.Random, on_round: Callable[[], None]
    ) -> Ratio:
        """Microseconds of CPU time to say what one layer copies, with views of pages and with a plan."""
        pages = [(indices[::PAGE_SIZE] // PAGE_SIZE).tolist() for indices in (op.host_indices, op.device_indices)]
        planes = list(zip(pair.host.planes, pair.device.planes, strict=True))
        backend = PooledBackend([pair])
        with EmulatedDevice() as device, TransferScheduler(backend, runtime=device) as scheduler:

            def loop() -> float:
                start = time.thread_time()
                for layer in range(self.layers):
                    for host, on_device in planes:
                        _views(host, layout, layer, pages[0])
                        _views(on_device, "layer_first", layer, pages[1])
                return (time.thread_time() - start) / self.layers * 1e6

            def plan() -> float:
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
                return taken / self.layers * 1e6

            return measure(loop, plan, rounds=self.rounds, rng=rng, on_round=on_round)


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

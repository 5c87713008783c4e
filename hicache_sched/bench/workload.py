"""What benchmarks load: a pair of pools, and pages scattered over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hicache_sched import LoadHandle, LoadOp, TransferScheduler
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import Layout, Pool, PoolPair

PAGE_SIZE = 16
HEADS = 2
ROW_UNIT = PAGE_SIZE * HEADS
"""A page's bytes in one layer and plane are a multiple of this: elements of one byte."""


@contextmanager
def runtime_of(device: str) -> Iterator[Any]:
    """
    :param device: "emulated", for one that is there meanwhile, or "cuda".
    """
    if device == "cuda":
        yield torch.cuda
    else:
        with EmulatedDevice() as emulated:
            yield emulated


def make_pair(pages: int, layers: int, row_bytes: int, layout: Layout, *, on_cuda: bool = False) -> PoolPair:
    """K and V in pools of twice as many pages as a burst has.

    :param row_bytes: bytes of a page in one layer of K, and of V.
    :param layout: of the host pool.
    """
    sizes: dict[str, Any] = {
        "num_pages": 2 * pages,
        "page_size": PAGE_SIZE,
        "num_layers": layers,
        "num_heads": HEADS,
        "head_dim": row_bytes // ROW_UNIT,
        "dtype": torch.uint8,
    }
    host = Pool.mha(**sizes, layout=layout, pin=on_cuda)
    device = Pool.mha(**sizes, device="cuda" if on_cuda else "cpu", pin=False)
    # Memory that was never written is one page of zeros, and faster to read.
    for pool, value in ((host, 1), (device, 2)):
        for plane in pool.planes:
            plane.fill_(value)
    return PoolPair("kv", host, device)


def make_op(pages: int, seed: int) -> LoadOp:
    """Pages in any order on both sides."""
    rng = np.random.default_rng(seed)
    tokens = [
        (rng.permutation(2 * pages)[:pages, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()
        for _ in ("host", "device")
    ]
    return LoadOp(1, torch.from_numpy(tokens[0]), torch.from_numpy(tokens[1]))


def hand_out(scheduler: TransferScheduler, op: LoadOp) -> LoadHandle:
    """Hand one op out as a burst."""
    scheduler.load(op)
    handle = scheduler.start_loading_sync()
    assert handle is not None
    return handle

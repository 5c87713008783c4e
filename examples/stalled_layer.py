"""A copy engine that hangs and recovers: the same logs as JSON for machines and as lines for people."""

from __future__ import annotations

import sys
import threading
from typing import Any

import structlog
import torch

from hicache_sched import LoadOp, SchedulerConfig, TransferScheduler
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import Pool, PoolPair

ENTRIES: list[dict[str, Any]] = []
STALLED_TWICE = threading.Event()


def keep(logger: object, method: str, entry: structlog.types.EventDict) -> structlog.types.EventDict:
    """Keep a copy of every log entry, to show it again; note when the stall has been logged twice."""
    ENTRIES.append(dict(entry))
    if [kept["event"] for kept in ENTRIES].count("layer_stalled") == 2:
        STALLED_TWICE.set()
    return entry


def hang_and_recover(device: EmulatedDevice) -> None:
    pools = PoolPair(
        "kv",
        Pool.mha(8, 16, 4, 2, 32, torch.float16, layout="page_first_direct"),
        Pool.mha(8, 16, 4, 2, 32, torch.float16),
    )
    config = SchedulerConfig(stall_log_interval=0.2)
    with TransferScheduler(PooledBackend([pools]), runtime=device, config=config) as scheduler:
        device.hold("h2d")  # the copy engine hangs
        scheduler.load(LoadOp(42, torch.arange(32), torch.arange(32)))
        handle = scheduler.start_loading_sync()
        assert handle is not None
        device.step("h2d", 1)  # layer 0 still gets through
        forward = threading.Thread(target=lambda: handle.wait_layer(3), name="forward")
        forward.start()
        STALLED_TWICE.wait()
        device.resume("h2d")  # it recovers
        forward.join()
        handle.result()


def main() -> None:
    print("As JSON, while it happens:")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            keep,
            structlog.processors.JSONRenderer(),
        ]
    )
    with EmulatedDevice() as device:
        hang_and_recover(device)

    print("\nThe same for a person:")
    render = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
    for entry in ENTRIES:
        print(render(None, "", entry))


if __name__ == "__main__":
    main()

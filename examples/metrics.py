"""Metrics of a scheduler for Prometheus: served over HTTP while bursts run, and scraped once from here."""

from __future__ import annotations

import logging
from urllib.request import urlopen

import structlog
import torch
from prometheus_client import CollectorRegistry, start_http_server

from hicache_sched import LoadHandle, LoadOp, TransferScheduler
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.metrics import SchedulerMetrics
from hicache_sched.pools import Pool, PoolPair

PAGE_SIZE = 16


def hand_out(scheduler: TransferScheduler, node_id: int) -> LoadHandle:
    """A burst of one page."""
    page = torch.arange(node_id * PAGE_SIZE, (node_id + 1) * PAGE_SIZE)
    scheduler.load(LoadOp(node_id, host_indices=page, device_indices=page))
    handle = scheduler.start_loading_sync()
    assert handle is not None
    return handle


def scrape(port: int) -> list[str]:
    with urlopen(f"http://localhost:{port}/metrics") as response:
        lines: list[str] = response.read().decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_bucket{" not in line and "_created{" not in line]


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # only the prints
    pools = PoolPair(
        "kv",
        Pool.mha(8, PAGE_SIZE, 4, 2, 32, torch.float16, layout="page_first_direct"),
        Pool.mha(8, PAGE_SIZE, 4, 2, 32, torch.float16),
    )
    registry = CollectorRegistry()  # an engine would take the default one
    server, thread = start_http_server(0, "localhost", registry)  # on any free port
    with (
        EmulatedDevice(h2d_bandwidth=1e6) as device,
        TransferScheduler(PooledBackend([pools]), runtime=device) as scheduler,
        SchedulerMetrics(scheduler, "kv", registry),
    ):
        for node_id in range(4):
            hand_out(scheduler, node_id).result()
        device.hold("h2d")  # the copy engine hangs: this one is in flight while we look
        held = hand_out(scheduler, 5)
        print("\n".join(scrape(server.server_port)))
        device.resume("h2d")
        held.result()
    server.shutdown()
    server.server_close()
    thread.join()


if __name__ == "__main__":
    main()

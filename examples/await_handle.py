"""An async engine scheduler: it awaits the hand-out, layers and handles, and recomputes what failed to load."""

from __future__ import annotations

import asyncio
import logging

import structlog
import torch

from hicache_sched import LoadFailedError, LoadHandle, LoadOp, TransferScheduler
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import Pool, PoolPair

PAGE_SIZE, NUM_LAYERS = 16, 4


def pages(*numbers: int) -> torch.Tensor:
    """Token indices of whole pages."""
    return (torch.tensor(numbers)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()


def forward(handle: LoadHandle) -> None:
    """The thread that launches the model: each layer waits for its own pages only."""
    for layer in range(handle.num_layers):
        handle.wait_layer(layer)  # orders the current stream behind the copy
        landed = sum(handle.layer_landed(other) for other in range(handle.num_layers))
        print(f"  compute layer {layer}, {landed} of {handle.num_layers} layers have landed")


async def engine(scheduler: TransferScheduler, pools: PoolPair) -> None:
    print("one burst, used layer by layer")
    scheduler.load(LoadOp(1, host_indices=pages(7, 3), device_indices=pages(0, 5)))
    handle = await scheduler.start_loading()
    assert handle is not None
    print(f"  nodes {handle.node_ids} are in slot {handle.slot}, generation {handle.generation}")
    await handle.layer(0)
    print("  layer 0 has landed, launch the forward")
    await asyncio.to_thread(forward, handle)
    ack = await handle
    print(f"  {ack.status}: {ack.num_tokens} tokens, {ack.num_bytes} bytes")
    assert torch.equal(pools.device.planes[0][:, pages(5)], pools.host.planes[0][3]), "page 3 is in page 5 now"

    print("several bursts at once; node 3 names a page that the host does not have")
    handles = []
    for node_id, host_page in ((2, 4), (3, 999), (4, 6), (5, 0)):
        scheduler.load(LoadOp(node_id, pages(host_page), pages(node_id)))
        handles.append(await scheduler.start_loading())  # suspends only while all three slots are taken
    for handle in filter(None, handles):
        try:
            ack = await handle
            print(f"  nodes {ack.node_ids}: {ack.status}")
        except LoadFailedError as failed:
            print(f"  nodes {failed.node_ids} are stale, recompute them: {failed.cause}")


async def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # only the prints
    host = Pool.mha(64, PAGE_SIZE, NUM_LAYERS, 2, 32, torch.float16, layout="page_first_direct")
    device = Pool.mha(16, PAGE_SIZE, NUM_LAYERS, 2, 32, torch.float16)
    for plane in host.planes:
        plane.normal_()
    pools = PoolPair("kv", host, device)
    with EmulatedDevice(h2d_bandwidth=1e6) as runtime:
        async with TransferScheduler(PooledBackend([pools]), runtime=runtime) as scheduler:
            await engine(scheduler, pools)


if __name__ == "__main__":
    asyncio.run(main())

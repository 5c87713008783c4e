"""A small asyncio engine that only prefills, on an emulated device: what `bench serving` serves its requests with.

Times are those of a real engine times `Model.scale`, and a token's bytes are a few in place of its real ones, on a
link that is slower by as much.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from hicache_sched import LoadOp, PoolTransfer
from hicache_sched.bench.slow_backend import keep_busy
from hicache_sched.bench.ways import Burst
from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import Pool, PoolPair

PAGE_SIZE = 64
EMULATED_BYTES = (4, 1)
"""Of a token and layer, in the anchor and in the side pool."""


@dataclass(frozen=True)
class Model:
    """What is served, on what. Times are the real ones, before they are scaled.

    Attributes:
        layers: of the model, and of each of the two pools.
        token_bytes: of a token and layer in the anchor pool, on each GPU.
        side_token_bytes: the same in the side pool.
        link_gb_per_s: from host to device.
        compute_us: of a token, in all layers.
        chunk: tokens of a forward; of a batch's first one each layer waits for its copies.
        request_cpu_ms: CPU time, with the GIL, that the engine's loop spends on a request that comes in.
        scale: of all times.
    """

    layers: int
    token_bytes: int
    side_token_bytes: int
    link_gb_per_s: float
    compute_us: float
    chunk: int
    request_cpu_ms: float
    scale: float

    @property
    def emulated_bandwidth(self) -> float:
        """Of the emulated link, in bytes/s: a token takes as long on it as on the real one, scaled."""
        real_bytes = self.token_bytes + self.side_token_bytes
        return self.link_gb_per_s * 1e9 * sum(EMULATED_BYTES) / real_bytes / self.scale

    def compute_seconds(self, tokens: int) -> float:
        return tokens * self.compute_us * 1e-6 * self.scale


@dataclass(frozen=True)
class Request:
    """A prompt: a prefix that it shares with others, and what is new in it.

    Attributes:
        prefix: its number.
        new_tokens: how many have to be computed.
    """

    prefix: int
    new_tokens: int


class PrefixCache:
    """Prefixes in host memory, all of one length, and the newest of them on the device."""

    def __init__(
        self, num_prefixes: int, pages: int, num_on_device: int, layers: int, rng: np.random.Generator
    ) -> None:
        """
        :param pages: of a prefix, scattered over both pools.
        """
        self.pairs = [
            PoolPair(
                name,
                Pool.mla(num_prefixes * pages, PAGE_SIZE, layers, row, torch.uint8, layout="page_first_direct"),
                Pool.mla(num_on_device * pages, PAGE_SIZE, layers, row, torch.uint8),
            )
            for name, row in zip(("kv", "indexer"), EMULATED_BYTES, strict=True)
        ]
        for pair in self.pairs:
            (plane,) = pair.host.planes
            plane.copy_(torch.from_numpy(rng.integers(1, 256, size=plane.shape, dtype=np.uint8)))
        self._host_pages = rng.permutation(num_prefixes * pages).reshape(num_prefixes, pages)
        device_pages = rng.permutation(num_on_device * pages).reshape(num_on_device, pages)
        self._host_tokens = [_tokens(each) for each in self._host_pages]
        self._device_tokens = [_tokens(each) for each in device_pages]
        self.clear()

    def clear(self) -> None:
        """Forget what is on the device."""
        self._on_device: OrderedDict[int, int] = OrderedDict()  # where, by prefix, the one used longest ago first
        self._free = list(range(len(self._device_tokens)))
        for pair in self.pairs:
            pair.device.planes[0].zero_()

    def admit(self, prefixes: Sequence[int]) -> list[LoadOp]:
        """Make room for what is not on the device, in place of what was used longest ago.

        :return: what loads it.
        """
        ops = []
        for prefix in prefixes:
            if prefix in self._on_device:
                self._on_device.move_to_end(prefix)
        for prefix in dict.fromkeys(prefixes):
            if prefix not in self._on_device:
                block = self._free.pop() if self._free else self._on_device.popitem(last=False)[1]
                self._on_device[prefix] = block
                host, device = self._host_tokens[prefix], self._device_tokens[block]
                ops.append(LoadOp(prefix, host, device, (PoolTransfer(self.pairs[1].name, host, device),)))
        return ops

    def check(self) -> None:
        """:raises RuntimeError: what is on the device is not what is in host memory."""
        for pair in self.pairs:
            (host,), (device,) = pair.host.planes, pair.device.planes
            for prefix, block in self._on_device.items():
                loaded = device[:, self._device_tokens[block]]
                expected = host[torch.from_numpy(self._host_pages[prefix])].transpose(0, 1)
                if not torch.equal(loaded, expected.reshape(loaded.shape)):
                    raise RuntimeError(f"prefix {prefix} was not loaded as it is, into pool {pair.name!r}")


def _tokens(pages: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel())


@dataclass(frozen=True)
class _Waiting:
    """A request in the queue, and when it was and will have been served (`time.perf_counter` seconds)."""

    request: Request
    sent_at: float
    served_at: asyncio.Future[float]


HandOut = Callable[[Sequence[LoadOp]], Awaitable[Burst]]


@dataclass
class Served:
    """What came of a run.

    Attributes:
        seconds: of all of it.
        ttft: seconds from when each request was sent to the end of its batch's last forward.
        blocked: seconds that the engine's loop spent in hand-outs.
        loaded_tokens: of prefixes.
    """

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    blocked: float = 0.0
    loaded_tokens: int = 0


class PrefillEngine:
    """Takes batches in order of arrival: loads what is not on the device, and computes what is new, layer by layer.

    The next batch is taken when the last has been computed. A thread of its own launches the forwards, so that the loop
    is free meanwhile.
    """

    def __init__(self, device: EmulatedDevice, model: Model, cache: PrefixCache, hand_out: HandOut, batch: int) -> None:
        self._device = device
        self._model = model
        self._cache = cache
        self._hand_out = hand_out
        self._batch = batch
        self._compute = device.Stream()

    async def serve(self, requests: Sequence[Request], concurrency: int) -> Served:
        """Serve all requests, of so many clients, each of which sends one when its last has been served."""
        served, unsent = Served(), deque(requests)
        waiting: deque[_Waiting] = deque()
        arrived = asyncio.Event()
        begin = time.perf_counter()

        async def client() -> None:
            sent_at = begin
            while unsent:
                request = _Waiting(unsent.popleft(), sent_at, asyncio.get_running_loop().create_future())
                keep_busy(self._model.request_cpu_ms * 1e-3 * self._model.scale)
                waiting.append(request)
                arrived.set()
                sent_at = await request.served_at

        async def engine() -> None:
            while len(served.ttft) < len(requests):
                while not waiting:
                    arrived.clear()
                    await arrived.wait()
                batch = [waiting.popleft() for _ in range(min(self._batch, len(waiting)))]
                await self._compute_batch([each.request for each in batch], served, model_thread)
                now = time.perf_counter()
                for each in batch:
                    served.ttft.append(now - each.sent_at)
                    each.served_at.set_result(now)

        with ThreadPoolExecutor(1, "model") as model_thread:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(client())
                tasks.create_task(engine())
        served.seconds = time.perf_counter() - begin
        return served

    async def _compute_batch(
        self, requests: Sequence[Request], served: Served, model_thread: ThreadPoolExecutor
    ) -> None:
        ops = self._cache.admit([request.prefix for request in requests])
        burst = None
        if ops:
            start = time.perf_counter()
            burst = await self._hand_out(ops)
            served.blocked += time.perf_counter() - start
            served.loaded_tokens += sum(op.num_tokens for op in ops)
        new_tokens = sum(request.new_tokens for request in requests)
        await asyncio.get_running_loop().run_in_executor(model_thread, self._forward, burst, new_tokens)

    def _forward(self, burst: Burst | None, new_tokens: int) -> None:
        """On the model thread: the first chunk layer by layer, behind each layer's copies, then the others."""
        model = self._model
        first = min(model.chunk, new_tokens)
        with self._device.stream(self._compute):
            for layer in range(model.layers):
                if burst is not None:
                    burst.wait_layer(layer)
                self._device.launch(None, duration=model.compute_seconds(first) / model.layers)
            self._device.launch(None, duration=model.compute_seconds(new_tokens - first))
        self._compute.synchronize()

"""A tiny model, engines over it, and what it has to answer."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chat_engine.audit import Audit
from chat_engine.engine import Engine
from chat_engine.faults import FailingBackend
from chat_engine.memory import KvShape, Memory
from chat_engine.reference import plain_reply
from hicache_sched import BurstBackend, LoadAck, LoadOp, SchedulerConfig, TransferScheduler
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice

Mode = Literal["inline", "async"]

VOCABULARY = 128
PAGE_SIZE = 4
TOKENS_PER_NODE = 8
NUM_LAYERS = 4


def tiny_llama() -> LlamaForCausalLM:
    """A randomly initialised model; the same every time."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = LlamaForCausalLM(config)
    return model.eval()  # type: ignore[no-any-return]


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """A prompt; the longer ones of a seed go on where the shorter ones end."""
    generator = torch.Generator().manual_seed(seed)
    numbers: list[int] = torch.randint(0, VOCABULARY, (256,), generator=generator).tolist()
    return numbers[:num_tokens]


def answer(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model says on its own."""
    return plain_reply(model, prompt, num_tokens, chunk=TOKENS_PER_NODE)


class WatchedModel:
    """A model that calls `before` and `after` around each forward, on the model thread.

    Attributes:
        forwards: the tokens of each forward.
    """

    def __init__(
        self, model: Any, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
    ) -> None:
        self.config, self.dtype = model.config, model.dtype
        self._model = model
        self._before, self._after = before, after
        self.forwards: list[list[int]] = []

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> Any:
        self.forwards.append(tokens[0].tolist())
        self._before()
        output = self._model(tokens, **kwargs)
        self._after()
        return output


class WatchedBackend:
    """Passes bursts on, and says when one has begun; all of it can be made to wait.

    Attributes:
        begun: set, on the loop of the test, once a burst is being prepared.
        gate: cleared, it blocks the data plane before it prepares.
        finish_gate: cleared, it keeps bursts from ending whose layers have all landed.
        loads: node ids of every burst.
    """

    def __init__(self, backend: BurstBackend) -> None:
        self.begun = asyncio.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.finish_gate = threading.Event()
        self.finish_gate.set()
        self.loads: list[list[int]] = []
        self.num_layers = backend.num_layers
        self.pool_names = backend.pool_names
        self.bind = backend.bind
        self.enqueue_layer = backend.enqueue_layer
        self._prepare, self._finish = backend.prepare, backend.finish
        self._loop = asyncio.get_running_loop()

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        self.loads.append([op.node_id for op in ops])
        self._loop.call_soon_threadsafe(self.begun.set)
        self.gate.wait()
        return self._prepare(ops)

    def finish(self, prepared: Any) -> None:
        self.finish_gate.wait()
        self._finish(prepared)


_unused_seeds = itertools.count(1_000_000)


@dataclass
class Served:
    """An engine and what it stands on.

    Attributes:
        engine: under test.
        memory: its pools.
        device: the emulated device of both.
        transfers: its transfer scheduler, if it has one.
        watched: the backend of that.
        acks: how each burst ended.
    """

    engine: Engine
    memory: Memory
    device: EmulatedDevice
    transfers: TransferScheduler | None
    watched: WatchedBackend | None
    acks: list[LoadAck]

    @property
    def backend(self) -> WatchedBackend:
        assert self.watched is not None, "this engine recomputes"
        return self.watched

    def ask(self, prompt: Sequence[int], num_tokens: int = 4) -> asyncio.Task[list[int]]:
        """A client that asks, and wants the tokens."""

        async def client() -> list[int]:
            return (await self.engine.generate(prompt, num_tokens)).tokens

        return asyncio.create_task(client())

    @property
    def h2d_stream(self) -> Any:
        assert self.transfers is not None, "this engine recomputes"
        return self.transfers.h2d_stream

    async def ask_and_evict(self, prompt: Sequence[int]) -> None:
        """Ask for a prompt, and push what was computed of it off the device."""
        await self.ask(prompt)
        await self.evict()

    async def ask_and_hold(self, *prompts: Sequence[int]) -> list[asyncio.Task[list[int]]]:
        """Ask for prompts that are on the host, and wait until the first is being reloaded. The data plane then waits
        until `backend.gate` is set."""
        self.backend.gate.clear()
        clients = [self.ask(prompt) for prompt in prompts]
        await self.backend.begun.wait()
        return clients

    async def evict(self) -> None:
        """Push everything off the device, with a prompt that fills it and that nobody has asked for."""
        await self.engine.generate(prompt_of(next(_unused_seeds), self.engine.prefixes.num_tokens - 1), 1)


@asynccontextmanager
async def serve(
    model: Any,
    *,
    mode: Mode | None = "async",
    device_tokens: int = 64,
    host_tokens: int = 256,
    fail_burst: int | None = None,
    audit: Audit | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """An engine over `model` that reloads in `mode`, or recomputes where that is None. Checks for leaks at its end."""
    async with AsyncExitStack() as stack:
        device = stack.enter_context(EmulatedDevice())
        host_pages = 0 if mode is None else host_tokens // PAGE_SIZE
        memory = Memory(KvShape.of(model), PAGE_SIZE, device_tokens // PAGE_SIZE, host_pages, device)
        transfers = watched = None
        acks: list[LoadAck] = []
        if mode is not None:
            pooled: BurstBackend = PooledBackend([memory.pair])
            if fail_burst is not None:
                pooled = FailingBackend(pooled, fail_burst)
            watched = WatchedBackend(pooled)
            config = SchedulerConfig(mode=mode, poll_acks=False)
            transfers = await stack.enter_async_context(
                TransferScheduler(watched, runtime=device, config=config, on_ack=acks.append)
            )
        engine = Engine(model, memory, transfers, tokens_per_node=TOKENS_PER_NODE, audit=audit, **settings)
        async with engine:
            try:
                yield Served(engine, memory, device, transfers, watched, acks)
            except BaseException:  # a test that failed leaves nothing waiting
                if watched is not None:
                    watched.gate.set()
                    watched.finish_gate.set()
                device.resume("d2h")
                raise
        assert engine.prefixes.leaks() == []
        assert transfers is None or transfers.idle

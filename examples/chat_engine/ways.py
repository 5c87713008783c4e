"""The three ways to serve prompts whose KV cache was evicted, each run on the same conversations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from hicache_sched import BurstBackend, SchedulerConfig, TransferScheduler
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice

from .audit import Audit
from .engine import Engine
from .faults import FailingBackend
from .memory import KvShape, Memory
from .metrics import Metrics
from .workload import Conversation, Turn, hold_conversations


class Way(StrEnum):
    """What is done about a prefix that was evicted."""

    RECOMPUTE = "recompute"
    """It is forgotten and computed again."""
    INLINE = "reload inline"
    """It is loaded back, and the engine scheduler's thread submits the copies."""
    ASYNC = "reload async"
    """It is loaded back, and the engine scheduler goes on after the hand-out."""


@dataclass(frozen=True)
class Settings:
    """What all ways have in common.

    Attributes:
        device_tokens: tokens that the device pool holds.
        host_tokens: tokens that the host pool holds.
        link_speed: bytes per second between the two, on an emulated device.
        max_new_tokens: tokens of a reply at most.
        max_running: requests under way at once.
        page_size: tokens of a page.
        tokens_per_node: tokens of a node of the prefix index.
        fail_burst: number of the reload to fail, from 1; None for none.
    """

    device_tokens: int
    host_tokens: int
    link_speed: float
    max_new_tokens: int
    max_running: int = 4
    page_size: int = 16
    tokens_per_node: int = 128
    fail_burst: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How one way went.

    Attributes:
        way: which.
        turns: every turn of every conversation, in that order.
        metrics: the engine's.
        leaks: what was wrong with its pages in the end.
        compared_loaded: how often the audit compared a node that had come back from the host.
        seconds: from the first request to the last reply.
    """

    way: Way
    turns: Sequence[Turn]
    metrics: Metrics
    leaks: Sequence[str]
    compared_loaded: int
    seconds: float

    @property
    def end_of_chat_1(self) -> Turn:
        """The last turn of the first conversation: the one that is compared with what the model says alone."""
        return [turn for turn in self.turns if turn.conversation == 1][-1]


async def run_way(
    way: Way,
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    settings: Settings,
    audit: Audit,
    on_turn: Callable[[Turn], object] = lambda turn: None,
) -> Outcome:
    """Hold the conversations with an engine of their own, made for `way`."""
    async with AsyncExitStack() as stack:
        runtime: Any = torch.cuda
        if not torch.cuda.is_available():
            runtime = stack.enter_context(EmulatedDevice(settings.link_speed, settings.link_speed))
        memory = Memory(
            KvShape.of(model),
            settings.page_size,
            device_pages=settings.device_tokens // settings.page_size,
            host_pages=0 if way is Way.RECOMPUTE else settings.host_tokens // settings.page_size,
            runtime=runtime,
        )
        transfers = None
        if way is not Way.RECOMPUTE:
            backend: BurstBackend = PooledBackend([memory.pair])
            if settings.fail_burst is not None:
                backend = FailingBackend(backend, settings.fail_burst)
            config = SchedulerConfig(mode="inline" if way is Way.INLINE else "async", poll_acks=False)
            transfers = await stack.enter_async_context(TransferScheduler(backend, runtime=runtime, config=config))
        engine = Engine(
            model,
            memory,
            transfers,
            tokens_per_node=settings.tokens_per_node,
            max_running=settings.max_running,
            eos_token_ids=[tokenizer.eos_token_id],
            audit=audit,
        )
        compared_before = audit.compared_loaded
        async with engine:
            began = time.perf_counter()
            turns = await hold_conversations(engine, tokenizer, conversations, settings.max_new_tokens, on_turn)
            seconds = time.perf_counter() - began
        return Outcome(
            way, turns, engine.metrics, engine.prefixes.leaks(), audit.compared_loaded - compared_before, seconds
        )

"""The thread that runs the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hicache_sched.integrations.transformers import PagedCache

from .memory import Memory
from .request import Step


class ModelThread:
    """Runs forwards on a thread of its own, so that the engine scheduler's loop goes on meanwhile.

    The sequences of a batch go through the model one after the other. That is slower than side by side, but then the
    last bits of a token do not depend on who else is in the batch, and three runs can be compared byte by byte.

    :param model: a causal language model of `transformers`.
    :param memory: where its KV cache is.
    """

    def __init__(self, model: Any, memory: Memory) -> None:
        self._model = model
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        _settle_kernels()

    async def run(self, batch: Sequence[Step]) -> None:
        """Run a batch; each step gets its `next_token`, but for those whose client has gone away."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._run, batch)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    @torch.inference_mode()
    def _run(self, batch: Sequence[Step]) -> None:
        stream = self._memory.runtime.current_stream()
        stream.wait_stream(self._memory.evict_stream)  # pages to be written may still be on their way to the host
        for step in batch:
            if not step.request.reply.done():
                self._forward(step)
        stream.synchronize()

    def _forward(self, step: Step) -> None:
        request = step.request
        if request.cache is None:
            assert request.lease is not None
            request.cache = PagedCache(self._memory.device_pool, request.lease.page_ids)
        cache = request.cache
        cache.num_tokens = step.begin
        cache.loads = request.reloads
        tokens = torch.tensor([step.tokens], device=self._memory.torch_device)
        logits = self._model(tokens, cache=cache, logits_to_keep=1).logits
        step.next_token = int(logits[0, -1].argmax())


def _settle_kernels() -> None:
    """Have torch's math library on the CPU choose its kernels, on this thread alone.

    MKL looks for them in the first call of a process of any function like cos or exp, without a lock. If two threads of
    an operation make that call, one of them may take a kernel meant for another CPU, right to four digits only, and the
    first keys are not those that are computed later (https://github.com/pytorch/pytorch/issues/188792). Of a single
    element, no work is shared out.
    """
    torch.zeros(1).cos()

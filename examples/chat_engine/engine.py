"""The engine: an asyncio scheduler between clients and the model."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from hicache_sched import LoadCancelledError, LoadFailedError, LoadOp, TransferScheduler

from .audit import Audit
from .memory import Memory
from .metrics import Metrics
from .model_thread import ModelThread
from .prefix_cache import Lease, PrefixCache
from .prefix_index import Content, Node
from .reload import Reload
from .request import Reply, Request, Step, next_step


class EngineClosedError(RuntimeError):
    """The engine was closed before the reply was there."""


class PromptTooLongError(ValueError):
    """Prompt and reply would not fit the device pool, even if nothing else were there."""


class Engine:
    """Serves chats; use it as `async with Engine(...) as engine`.

    Its scheduler is one task, whose turn is: admit requests while there is room, begin to load back what they need from
    the host, run one step of each on the model thread, and take what came out. A step waits, layer by layer, for the
    pages that are still on their way. If a reload failed, what was computed from it is not used and is computed again.

    Everything but the model runs on the event loop's thread, and what a forward uses is not touched while it runs, so
    nothing here needs a lock.

    :param model: a causal language model of `transformers`, on the device of `memory`.
    :param memory: pools for its KV cache.
    :param transfers: loads prefixes back from the host, started; None to compute them again instead.
    :param tokens_per_node: tokens of a node of the prefix index; prompts go through the model in chunks of it.
    :param max_running: requests under way at once.
    :param max_batch_tokens: tokens of prompts in a batch at most, if more than one request has some.
    :param eos_token_ids: tokens that end a reply.
    :param audit: looks at each request's prefix when it is done.
    """

    def __init__(
        self,
        model: Any,
        memory: Memory,
        transfers: TransferScheduler | None = None,
        *,
        tokens_per_node: int = 128,
        max_running: int = 4,
        max_batch_tokens: int = 256,
        eos_token_ids: Collection[int] = (),
        audit: Audit | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.prefixes = PrefixCache(memory, tokens_per_node)
        self._memory = memory
        self._transfers = transfers
        self._model = ModelThread(model, memory)
        self._tokens_per_node = tokens_per_node
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._audit = audit
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._reload_of: dict[Node, Reload] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._vocabulary_size = model.config.vocab_size
        self._serving: asyncio.Task[None] | None = None
        self._closing = False
        self._broken: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._serve(), name="engine-scheduler")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. Requests under way get an `EngineClosedError`, forwards and reloads under way end first.

        :raises BaseException: what ended the engine before. A cancellation meanwhile is raised when it has closed: what
            it stands on must not go away under it.
        """
        assert self._serving is not None
        self._closing = True
        self._changed.set()
        cancelled: asyncio.CancelledError | None = None
        while not self._serving.done():
            try:
                await asyncio.wait([self._serving])
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled
        self._serving.result()

    # -- for clients --------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Reply:
        """Answer a prompt. A client that is cancelled goes away: its pages are free after the forward under way.

        :raises ValueError: the prompt is empty or has a token that the model does not know, or no token is asked for.
        :raises TypeError: a token of the prompt, or `max_new_tokens`, is no int.
        :raises PromptTooLongError: both together never fit the device pool.
        :raises EngineClosedError: the engine was closed before, or is not open yet.
        """
        if type(max_new_tokens) is not int or not all(type(token) is int for token in prompt):
            raise TypeError("generate() needs ints, as tokens of the prompt and as max_new_tokens")
        if not prompt or max_new_tokens < 1:
            raise ValueError("generate() needs at least one token of prompt, and max_new_tokens of at least 1")
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary_size:
            raise ValueError(f"the model knows the tokens 0 to {self._vocabulary_size - 1}, and the prompt has others")
        num_tokens = len(prompt) + max_new_tokens
        if num_tokens > self.prefixes.num_tokens:
            raise PromptTooLongError(
                f"{len(prompt)} tokens of prompt and {max_new_tokens} new ones do not fit a device pool of "
                f"{self.prefixes.num_tokens} tokens: it needs more pages"
            )
        if self._serving is None:
            raise EngineClosedError("the engine is not open: use it as `async with Engine(...) as engine`")
        if self._closing:
            raise EngineClosedError("the engine is closed") from self._broken
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(Request(list(prompt), max_new_tokens, time.perf_counter(), reply))
        self._changed.set()
        return await reply

    # -- the scheduler ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while not self._closing and self._broken is None:
                self._changed.clear()
                self._drop_done()
                await self._admit()
                if batch := self._next_batch():
                    await self._model.run(batch)
                    await self._take(batch)
                else:
                    await self._changed.wait()
        except Exception as exc:
            self._broken = self._broken or exc
        finally:
            await self._shut_down()
        if self._broken is not None:
            raise self._broken

    async def _shut_down(self) -> None:
        self._closing = True
        await self._model.close()  # before any page is given back, as a forward may be under way
        for request in [*self._waiting, *self._running]:
            if not request.reply.done():
                request.reply.set_exception(self._broken or EngineClosedError("the engine was closed"))
        self._drop_done()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _drop_done(self) -> None:
        """Take requests that nobody waits for any more out, and give their pages back."""
        self._waiting = deque(request for request in self._waiting if not request.reply.done())
        for request in [request for request in self._running if request.reply.done()]:
            self._running.remove(request)
            assert request.lease is not None
            self.prefixes.release(request.lease)

    async def _admit(self) -> None:
        """Admit requests in the order they came, while there is room, and begin to load back what they need."""
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            lease = self.prefixes.acquire(request.prompt, request.max_new_tokens)
            if lease is None:
                self.metrics.waits_for_room += 1
                return
            self._waiting.popleft()
            self._running.append(request)
            request.lease = lease
            if lease.to_load:
                await self._start_reload(lease)
            request.reloads = list({self._reload_of[node]: None for node in lease.nodes if node in self._reload_of})

    def _next_batch(self) -> list[Step]:
        """Prompts first, the oldest first, as far as the batch may go; with none to do, a token of every reply."""
        steps = [next_step(request, self._tokens_per_node) for request in self._running]
        batch: list[Step] = []
        room = self._max_batch_tokens
        for step in steps:
            if step.request.output or (step.node is not None and any(step.node is other.node for other in batch)):
                continue  # of a reply, or another request's step computes the same node
            room -= len(step.tokens)
            if batch and room < 0:
                break
            batch.append(step)
        return batch or steps

    async def _take(self, batch: Sequence[Step]) -> None:
        """Take what the model made of a batch, once it is known whether it was made of the right pages."""
        steps = [step for step in batch if step.next_token is not None]
        for reload in {reload: None for step in steps for reload in step.request.reloads}:
            await asyncio.shield(reload.settled)
            if not reload.handle.stale:
                self.metrics.waited_ms += reload.take_waited_ms()
        for step in steps:
            step.request.reloads = []
            if not step.request.output:
                self.metrics.computed_tokens += len(step.tokens)
            if step.is_right and not step.request.reply.done():
                self._take_step(step)

    def _take_step(self, step: Step) -> None:
        request = step.request
        if step.node is not None:
            step.node.content = Content.READY
            return
        assert step.next_token is not None
        if request.ttft is None:
            request.ttft = time.perf_counter() - request.arrived
            self.metrics.ttfts.append(request.ttft)
        ended = step.next_token in self._eos_token_ids
        if not ended:
            request.output.append(step.next_token)
        if ended or len(request.output) == request.max_new_tokens:
            self._running.remove(request)
            request.reply.set_result(Reply(request.output, ended, request.ttft))
            assert request.lease is not None
            self._in_background(self._give_back(request.lease))

    async def _give_back(self, lease: Lease) -> None:
        """Give a request's pages back, once they have been looked at."""
        try:
            if self._audit is not None:
                await self._audit.look_at(lease.nodes, self._memory)
        finally:
            self.prefixes.release(lease)
            self._changed.set()

    # -- reloads ------------------------------------------------------------------------------------------------------

    async def _start_reload(self, lease: Lease) -> None:
        """Hand out one burst with everything that a request needs from the host; its copies begin at once."""
        assert self._transfers is not None, "nodes go to the host only where they can be loaded back"
        for node in lease.to_load:
            assert node.host_pages is not None
            assert node.device_pages is not None
            indices = self._memory.token_indices
            self._transfers.load(LoadOp(node.id, indices(node.host_pages), indices(node.device_pages)))
        began = time.perf_counter()
        try:
            # The pages may still be on their way to the host, or what was in them before.
            handle = await self._transfers.start_loading(fence=self._memory.evict_stream)
        except BaseException:
            self.prefixes.mark(lease.to_load, Content.MISSING)
            raise
        self.metrics.hand_outs.append(time.perf_counter() - began)
        assert handle is not None
        reload = Reload(handle, self._memory.runtime)
        self._reload_of.update(dict.fromkeys(lease.to_load, reload))
        self.prefixes.hold(lease.nodes)  # the copies go on when every client has gone away
        reload.settled = self._in_background(self._settle(reload, lease))

    async def _settle(self, reload: Reload, lease: Lease) -> None:
        """Wait for a burst to end, and note what its nodes hold now."""
        try:
            ack = await reload.handle
        except (LoadFailedError, LoadCancelledError):
            self.prefixes.mark(lease.to_load, Content.MISSING)
            self.metrics.stale_bursts.append(reload.handle.burst_id)
        else:
            self.prefixes.mark(lease.to_load, Content.READY)
            self.metrics.reloaded_tokens += ack.num_tokens
            self.metrics.reloaded_bytes += ack.num_bytes
            self.metrics.copy_ms += ack.duration_ms or 0.0
        for node in lease.to_load:
            del self._reload_of[node]
        self.prefixes.let_go(lease.nodes)
        self._changed.set()

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error
            self._changed.set()

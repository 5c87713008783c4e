"""Requests: what clients ask for, and how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache_sched.integrations.transformers import PagedCache

from .prefix_cache import Lease
from .prefix_index import Content, Node
from .reload import Reload


@dataclass(frozen=True)
class Reply:
    """What a client gets.

    Attributes:
        tokens: the reply, without the token that ends it.
        is_whole: whether the model ended it, and not the limit that was asked for.
        ttft: seconds from the request's arrival to its first token.
    """

    tokens: list[int]
    is_whole: bool
    ttft: float


@dataclass(eq=False)
class Request:
    """One prompt to be answered.

    Attributes:
        prompt: its tokens.
        max_new_tokens: tokens of the reply at most.
        arrived: when it came, by `time.perf_counter`.
        reply: resolves for the client; done, too, when that goes away or the engine is closed.
        lease: its pages, once admitted.
        cache: the same for the model, made by its thread.
        reloads: bursts under way that its prefix depends on.
        output: tokens of the reply so far.
        ttft: seconds from arrival to first token, once there is one.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    arrived: float
    reply: asyncio.Future[Reply]
    lease: Lease | None = None
    cache: PagedCache | None = None
    reloads: list[Reload] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    ttft: float | None = None


@dataclass(eq=False)
class Step:
    """One forward of one request.

    Attributes:
        request: whose.
        begin: position of its first token.
        tokens: what goes in.
        node: what it fills; None if that is the request's own pages, and then it gives a token of the reply.
        context: the nodes before it, which have to be right for the step to be.
        next_token: what the model would go on with; None while it was not asked.
    """

    request: Request
    begin: int
    tokens: Sequence[int]
    node: Node | None
    context: Sequence[Node]
    next_token: int | None = None

    @property
    def is_right(self) -> bool:
        """Whether it was computed from a context that can be trusted. Ask once its reloads have settled."""
        return self.next_token is not None and all(node.content is Content.READY for node in self.context)


def next_step(request: Request, tokens_per_node: int) -> Step:
    """The forward that a request needs next: of the first node that is missing, then of the rest of its prompt, then
    of its newest token.

    A chunk begins and ends where a node does, whether what comes before it was computed, shared or loaded back. The
    arithmetic is therefore the same in each case, to the last bit.
    """
    assert request.lease is not None
    nodes = request.lease.nodes
    for node in nodes:
        if node.content is Content.MISSING:
            begin = node.depth * tokens_per_node
            return Step(request, begin, request.prompt[begin : begin + tokens_per_node], node, nodes[: node.depth])
    if not request.output:
        begin = len(nodes) * tokens_per_node
        return Step(request, begin, request.prompt[begin:], None, nodes)
    begin = len(request.prompt) + len(request.output) - 1
    return Step(request, begin, request.output[-1:], None, nodes)

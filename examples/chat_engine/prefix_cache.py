"""Pages for prompts: found, loaded back, made room for, evicted to the host and given back."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .memory import Memory
from .pages import PageAllocator
from .prefix_index import Content, Node, PrefixIndex


@dataclass(frozen=True, eq=False)
class Lease:
    """The device pages of one request, its own until they are released.

    Attributes:
        nodes: the prompt's prefix, shared with other requests.
        to_load: those of them that are on the host; whoever acquired the lease has to load them.
        own_pages: pages for the rest of the prompt and for the reply.
    """

    nodes: list[Node]
    to_load: list[Node]
    own_pages: list[int]

    @property
    def page_ids(self) -> list[int]:
        """All pages, in the order of the tokens."""
        return [page for node in self.nodes for page in node.device_pages or ()] + self.own_pages


class PrefixCache:
    """Prefixes in two pools.

    A node that is in use stays on the device. When room is needed, the nodes that were not used for longest go to the
    host, and when the host is full, the coldest there are forgotten. With no host pool the evicted are forgotten at
    once. Only the engine scheduler's thread uses it.

    :param memory: the pools.
    :param tokens_per_node: tokens of a node of the index, a multiple of the page size.
    """

    def __init__(self, memory: Memory, tokens_per_node: int) -> None:
        if tokens_per_node % memory.page_size:
            raise ValueError(
                f"tokens_per_node must be a multiple of the page size {memory.page_size}, not {tokens_per_node}"
            )
        self.index = PrefixIndex(tokens_per_node)
        self._memory = memory
        self._pages_per_node = tokens_per_node // memory.page_size
        self._on_device = PageAllocator(memory.device_pool.num_pages)
        self._on_host = PageAllocator(memory.host_pool.num_pages if memory.host_pool else 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit the device."""
        return self._on_device.num_pages * self._memory.page_size

    # -- for requests -------------------------------------------------------------------------------------------------

    def acquire(self, prompt: Sequence[int], num_new_tokens: int) -> Lease | None:
        """Pages for a prompt and its reply; None, and nothing has changed, if there is no room for them now."""
        keys = self.index.keys_of(prompt)
        known = self.index.find(keys)
        on_host = [node for node in known if node.device_pages is None]
        num_nodes = len(keys) - len(known) + len(on_host)
        rest = len(prompt) + num_new_tokens - len(keys) * self.index.tokens_per_node
        num_own = -(-rest // self._memory.page_size)

        self.hold(known)  # or they would be evicted to make room for themselves
        if not self._make_room(num_nodes * self._pages_per_node + num_own):
            self.let_go(known)
            return None
        nodes = known + self._add_nodes(keys[len(known) :], known[-1] if known else None)
        for node in nodes:
            if node.device_pages is None:
                node.device_pages = self._on_device.take(self._pages_per_node)
        for node in on_host:
            node.content = Content.LOADING
        self.index.touch(nodes)
        return Lease(nodes, on_host, self._on_device.take(num_own))

    def release(self, lease: Lease) -> None:
        """Give the pages of a request back; what is known of its prefix stays until room is needed."""
        self._on_device.give_back(lease.own_pages)
        self.let_go(lease.nodes)

    def hold(self, nodes: Iterable[Node]) -> None:
        """Keep nodes on the device until they are let go."""
        for node in nodes:
            node.users += 1

    def mark(self, nodes: Iterable[Node], content: Content) -> None:
        """Note how the load of nodes ended."""
        for node in nodes:
            node.content = content
            node.was_loaded |= content is Content.READY

    def let_go(self, nodes: Sequence[Node]) -> None:
        """Undo `hold`. What nobody needs any more, and was never computed, is forgotten."""
        for node in reversed(nodes):  # a parent after its children
            node.users -= 1
            if not node.users and node.device_pages is not None and node.content is Content.MISSING:
                self._leave_device(node)
                if node.host_pages is None:
                    self.index.remove(node)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def _add_nodes(self, keys: Iterable[bytes], parent: Node | None) -> list[Node]:
        added = []
        for key in keys:
            parent = self.index.add(key, parent)
            added.append(parent)
        self.hold(added)
        return added

    def _make_room(self, num_pages: int) -> bool:
        """Evict the coldest nodes, if that gives `num_pages` free pages on the device; else nothing."""
        short = num_pages - self._on_device.num_free
        if short <= 0:
            return True
        idle = [node for node in self.index if node.device_pages is not None and not node.users]
        num_victims = -(-short // self._pages_per_node)
        if num_victims > len(idle):
            return False
        self._evict(heapq.nsmallest(num_victims, idle, key=lambda node: node.coldness))
        return True

    def _evict(self, victims: Iterable[Node]) -> None:
        """Move nodes to the host, coldest first; those that are there already just leave the device."""
        moves = []
        for node in victims:
            assert node.device_pages is not None
            if node.host_pages is None and (pages := self._take_host_pages()) is not None:
                node.host_pages = pages
                moves.append((node, node.device_pages))
            self._leave_device(node)
            if node.host_pages is None:
                self.index.remove(node)
        # One that came to the host may have been pushed out again by a warmer one: its pages are the other's now.
        moves = [(node, pages) for node, pages in moves if node.host_pages is not None]
        if moves:
            self._memory.copy_to_host(
                [page for _, pages in moves for page in pages],
                [page for node, _ in moves for page in node.host_pages or ()],
            )

    def _take_host_pages(self) -> list[int] | None:
        """Host pages for one node, at the expense of the coldest there; None if that does not help."""
        while self._on_host.num_free < self._pages_per_node:
            there = [node for node in self.index if node.host_pages is not None and node.can_leave_host]
            if not there:
                return None
            self._leave_host(min(there, key=lambda node: node.coldness))
        return self._on_host.take(self._pages_per_node)

    def _leave_device(self, node: Node) -> None:
        assert node.device_pages is not None
        self._on_device.give_back(node.device_pages)
        node.device_pages = None
        node.content = Content.MISSING

    def _leave_host(self, node: Node) -> None:
        assert node.host_pages is not None
        self._on_host.give_back(node.host_pages)
        node.host_pages = None
        if node.device_pages is None:
            self.index.remove(node)

    # -- looking at itself --------------------------------------------------------------------------------------------

    def leaks(self) -> list[str]:
        """What is wrong while no request is under way and no node loading; nothing, if all is well.

        Every taken page belongs to exactly one node, nobody uses a node, and what is on the device has been computed.
        """
        problems = [f"node {node.id} is still in use" for node in self.index if node.users]
        problems += [
            f"node {node.id} is on the device with nothing in it"
            for node in self.index
            if node.device_pages is not None and node.content is not Content.READY
        ]
        for where, allocator, owned in (
            ("device", self._on_device, [page for node in self.index for page in node.device_pages or ()]),
            ("host", self._on_host, [page for node in self.index for page in node.host_pages or ()]),
        ):
            if len(owned) != len(set(owned)):
                problems.append(f"pages of the {where} belong to two nodes")
            if allocator.num_taken != len(set(owned)):
                problems.append(f"{allocator.num_taken} pages of the {where} are taken, {len(owned)} belong to nodes")
        return problems

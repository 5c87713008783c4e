"""Which prefixes have their KV cache somewhere, and where."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Content(Enum):
    """What the device pages of a node hold."""

    MISSING = "missing"
    """Nothing that can be trusted: it has to be computed."""
    LOADING = "loading"
    """A burst is writing them; a forward may read each layer behind that layer's wait."""
    READY = "ready"


@dataclass(eq=False)
class Node:
    """A run of prompt tokens behind the run that is its parent.

    Attributes:
        id: what load ops, acks and logs call it.
        key: hash of its tokens and all tokens before them.
        depth: how many nodes come before it.
        device_pages: where it is on the device, None if it is not.
        host_pages: where it is on the host, None if it is not.
        content: what its device pages hold.
        was_loaded: whether that, or what they held before, came back from the host.
        users: requests and reloads that need it where it is.
        last_used: when it was last used, in uses of the index; never later than its parent.
        num_children: nodes whose parent it is.
    """

    id: int
    key: bytes
    parent: Node | None
    depth: int
    device_pages: list[int] | None = None
    host_pages: list[int] | None = None
    content: Content = Content.MISSING
    was_loaded: bool = False
    users: int = 0
    last_used: int = 0
    num_children: int = field(default=0, repr=False)

    @property
    def can_leave_host(self) -> bool:
        """Whether its host pages can be given up: it is not being loaded from them, and what comes behind it can still
        be found."""
        return not self.users and (self.device_pages is not None or not self.num_children)

    @property
    def coldness(self) -> tuple[int, int]:
        """Sorts the coldest first, and a node before its parent."""
        return self.last_used, -self.depth


class PrefixIndex:
    """A tree of nodes, found by chained hashes.

    The key of a node stands for its own tokens and everything before them, as its KV cache depends on all of that. So
    a prefix is found without walking the tree, and two prompts share exactly the nodes of their common prefix.

    :param tokens_per_node: tokens of a node.
    """

    def __init__(self, tokens_per_node: int) -> None:
        self.tokens_per_node = tokens_per_node
        self._nodes: dict[bytes, Node] = {}
        self._ids = itertools.count(1)
        self._uses = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def keys_of(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of the nodes that a prompt is made of.

        The last token is never part of one: it has to go through the model, or there would be nothing to sample from.
        """
        keys, before = [], b""
        for end in range(self.tokens_per_node, len(prompt), self.tokens_per_node):
            tokens = array("q", prompt[end - self.tokens_per_node : end])
            before = hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
            keys.append(before)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[Node]:
        """Nodes of the longest known prefix."""
        known = itertools.takewhile(lambda node: node is not None, map(self._nodes.get, keys))
        return [node for node in known if node is not None]

    def add(self, key: bytes, parent: Node | None) -> Node:
        node = Node(next(self._ids), key, parent, depth=0 if parent is None else parent.depth + 1)
        self._nodes[key] = node
        if parent is not None:
            parent.num_children += 1
        return node

    def remove(self, node: Node) -> None:
        assert not node.num_children, "what comes behind a node cannot be found without it"
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1

    def touch(self, nodes: Iterable[Node]) -> None:
        """Note that the nodes, a whole prefix, are used now."""
        self._uses += 1
        for node in nodes:
            node.last_used = self._uses

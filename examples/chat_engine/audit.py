"""A witness of the KV cache's bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import torch

from .memory import Memory
from .prefix_index import Node


class Audit:
    """Remembers what each node's keys and values looked like when they were first seen, and compares from then on.

    One audit may watch several engines, one after the other: a node has the same key in each.

    Attributes:
        compared: how often a node was compared with the first look at it.
        compared_loaded: how often it had come back from the host meanwhile.
        differing: ids of those that differed.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, bytes] = {}
        self.compared = 0
        self.compared_loaded = 0
        self.differing: list[int] = []

    async def look_at(self, nodes: Sequence[Node], memory: Memory) -> None:
        """Look at nodes that are on the device, and held there meanwhile."""
        for node in nodes:
            fingerprint = await asyncio.to_thread(self._fingerprint, node, memory)
            self.compared += node.key in self._seen
            self.compared_loaded += node.key in self._seen and node.was_loaded
            if self._seen.setdefault(node.key, fingerprint) != fingerprint:
                self.differing.append(node.id)

    @staticmethod
    def _fingerprint(node: Node, memory: Memory) -> bytes:
        assert node.device_pages is not None
        digest = hashlib.sha1(usedforsecurity=False)
        for plane in memory.read(node.device_pages):
            digest.update(plane.view(torch.uint8).numpy().data)
        return digest.digest()

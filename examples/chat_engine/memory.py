"""The bytes of the KV cache: a pool on the device, a pool on the host, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache_sched.device import EmulatedDevice
from hicache_sched.pools import Pool, PoolPair


@dataclass(frozen=True)
class KvShape:
    """What a model's KV cache is made of.

    Attributes:
        num_layers: layers of the model.
        num_heads: KV heads.
        head_dim: elements of a head.
        dtype: the model's.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any) -> KvShape:
        config = model.config
        return cls(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, model.dtype)


class Memory:
    """Pools of a model's KV cache.

    :param shape: the model's KV cache.
    :param page_size: tokens of a page.
    :param device_pages: pages of the device pool.
    :param host_pages: pages of the host pool; with 0 there is none.
    :param runtime: `torch.cuda` or an emulated device, whose memory is CPU memory.
    """

    def __init__(self, shape: KvShape, page_size: int, device_pages: int, host_pages: int, runtime: Any) -> None:
        self.shape = shape
        self.page_size = page_size
        self.runtime = runtime
        self.torch_device = torch.device("cpu" if isinstance(runtime, EmulatedDevice) else "cuda")
        args = page_size, shape.num_layers, shape.num_heads, shape.head_dim, shape.dtype
        self.device_pool = Pool.mha(device_pages, *args, device=self.torch_device)
        self.host_pool = Pool.mha(host_pages, *args, layout="page_first_direct") if host_pages else None
        self.evict_stream = runtime.Stream()

    @property
    def pair(self) -> PoolPair:
        """The two pools, as loads need them."""
        assert self.host_pool is not None, "without a host pool nothing is loaded back"
        return PoolPair("kv", self.host_pool, self.device_pool)

    def token_indices(self, pages: Sequence[int]) -> torch.Tensor:
        """Indices of the pages' tokens, int64 [num_tokens].

        Made with numpy: a torch op gives up the GIL, and the engine scheduler might wait milliseconds to get it back.
        """
        first = np.asarray(pages, dtype=np.int64)[:, None] * self.page_size
        return torch.from_numpy((first + np.arange(self.page_size)).ravel())

    def copy_to_host(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages on the evict stream, which whoever writes to either of them next has to wait for.

        Whatever has been computed so far is in the pages, as the model thread waits for its forwards.
        """
        assert self.host_pool is not None
        planes = [
            (self._by_page(device), host)
            for device, host in zip(self.device_pool.planes, self.host_pool.planes, strict=True)
        ]
        if isinstance(self.runtime, EmulatedDevice):
            arrays = [(device.view(torch.uint8).numpy(), host.view(torch.uint8).numpy()) for device, host in planes]

            def copy() -> None:
                for device, host in arrays:
                    host[host_pages] = device[:, device_pages].swapaxes(0, 1)

            num_bytes = sum(host[0].nbytes for _, host in arrays) * len(host_pages)
            with self.runtime.stream(self.evict_stream):
                self.runtime.launch(copy, engine="d2h", nbytes=num_bytes)
        else:  # blocks; an engine for production gathers into pinned memory here and goes on
            with self.runtime.stream(self.evict_stream):
                for device, host in planes:
                    host[host_pages] = device[:, device_pages].transpose(0, 1).cpu()

    def read(self, device_pages: Sequence[int]) -> list[torch.Tensor]:
        """Keys and values of pages as they are on the device, each [num_layers, num_pages, page_size, ...], on the
        CPU."""
        return [self._by_page(plane)[:, device_pages].cpu() for plane in self.device_pool.planes]

    def _by_page(self, plane: torch.Tensor) -> torch.Tensor:
        """A plane of the device pool as [num_layers, num_pages, page_size, num_heads, head_dim]."""
        num_layers, _, num_heads, head_dim = plane.shape
        return plane.view(num_layers, -1, self.page_size, num_heads, head_dim)

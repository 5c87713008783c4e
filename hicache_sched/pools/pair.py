"""A pool on the host and the pool on the device that it is loaded into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache_sched.pools.pool import Pool


@dataclass(frozen=True, slots=True, eq=False)
class PoolPair:
    """Two pools of the same data: pages of `host` are loaded into pages of `device`.

    Layouts and numbers of pages may differ; what a token is may not. Where one side has pages for rows and the other
    tokens, tokens are copied.

    Attributes:
        name: what load ops, acks and errors call the pair.
        host: where pages come from, in CPU memory.
        device: where they go.
        layer_mapper: local layer of a transfer layer, None for a layer that the pools do not have; None itself
            where transfer layers and local layers are the same.

    Raises:
        ValueError: the two sides do not fit, or `name` is empty.
    """

    name: str
    host: Pool
    device: Pool
    layer_mapper: Callable[[int], int | None] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a pool pair needs a name: it is what errors and acks call it")
        host, device = self.host, self.device
        if host.device.type != "cpu":
            raise ValueError(f"pool pair {self.name!r}: the host pool is on {host.device}, it must be in CPU memory")
        for what, on_host, on_device in (
            ("layers", host.num_layers, device.num_layers),
            ("planes", len(host.geometry), len(device.geometry)),
            ("page size", host.page_size, device.page_size),
            ("dtype", host.dtype, device.dtype),
            ("bytes per token and plane", _bytes_per_token(host), _bytes_per_token(device)),
        ):
            if on_host != on_device:
                raise ValueError(
                    f"pool pair {self.name!r}: {what} differ, {on_host} on the host and {on_device} on the device; "
                    "both sides must hold the same data"
                )

    @property
    def num_layers(self) -> int:
        return self.device.num_layers

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a row that both sides have: of a page, or one."""
        return min(self.host.tokens_per_row, self.device.tokens_per_row)


def _bytes_per_token(pool: Pool) -> tuple[int, ...]:
    return tuple(plane.row_bytes // pool.tokens_per_row for plane in pool.geometry)

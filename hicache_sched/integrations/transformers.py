"""A `transformers` KV cache that lies in the pages of a pool, and whose layers wait for their own loads.

Needs the extra `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hicache_sched.errors import HiCacheSchedError
from hicache_sched.pools import Pool

__all__ = ["LayerLoad", "PagedCache"]

PageIds: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor


class LayerLoad(Protocol):
    """Pages on their way, layer by layer; a `LoadHandle` is one."""

    def wait_layer(self, layer: int) -> None:
        """Order the calling thread's current stream behind `layer`."""


class PagedCache(Cache):
    """The KV cache of one sequence, or of a batch of equally long ones, in pages of a device pool.

    Pass it to a model as `cache` (before transformers 5.24: `past_key_values`); the model needs no change. For
    layer i, `update` first calls `wait_layer(i)` of every load, then writes the new keys and values to their pages
    and returns those of the whole sequence. So a forward runs while its prefix is still being loaded, and each layer
    waits for its own pages only.

    A wait does not raise when its burst fails, as a forward under way cannot be interrupted: look at
    `LoadHandle.stale` before what the model returned is used, and where it is set, set `num_tokens` back and compute
    again. Set it back as well after a forward that raised.

    The cache refers to pages and never owns them: who allocates, shares, evicts and frees them is the engine.
    Sequences may share pages that hold nothing but tokens already there. Reading gathers the sequence's pages into
    fresh memory, of which the attention is given a view. No gradient flows through the cache. One thread at a time
    uses it, the one that launches the forward.

    :param pool: a pool of keys and values (two planes, as `Pool.mha` makes them), in any layout, with a layer for
        each of the model's and the model's dtype.
    :param page_ids: pages of the sequence in order, int [num_pages]; of a batch, int [batch, num_pages]. They bound
        how long the sequence can get.
    :param num_tokens: tokens of each sequence that the pages hold already or that are being loaded into them.
    :param loads: bursts that write these pages.
    :raises ValueError: the pool has no keys and values, a page is not in the pool, one that tokens are to be written
        to is named twice, or `num_tokens` does not fit the pages.
    :raises TypeError: a page or `num_tokens` is not a whole number.
    """

    def __init__(self, pool: Pool, page_ids: PageIds, *, num_tokens: int = 0, loads: Sequence[LayerLoad] = ()) -> None:
        if len(pool.geometry) != 2 or {len(shape) for shape in pool.token_shapes} != {2}:
            raise ValueError(
                "PagedCache needs a pool of keys and values, two planes with tokens of [num_heads, head_dim]; the "
                f"tokens of this one are {' and '.join(map(str, pool.token_shapes))}"
            )
        self._loads = list(loads)
        # Views that are made in inference mode could not be written through outside it.
        with torch.inference_mode(False):
            self._table = PageTable(pool, page_ids, num_tokens)
            self._paged = [PagedLayer(pool, layer, self._table, self._loads) for layer in range(pool.num_layers)]
        super().__init__(layers=list(self._paged))

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence that are in the cache; where the next forward goes on.

        Set it to go on elsewhere: behind pages that something else has filled, or back at what has to be computed
        again. Setting it touches no page.
        """
        return self.get_seq_length()

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        self._table.check_num_tokens(num_tokens)
        for layer in self._paged:
            layer.num_tokens = num_tokens

    @property
    def capacity(self) -> int:
        """Tokens of each sequence that the pages have room for."""
        return self._table.capacity

    @property
    def loads(self) -> tuple[LayerLoad, ...]:
        """Bursts that the layers wait for. Those that have landed cost a comparison a layer; set it to drop them."""
        return tuple(self._loads)

    @loads.setter
    def loads(self, loads: Sequence[LayerLoad]) -> None:
        self._loads[:] = loads

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`PagedLayer.update` of one layer.

        :raises IndexError: the pool has no such layer.
        :raises HiCacheSchedError: a forward begins, and the one before did not get through all layers of the pool.
        """
        if not 0 <= layer_idx < len(self._paged):
            raise IndexError(
                f"the model has a layer {layer_idx} and the pool {len(self._paged)} layers: make the pool with a layer "
                "for each of the model's"
            )
        if layer_idx == 0 and len({layer.num_tokens for layer in self._paged}) > 1:
            raise HiCacheSchedError(
                "the layers of the cache have different numbers of tokens: if a forward raised, set num_tokens back; "
                "if the model has fewer layers than the pool, make the pool with a layer for each of the model's"
            )
        return self._paged[layer_idx].update(key_states, value_states, *args, **kwargs)

    def __copy__(self) -> PagedCache:
        """:raises HiCacheSchedError: always, as both would write to the same pages."""
        raise _not_ours("be copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """:raises HiCacheSchedError: always, as that would copy the pool."""
        raise _not_ours("be copied")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """:raises HiCacheSchedError: always."""
        raise _not_ours("prefetch a layer")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """:raises HiCacheSchedError: always, as more sequences need more pages."""
        raise _not_ours("repeat the batch")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """:raises HiCacheSchedError: always, as the pages of the others would belong to nobody."""
        raise _not_ours("select from the batch")


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # its `__init_subclass__` is untyped
    """One layer of a `PagedCache`: its own length, and the rows of one layer of the pool."""

    is_initialized = True
    is_croppable = True

    def __init__(self, pool: Pool, layer: int, table: PageTable, loads: list[LayerLoad]) -> None:
        # Not the base class's: it assigns `keys` and `values`, which are read from the pool here.
        self.num_tokens = table.num_tokens
        self._layer = layer
        self._table = table
        self._loads = loads
        self._keys, self._values = (
            _in_pages(plane.layers[layer], pool, token_shape)
            for plane, token_shape in zip(pool.geometry, pool.token_shapes, strict=True)
        )

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self._table.batch_size

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override] # an attribute of the base class, but not to be assigned
        """Keys of the tokens so far, [batch, num_heads, num_tokens, head_dim]; a copy."""
        return self._read(self._keys)

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """Values of the tokens so far, [batch, num_heads, num_tokens, head_dim]; a copy."""
        return self._read(self._values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values behind the tokens so far, and return those of the whole sequence.

        :param key_states: [batch, num_heads, num_new, head_dim].
        :param value_states: [batch, num_heads, num_new, head_dim].
        :return: both [batch, num_heads, num_tokens + num_new, head_dim].
        :raises ValueError: they do not fit the pool or the batch, or the pages are full; nothing was written.
        """
        num_new = key_states.shape[2] if key_states.dim() == 4 else 0
        for states, rows, what in ((key_states, self._keys, "keys"), (value_states, self._values, "values")):
            self._check_states(states, rows, num_new, what)
        where = self._table.write_at(self.num_tokens, num_new)
        # Before the write, too: new tokens may share a page with loaded ones, which would land on top of them.
        self._wait()
        self._keys[where] = key_states.detach().transpose(1, 2)
        self._values[where] = value_states.detach().transpose(1, 2)
        self.num_tokens += num_new
        return self._gather(self._keys), self._gather(self._values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return self._table.capacity

    def reset(self) -> None:
        """Go back to no tokens; the pages stay as they are."""
        self.num_tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; as for a `DynamicCache`, their number is given as a negative one.

        :raises ValueError: `tokens_to_remove` is positive, or more than there are.
        """
        if not -self.num_tokens <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, here from -{self.num_tokens} to 0, "
                f"not {tokens_to_remove}"
            )
        self.num_tokens += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """:raises HiCacheSchedError: always, as beams would write to pages that others read."""
        raise _not_ours("reorder beams")

    def offload(self) -> None:
        """:raises HiCacheSchedError: always."""
        raise _not_ours("offload a layer")

    def prefetch(self) -> None:
        """:raises HiCacheSchedError: always."""
        raise _not_ours("prefetch a layer")

    def _wait(self) -> None:
        for load in self._loads:
            load.wait_layer(self._layer)

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        self._wait()
        return self._gather(rows)

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        table = self._table
        pages = rows.index_select(0, table.pages_of(self.num_tokens))
        return pages.view(table.batch_size, -1, *rows.shape[2:])[:, : self.num_tokens].transpose(1, 2)

    def _check_states(self, states: torch.Tensor, rows: torch.Tensor, num_new: int, what: str) -> None:
        takes = (self._table.batch_size, rows.shape[2], num_new, rows.shape[3]), rows.dtype, rows.device
        given = tuple(states.shape), states.dtype, states.device
        if given != takes:
            raise ValueError(
                f"layer {self._layer}: the cache takes {what} of shape (batch, num_heads, num_new, head_dim), dtype "
                f"and device {takes}, the model gives {given}: make the pool and page_ids for this model and batch"
            )


class PageTable:
    """The pages of each sequence; what all layers of a cache share.

    Which page and offset a forward's tokens have is the same for every layer, so it is worked out once.

    Attributes:
        batch_size: sequences.
        capacity: tokens of each sequence that the pages have room for.
        num_tokens: tokens of each sequence that were there at the start.
    """

    def __init__(self, pool: Pool, page_ids: PageIds, num_tokens: int) -> None:
        given = torch.as_tensor(page_ids, device="cpu")
        if given.dim() not in (1, 2) or not given.numel():
            raise ValueError(f"page_ids must be [num_pages] or [batch, num_pages], not {list(given.shape)}")
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"page_ids must be whole numbers, not {given.dtype}")
        # A copy: the caller may use its tensor for something else.
        on_host = given.to(torch.int64, copy=True).view(-1, given.shape[-1])
        lowest, highest = int(on_host.min()), int(on_host.max())
        if lowest < 0 or highest >= pool.num_pages:
            raise ValueError(
                f"page_ids must be pages of the pool, from 0 to {pool.num_pages - 1}; they go from {lowest} to "
                f"{highest}"
            )
        in_order = on_host.sort(1).values
        if (in_order[:, 1:] == in_order[:, :-1]).any():
            raise ValueError("page_ids name a page twice in one sequence")
        _, occurrence, occurrences = on_host.unique(return_inverse=True, return_counts=True)
        self._is_shared = occurrences[occurrence] > 1
        self.batch_size = on_host.shape[0]
        self.capacity = on_host.shape[1] * pool.page_size
        self.num_tokens = num_tokens
        self._page_size = pool.page_size
        self._pages = on_host.to(pool.device)
        self._write: tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None = None
        self._read: tuple[int, torch.Tensor] | None = None
        self.check_num_tokens(num_tokens)
        self._check_not_shared(num_tokens, self.capacity)

    def check_num_tokens(self, num_tokens: int) -> None:
        """:raises ValueError: the pages have no room for `num_tokens`."""
        if type(num_tokens) is not int:
            raise TypeError(f"num_tokens must be an int, not {num_tokens!r}")
        if not 0 <= num_tokens <= self.capacity:
            raise ValueError(f"num_tokens must be from 0 to {self.capacity}, the room in page_ids, not {num_tokens}")

    def write_at(self, begin: int, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page, [batch, num_new], and offset in it, [num_new], of `num_new` tokens from position `begin`.

        :raises ValueError: there is no room for them, or another sequence has a page that they would be written to.
        """
        if self._write is None or self._write[0] != (begin, num_new):
            if begin + num_new > self.capacity:
                raise ValueError(
                    f"no room for {num_new} more tokens: page_ids hold {self.capacity} and {begin} are taken; make the "
                    "cache with more pages"
                )
            self._check_not_shared(begin, begin + num_new)
            positions = torch.arange(begin, begin + num_new, device=self._pages.device)
            pages = self._pages.index_select(1, positions // self._page_size)
            self._write = (begin, num_new), (pages, positions % self._page_size)
        return self._write[1]

    def _check_not_shared(self, begin: int, end: int) -> None:
        if self._is_shared[:, begin // self._page_size : -(-end // self._page_size)].any():
            raise ValueError(
                f"tokens {begin} to {end - 1} would be written to a page that another sequence has, too: sequences can "
                "share only pages that are full of tokens already there, see num_tokens"
            )

    def pages_of(self, num_tokens: int) -> torch.Tensor:
        """Pages that hold the first `num_tokens` of every sequence, one sequence after the other, [batch * pages]."""
        num_pages = -(-num_tokens // self._page_size)
        if self._read is None or self._read[0] != num_pages:
            self._read = num_pages, self._pages[:, :num_pages].flatten()
        return self._read[1]


def _in_pages(rows: torch.Tensor, pool: Pool, token_shape: tuple[int, ...]) -> torch.Tensor:
    """One layer of a plane, uint8 [num_rows, row_bytes], as [num_pages, page_size, *token_shape]; a view."""
    num_pages, tokens_per_row = pool.num_pages, pool.tokens_per_row
    tokens: torch.Tensor = rows.view(pool.dtype).unflatten(1, (tokens_per_row, *token_shape))
    return tokens.view(num_pages, -1, *tokens.shape[1:]).flatten(1, 2)


def _not_ours(what: str) -> HiCacheSchedError:
    return HiCacheSchedError(f"a PagedCache cannot {what}: its pages are the engine's; make a cache of other pages")

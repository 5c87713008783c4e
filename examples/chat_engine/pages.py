"""Which pages of a pool are free."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out the pages of one pool and takes them back.

    :param num_pages: pages of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def take(self, num_pages: int) -> list[int]:
        """:raises ValueError: there are fewer free pages."""
        if num_pages > len(self._free):
            raise ValueError(f"{num_pages} pages asked for, {len(self._free)} of {self.num_pages} are free")
        split = len(self._free) - num_pages
        pages = self._free[split:]
        del self._free[split:]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """:raises ValueError: a page is not taken; nothing is given back then."""
        pages = list(pages)
        if not self._taken.issuperset(pages) or len(set(pages)) != len(pages):
            raise ValueError(f"pages {pages} are given back, but not all of them are taken")
        self._taken.difference_update(pages)
        self._free.extend(pages)

"""Pages are handed out once and come back once."""

from __future__ import annotations

import pytest

from chat_engine.pages import PageAllocator


def test_every_page_is_handed_out_once() -> None:
    pages = PageAllocator(5)
    assert sorted(pages.take(2) + pages.take(3)) == [0, 1, 2, 3, 4]
    assert (pages.num_free, pages.num_taken) == (0, 5)


def test_more_than_there_are_is_an_error_and_takes_none() -> None:
    pages = PageAllocator(5)
    pages.take(3)
    with pytest.raises(ValueError, match="3 pages asked for, 2 of 5 are free"):
        pages.take(3)
    assert pages.num_free == 2


def test_no_pages_are_always_there() -> None:
    assert PageAllocator(0).take(0) == []


@pytest.mark.parametrize("wrong", [[4], [0, 0], [0, 4]])
def test_giving_back_what_is_not_taken_is_an_error_and_gives_back_nothing(wrong: list[int]) -> None:
    pages = PageAllocator(5)
    pages.give_back(set(pages.take(5)) - {0, 1})
    with pytest.raises(ValueError, match="not all of them are taken"):
        pages.give_back(wrong)
    assert pages.num_taken == 2

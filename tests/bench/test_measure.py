"""Two sides of a ratio, measured in turns."""

from __future__ import annotations

import random

from hicache_sched.bench.measure import Ratio, Series, measure


def test_sides_are_measured_in_turns_in_random_order_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []
    rounds = 0

    def on_round() -> None:
        nonlocal rounds
        rounds += 1

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ratio = measure(lambda: side("a"), lambda: side("b"), rounds=20, rng=random.Random(1), on_round=on_round)

    pairs = [tuple(calls[start : start + 2]) for start in range(0, 42, 2)]
    assert {frozenset(pair) for pair in pairs} == {frozenset("ab")}
    assert {pair[0] for pair in pairs} == {"a", "b"}
    assert rounds == 21
    assert len(ratio.of.values) == len(ratio.to.values) == 20
    assert min(ratio.of.values + ratio.to.values) == 3, "the first two do not count"


def test_a_ratio_is_taken_round_by_round() -> None:
    ratio = Ratio(Series((2.0, 30.0, 4.0)), Series((1.0, 10.0, 4.0)))

    assert ratio.rounds.values == (2.0, 3.0, 1.0)
    assert ratio.rounds.median == 2.0
    assert ratio.rounds.spread == (1.5, 2.5)

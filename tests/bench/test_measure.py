"""Two sides of a ratio, measured in turns."""

from __future__ import annotations

import random

from hicache_sched.bench.measure import Series, measure, ratio


def test_sides_are_measured_in_turns_in_random_order_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []
    rounds = 0

    def on_round() -> None:
        nonlocal rounds
        rounds += 1

    def side(name: str) -> dict[str, float]:
        calls.append(name)
        return {"calls": len(calls), "twice": 2 * len(calls)}

    sides = {name: (lambda name=name: side(name)) for name in "abc"}
    measured = measure(sides, rounds=20, rng=random.Random(1), on_round=on_round)

    turns = [tuple(calls[start : start + 3]) for start in range(0, 63, 3)]
    assert {frozenset(turn) for turn in turns} == {frozenset("abc")}
    assert {turn[0] for turn in turns} == set("abc")
    assert rounds == 21
    assert {len(series.values) for side in measured.values() for series in side.values()} == {20}
    assert min(value for side in measured.values() for value in side["calls"].values) == 4, "three do not count"
    assert measured["a"]["twice"].values == tuple(2 * value for value in measured["a"]["calls"].values)


def test_a_ratio_is_taken_round_by_round() -> None:
    rounds = ratio(Series((2.0, 30.0, 4.0)), Series((1.0, 10.0, 4.0)))

    assert rounds.values == (2.0, 3.0, 1.0)
    assert rounds.median == 2.0
    assert rounds.spread == (1.5, 2.5)

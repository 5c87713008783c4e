"""Benchmarks as tests run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hicache_sched.bench.report import Report


class Bench(Protocol):
    @property
    def num_rounds(self) -> int: ...
    def run(self, on_round: Callable[[], None]) -> Report: ...


def report_of(bench: Bench) -> Report:
    """What a benchmark reports, which has told of as many rounds as it said it would."""
    rounds = 0

    def on_round() -> None:
        nonlocal rounds
        rounds += 1

    report = bench.run(on_round)

    assert rounds == bench.num_rounds
    return report

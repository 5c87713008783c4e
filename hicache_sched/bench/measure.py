"""Two sides of a ratio, measured in turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Side = Callable[[], float]
"""Does something once and gives what is measured, such as seconds."""


@dataclass(frozen=True)
class Series:
    """What one side measured, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def spread(self) -> tuple[float, float]:
        """The first and the third quartile."""
        low, high = np.quantile(self.values, [0.25, 0.75])
        return float(low), float(high)


@dataclass(frozen=True)
class Ratio:
    """Two sides and their ratio, round by round, so that what slows a machine down for a while slows both."""

    of: Series
    to: Series

    @property
    def rounds(self) -> Series:
        return Series(tuple(a / b for a, b in zip(self.of.values, self.to.values, strict=True)))


def measure(of: Side, to: Side, *, rounds: int, rng: random.Random, on_round: Callable[[], None]) -> Ratio:
    """Measure two sides in turns, in a random order within each round, after a round that does not count.

    :param on_round: called after each round, the first one included, for progress.
    """
    taken: dict[Side, list[float]] = {of: [], to: []}
    for number in range(rounds + 1):
        for side in rng.sample([of, to], 2):
            value = side()
            if number:
                taken[side].append(value)
        on_round()
    return Ratio(Series(tuple(taken[of])), Series(tuple(taken[to])))

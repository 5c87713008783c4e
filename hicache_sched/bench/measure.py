"""Sides of ratios, measured in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Side = Callable[[], Mapping[str, float]]
"""Does something once and gives what is measured, by name."""


@dataclass(frozen=True)
class Series:
    """What was measured of one side, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def spread(self) -> tuple[float, float]:
        """The first and the third quartile."""
        low, high = np.quantile(self.values, [0.25, 0.75])
        return float(low), float(high)


def ratio(of: Series, to: Series) -> Series:
    """Round by round, so that what slows a machine down for a while slows both."""
    return Series(tuple(a / b for a, b in zip(of.values, to.values, strict=True)))


def measure(
    sides: Mapping[str, Side], *, rounds: int, rng: random.Random, on_round: Callable[[], None]
) -> dict[str, dict[str, Series]]:
    """Measure sides in turns, in a random order within each round, after a round that does not count.

    :param on_round: called after each round, the first one included, for progress.
    :return: by side, by what is measured.
    """
    taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in rng.sample(list(sides), len(sides)):
            values = sides[name]()
            if number:
                taken[name].append(values)
        on_round()
    return {
        name: {what: Series(tuple(values[what] for values in all_values)) for what in all_values[0]}
        for name, all_values in taken.items()
    }

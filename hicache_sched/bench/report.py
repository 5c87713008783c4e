"""What was measured, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_sched.bench import machine
from hicache_sched.bench.measure import Series, ratio

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        what: what is measured, in words.
        case: which of several cases it is.
        result: the ratio of the sides, or what was measured where there are none.
        unit: of the sides, or of the result.
        sides: what a ratio is made of, by name.
        target: what the result should be, such as ">= 0.9"; None where there is no target.
    """

    what: str
    case: str
    result: Series
    unit: str
    sides: Mapping[str, Series] = field(default_factory=dict)
    target: str | None = None

    @classmethod
    def ratio(cls, what: str, case: str, unit: str, sides: Mapping[str, Series], target: str | None = None) -> Row:
        """The ratio of the first of two sides to the second."""
        of, to = sides.values()
        return cls(what, case, ratio(of, to), unit, sides, target)


@dataclass(frozen=True)
class Report:
    """What one benchmark measured.

    Attributes:
        name: of the benchmark.
        parameters: everything that it was run with.
        notes: what a reader has to know, such as what is emulated.
    """

    name: str
    parameters: Mapping[str, Any]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "machine": machine.describe(),
            "parameters": dict(self.parameters),
            "notes": list(self.notes),
            "results": [
                {
                    "what": row.what,
                    "case": row.case,
                    "unit": row.unit,
                    "sides": {name: _summary(side) for name, side in row.sides.items()},
                    "result": _summary(row.result) | {"target": row.target},
                }
                for row in self.rows
            ],
        }

    def print(self, console: Console) -> None:
        from rich.table import Table

        table = Table(title=f"{self.name}: medians (quartiles)", title_justify="left")
        for heading in ("what", "case", "sides", "result", "target"):
            table.add_column(heading, justify="right" if heading in ("result", "target") else "left")
        for row in self.rows:
            sides = "\n".join(f"{name} {_short(side)} {row.unit}" for name, side in row.sides.items())
            result = _short(row.result) if row.sides else f"{_short(row.result)} {row.unit}"
            table.add_row(row.what, row.case, sides, result, row.target)
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}")
        console.print(f"- with {_words(self.parameters)}", highlight=False)
        console.print(f"- on {_words(machine.describe())}", highlight=False)


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _summary(series: Series) -> dict[str, Any]:
    low, high = series.spread
    return {"median": series.median, "quartiles": [low, high], "rounds": list(series.values)}


def _short(series: Series) -> str:
    low, high = series.spread
    return f"{series.median:.3g} ({low:.3g} to {high:.3g})"

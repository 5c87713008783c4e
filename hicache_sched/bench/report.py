"""What was measured, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_sched.bench import machine
from hicache_sched.bench.measure import Ratio, Series

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """One ratio.

    Attributes:
        what: what is compared, in words.
        case: which of several cases it is.
        of, to: names of the two sides.
        unit: of what each side measures.
        target: what the ratio should be at least, None where there is none.
    """

    what: str
    case: str
    of: str
    to: str
    unit: str
    ratio: Ratio
    target: float | None = None


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
                    row.of: _summary(row.ratio.of),
                    row.to: _summary(row.ratio.to),
                    "ratio": _summary(row.ratio.rounds) | {"target": row.target},
                }
                for row in self.rows
            ],
        }

    def print(self, console: Console) -> None:
        from rich.table import Table

        table = Table(title=f"{self.name}: medians (quartiles)", title_justify="left")
        for heading in ("what", "case", "sides", "ratio", "target"):
            table.add_column(heading, justify="right" if heading in ("ratio", "target") else "left")
        for row in self.rows:
            sides = f"{row.of} {_short(row.ratio.of)} {row.unit}\n{row.to} {_short(row.ratio.to)} {row.unit}"
            target = "" if row.target is None else f">= {row.target:g}"
            table.add_row(row.what, row.case, sides, _short(row.ratio.rounds), target)
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}")


def _summary(series: Series) -> dict[str, Any]:
    low, high = series.spread
    return {"median": series.median, "quartiles": [low, high], "rounds": list(series.values)}


def _short(series: Series) -> str:
    low, high = series.spread
    return f"{series.median:.3g} ({low:.3g} to {high:.3g})"

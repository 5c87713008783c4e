"""`bench overlap`: a makespan is never below its optimum, and the optimum is that of the recurrence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_sched.bench.overlap import RATIOS, WAYS, OverlapBench, optimum_ms
from tests.bench.reporting import report_of
from tests.bench.test_command import run


@pytest.mark.parametrize(
    ("times", "optimum"),
    [
        ({"copy_ms": 2, "compute_ms": 1, "enqueue_ms": 0}, 3 * 2 + 1),  # the last layer is left to be computed
        ({"copy_ms": 1, "compute_ms": 2, "enqueue_ms": 0}, 1 + 3 * 2),  # the first is to be copied
        ({"copy_ms": 1, "compute_ms": 1, "enqueue_ms": 3}, 3 * 3 + 1 + 1),
    ],
)
def test_the_optimum_of_three_layers(times: dict[str, float], optimum: float) -> None:
    assert optimum_ms(3, **times) == optimum


def test_every_case_is_measured_and_none_is_faster_than_its_optimum() -> None:
    bench = OverlapBench(layers=3, copy_ms=1.0, enqueue_ms=1.0, rounds=3, seed=0)
    report = report_of(bench)

    makespans = [row for row in report.rows if row.what == "makespan to its optimum"]
    assert len({row.case for row in makespans}) == len(makespans) == 2 * len(WAYS) * len(RATIOS) * 2
    assert min(value for row in makespans for value in row.result.values) >= 1
    hidden = [row for row in report.rows if row.what == "copy time hidden"]
    assert len(hidden) == len(makespans) / 2
    assert max(value for row in hidden for value in row.result.values) <= 100


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"

    small = ["--layers", "2", "--copy-ms", "0.5", "--enqueue-ms", "0", "--rounds", "3"]
    ended = run("bench", "overlap", *small, "--json", str(file))

    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(file.read_text())["benchmark"] == "overlap"

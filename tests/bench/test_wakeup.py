"""`bench wakeup`: what it measures of waiters is between a layer's landing and theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_sched.bench.wakeup import PLANES, WAITERS, Point, WakeupBench
from tests.bench.reporting import report_of
from tests.bench.test_command import run


def test_every_waiter_of_every_plane_is_measured_and_none_goes_on_before_its_layer_has_landed() -> None:
    bench = WakeupBench(bursts=2, window=0.01, rounds=3, seed=0)
    report = report_of(bench)

    waits = [(row.what, row.case) for row in report.rows if row.what != "CPU time"]
    assert waits == [
        (f"landed to resumed, {point}", f"{waiter}, {plane} plane")
        for plane in PLANES
        for waiter in WAITERS
        for point in ("p50", "p99")
    ]
    assert all(value > 0 for row in report.rows if row.what != "CPU time" for value in row.result.values)
    assert [row.case for row in report.rows if row.what == "CPU time"] == [
        f"{state}, {plane} plane" for plane in PLANES for state in ("idle", "waiting")
    ]


def test_ctrl_c_while_a_burst_is_held_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(point: Point) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Point, "let_land", interrupt)
    with pytest.raises(KeyboardInterrupt):
        WakeupBench(bursts=1, window=0.01, rounds=3, seed=0).run(lambda: None)


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "wakeup.json"

    ended = run("bench", "wakeup", "--bursts", "1", "--window", "0.01", "--rounds", "3", "--json", str(file))

    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(file.read_text())["benchmark"] == "wakeup"

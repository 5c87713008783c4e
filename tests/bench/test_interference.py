"""`bench interference`: each way loads the same bytes, and what it prints is what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_sched.bench.interference import ALONE, LOADS, WAYS, InterferenceBench
from hicache_sched.bench.workload import make_op, make_pair
from hicache_sched.device import EmulatedDevice
from tests.bench.reporting import report_of
from tests.bench.test_command import run


@pytest.mark.parametrize("name", WAYS)
def test_each_way_loads_every_byte_of_every_burst(name: str) -> None:
    pair, op = make_pair(4, 3, 512, "page_first_direct"), make_op(4, seed=0)
    with EmulatedDevice() as device, WAYS[name](device, pair, op) as hand_out:
        for _ in range(5):
            for plane in pair.device.planes:
                plane.fill_(2)
            burst = hand_out()
            burst.wait_layer(0)
            assert burst.layer_landed(0)
            burst.wait_layer(2)
            while not burst.done():
                pass
            for plane in pair.device.planes:
                assert (plane[:, op.device_indices] == 1).all()
                assert (plane == 2).sum() == plane.numel() // 2


def test_every_way_is_measured_under_every_load() -> None:
    bench = InterferenceBench("emulated", layers=2, pages=4, row_bytes=512, window=0.01, rounds=3, seed=0)
    report = report_of(bench)

    cases = [row.case for row in report.rows if row.what == "burst latency"]
    assert cases == [f"{way}, {load}" for way in WAYS for load in LOADS]
    for row in report.rows:
        assert len(row.result.values) == 3
        if row.what != "longest pause beyond its own":
            assert min(row.result.values) > 0


class Clock:
    """Stands in for the `time` module: only steps take time, as many seconds as they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class ScriptedBurst:
    """Its first layer has landed when it has been looked at twice, and all of it after four times."""

    def __init__(self) -> None:
        self._looks = 0

    def done(self) -> bool:
        self._looks += 1
        return self._looks >= 4

    def layer_landed(self, layer: int) -> bool:
        return self._looks >= 2

    def wait_layer(self, layer: int) -> None:
        self._looks = 4


def test_the_first_burst_of_a_window_is_not_counted_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, bursts = Clock(), []
    monkeypatch.setattr("hicache_sched.bench.interference.time", clock)

    def hand_out() -> ScriptedBurst:
        bursts.append(ScriptedBurst())
        return bursts[-1]

    def step() -> None:
        seconds = {1: 1.0, 2: 50.0}.get(len(bursts), 2.0)  # the first is waited for, before the steps without
        clock.now += seconds if len(bursts) < 7 else 1.0

    with EmulatedDevice() as device:
        bench = InterferenceBench("emulated", layers=4, pages=4, row_bytes=512, window=30.0, rounds=3, seed=0)
        measured = bench._busy(device, step, hand_out)

    assert len(bursts) == 7, "one before each time without bursts, one that is not counted, and four of 8 seconds"
    assert measured == {
        "latency": 8e3,
        "first layer": 4e3,
        "rate": 0.5,
        "pause": 2e3,
        "rate without": 1.0,
        "pause without": 1e3,
    }


def test_a_rate_is_set_against_that_beside_the_copies_alone() -> None:
    bench = InterferenceBench("emulated", layers=2, pages=4, row_bytes=512, window=0.01, rounds=3, seed=0)
    rows = {(row.what, row.case): row for row in report_of(bench).rows}

    what = "the engine's own rate"
    for (name, case), row in rows.items():
        if name == f"{what}, to that beside {ALONE}":
            own, beside = row.sides.values()
            assert own == rows[what, case].result
            assert beside == rows[what, f"{ALONE}, {case.rpartition(', ')[2]}"].result


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "interference.json"

    small = ["--layers", "2", "--pages", "4", "--row-bytes", "512", "--window", "0.01", "--rounds", "3"]
    ended = run("bench", "interference", *small, "--json", str(file))

    assert (ended.returncode, ended.stderr) == (0, "")
    written = json.loads(file.read_text())
    assert written["benchmark"] == "interference"
    assert written["parameters"]["burst_bytes"] == 4 * 2 * 512 * 2
    targets = {result["what"]: result["result"]["target"] for result in written["results"]}
    assert targets == {
        "first layer landed after": "<= 1",
        "burst latency": "<= 1.5",
        "the engine's own rate": ">= 0.95",
        "the engine's own rate, to that beside copies alone": None,
        "longest pause beyond its own": "<= 1",
    }

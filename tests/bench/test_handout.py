"""`bench handout`: every way loads the same bytes, and what it prints is what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_sched.bench import handout
from hicache_sched.bench.handout import WAYS, HandoutBench, two_pools
from hicache_sched.bench.workload import hand_out
from hicache_sched.device import EmulatedDevice
from tests.bench.reporting import report_of
from tests.bench.test_command import run


@pytest.mark.parametrize("name", WAYS)
def test_each_way_loads_every_byte_of_both_pools(name: str) -> None:
    load = two_pools(pages=4, layers=3, row_bytes=64, seed=0)
    with EmulatedDevice() as device, WAYS[name].scheduler(device, load.pairs) as scheduler:
        hand_out(scheduler, load.op).result(20)
    for pair, tokens in zip(load.pairs, load.op.all_device_indices, strict=True):
        for plane in pair.device.planes:
            assert (plane[:, tokens] == 1).all()
            assert (plane == 2).sum() == plane.numel() // 2


def test_every_way_and_everything_that_grows_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (("SMALL", 4), ("LAYERS", (2, 3)), ("PAGES", (4, 8))):
        monkeypatch.setattr(handout, name, values)
    bench = HandoutBench("emulated", layers=2, pages=4, row_bytes=64, growth=True, hand_outs=3, rounds=3, seed=0)
    report = report_of(bench)

    assert [row.case for row in report.rows if row.what == "blocked in a hand-out, p50"] == list(WAYS)[1:]
    grown = ["2 layers x 4 pages", "3 layers x 4 pages", "2 layers x 8 pages", "1 in flight", "2 in flight"]
    for what in ("load() before it, p50", "hand-out, p50", "hand-out, p99"):
        assert [row.case for row in report.rows if row.what == what] == grown
    after_a_pause = [f"{name}, {handout.PAUSED}" for name in grown[:3]]
    assert [row.case for row in report.rows if row.what == "growth of p50"] == [
        *(grown[1], after_a_pause[1], grown[2], after_a_pause[2], grown[3], grown[4]),
    ]
    assert all(value > 0 for row in report.rows for value in row.result.values)


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "handout.json"

    small = ["--layers", "2", "--pages", "4", "--row-bytes", "64", "--hand-outs", "3", "--no-growth"]
    ended = run("bench", "handout", *small, "--device", "emulated", "--json", str(file))

    assert (ended.returncode, ended.stderr) == (0, "")
    written = json.loads(file.read_text())
    assert written["benchmark"] == "handout"
    assert written["parameters"]["layers"] == 2
    assert "the device is emulated" in written["notes"][0]

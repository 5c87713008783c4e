"""`python -m hicache_sched bench`, as it is run."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hicache_sched.bench import cli
from hicache_sched.bench.copy import CopyBench
from hicache_sched.bench.workload import make_op, runtime_of
from hicache_sched.pools import Layout

SMALL = ["--pages", "4", "--layers", "2", "--row-bytes", "512", "--rounds", "3", "--device", "emulated"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hicache_sched", *args], capture_output=True, text=True, timeout=100, check=False
    )


def test_bench_copy_prints_a_table_and_writes_every_round_with_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "copy.json"

    ended = run("bench", "copy", *SMALL, "--json", str(file), "--seed", "3")

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "throughput" in ended.stdout
    for said in ("the device is emulated", "row_bytes 512", f"python {platform.python_implementation()}"):
        assert said in ended.stdout
    written = json.loads(file.read_text())
    assert written["parameters"] == {
        "device": "emulated",
        "pages": 4,
        "layers": 2,
        "row_bytes": 512,
        "rounds": 3,
        "seed": 3,
        "burst_bytes": 4 * 2 * 512 * 2,
    }
    assert {"cpu", "cores", "python", "torch", "accelerator"} <= written["machine"].keys()
    assert [(result["what"], result["case"]) for result in written["results"]] == [
        (what, f"{layout}, {copied} bytes a copy")
        for layout, copied in (("layer_first", 512), ("page_first", 32), ("page_first_direct", 512))
        for what in ("throughput", "planning a layer")
    ]
    for result in written["results"]:
        of, to = result["sides"].values()
        assert len(of["rounds"]) == 3
        assert result["result"]["rounds"] == [a / b for a, b in zip(of["rounds"], to["rounds"], strict=True)]
        low, high = result["result"]["quartiles"]
        assert 0 < low <= result["result"]["median"] <= high
    assert {result["result"]["target"] for result in written["results"]} == {None}, "the target is for 64 KiB"


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_what_is_measured_is_a_burst_that_moves_every_byte_it_should(layout: Layout) -> None:
    bench = CopyBench("emulated", pages=4, layers=2, row_bytes=512, rounds=3, seed=0)
    pair, op = bench._pair(layout, False), make_op(4, seed=0)
    loaded = torch.zeros(pair.device.num_tokens, dtype=torch.bool)
    loaded[op.device_indices] = True

    with runtime_of(bench.device) as runtime:
        bench._throughput(pair, op, runtime, random.Random(0), lambda: None)

    assert bench.nbytes == sum(plane[:, loaded].nbytes for plane in pair.device.planes)
    for plane in pair.device.planes:
        assert (plane[:, loaded] == 1).all()
        assert (plane[:, ~loaded] == 2).all()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--row-bytes", "100"], "--row-bytes must be a multiple of 32"),
        (["--device", "tpu"], "--device must be auto, emulated or cuda"),
        (["--rounds", "1"], "'--rounds'"),
        (["--seed", "-1"], "'--seed'"),
        (["--json", "no/such/folder.json"], "there is no folder"),
        (["--json", "/"], "is a folder"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(args: list[str], words: str) -> None:
    ended = run("bench", "copy", *args)

    assert ended.returncode == 2
    assert words in ended.stderr


@pytest.mark.parametrize("name", ["overlap", "wakeup", "serving"])
def test_what_is_about_an_emulated_device_runs_on_no_other(name: str) -> None:
    ended = run("bench", name, "--device", "cuda")

    assert ended.returncode == 2
    assert "--device must be auto or emulated" in ended.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_not_there_is_an_error() -> None:
    ended = run("bench", "copy", "--device", "cuda")

    assert ended.returncode == 2
    assert "needs a GPU" in ended.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import hicache_sched.__main__ as m; m.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 1
    assert "pip install 'hicache-sched[bench]'" in ended.stderr


def test_all_of_them_run_one_after_the_other_and_each_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, Path | None]] = []
    monkeypatch.setattr(cli, "_run", lambda name, num_rounds, run, json: started.append((name, json)))

    cli.bench_all(json=tmp_path / "results", device="emulated", seed=1)

    commands = [command.name for command in cli.app.registered_commands if command.name != "all"]
    assert sorted(name for name, _ in started) == sorted(str(name) for name in commands)
    assert [json for _, json in started] == [tmp_path / "results" / f"{name}.json" for name, _ in started]
    assert (tmp_path / "results").is_dir()

"""The command line of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hicache_sched.bench.copy import HEADS, PAGE_SIZE, CopyBench
from hicache_sched.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure; every figure is a ratio of two sides measured in one run.")


@app.callback()
def _benchmarks() -> None:
    """Keeps `copy` a command of its own while it is the only one."""


Json = Annotated[Path | None, typer.Option("--json", help="Write the results, with every round, to this file.")]
Device = Annotated[str, typer.Option(help="auto, emulated or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is random.")]
Rounds = Annotated[int, typer.Option(min=3, help="How often each side is measured.")]


@app.command("copy")
def bench_copy(
    json: Json = None,
    device: Device = "auto",
    seed: Seed = 0,
    rounds: Rounds = 15,
    pages: Annotated[int, typer.Option(min=1, help="Pages of a burst.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the pools.")] = 8,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a page in one layer of K, and of V.")] = 65536,
) -> None:
    """A burst's throughput against one large copy, and its planning against a loop over pages, in every host layout."""
    if row_bytes % (PAGE_SIZE * HEADS):
        raise typer.BadParameter(f"--row-bytes must be a multiple of {PAGE_SIZE * HEADS}, not {row_bytes}")
    bench = CopyBench(_resolve(device), pages, layers, row_bytes, rounds, seed)
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("copy", total=bench.num_rounds)
        report = bench.run(lambda: progress.advance(task))
    _finish(report, json, console)


def _resolve(device: str) -> str:
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_cuda else "emulated"
    if device not in ("emulated", "cuda"):
        raise typer.BadParameter(f"--device must be auto, emulated or cuda, not {device!r}")
    if device == "cuda" and not has_cuda:
        raise typer.BadParameter("--device cuda needs a GPU, and torch.cuda finds none: use --device emulated")
    return device


def _finish(report: Report, json: Path | None, console: Console) -> None:
    report.print(console)
    if json is not None:
        report.write_json(json)
        console.print(f"written to {json}")

"""The command line of the benchmarks."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hicache_sched.bench.copy import CopyBench
from hicache_sched.bench.handout import HandoutBench
from hicache_sched.bench.interference import InterferenceBench
from hicache_sched.bench.overlap import OverlapBench
from hicache_sched.bench.plot import write_plot
from hicache_sched.bench.prefill_engine import PAGE_SIZE
from hicache_sched.bench.record import record_overlap
from hicache_sched.bench.report import Report
from hicache_sched.bench.serving import ServingBench
from hicache_sched.bench.timeline import write_trace
from hicache_sched.bench.wakeup import WakeupBench
from hicache_sched.bench.workload import ROW_UNIT

app = typer.Typer(no_args_is_help=True, help="Measure; both sides of a ratio in one run, in turns.")


Json = Annotated[Path | None, typer.Option("--json", help="Write the results, with every round, to this file.")]
Device = Annotated[str, typer.Option(help="auto, emulated or cuda.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything that is random.")]
EmulatedOnly = Annotated[
    str, typer.Option("--device", help="auto or emulated: it takes a device whose times can be set.")
]
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
    _check_row_bytes(row_bytes)
    bench = CopyBench(_resolve(device), pages, layers, row_bytes, rounds, seed)
    _run("copy", bench.num_rounds, bench.run, json)


@app.command("handout")
def bench_handout(
    json: Json = None,
    device: Device = "auto",
    seed: Seed = 0,
    rounds: Rounds = 3,
    pages: Annotated[int, typer.Option(min=1, help="Pages of a burst in each of two pools.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the pools.")] = 78,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a page in one layer of K, and of V.")] = 256,
    growth: Annotated[bool, typer.Option(help="Measure hand-outs of other sizes, and behind others, as well.")] = True,
    hand_outs: Annotated[int, typer.Option(min=1, help="Async hand-outs for each figure.")] = 200,
) -> None:
    """How long a hand-out blocks the engine scheduler: inline with one copy per page, inline batched, and async."""
    _check_row_bytes(row_bytes)
    bench = HandoutBench(_resolve(device), layers, pages, row_bytes, growth, hand_outs, rounds, seed)
    _run("handout", bench.num_rounds, bench.run, json)


@app.command("interference")
def bench_interference(
    json: Json = None,
    device: Device = "auto",
    seed: Seed = 0,
    rounds: Rounds = 15,
    pages: Annotated[int, typer.Option(min=1, help="Pages of a burst.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the pools.")] = 78,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a page in one layer of K, and of V.")] = 8192,
    window: Annotated[float, typer.Option(min=0.01, help="Seconds of bursts for each figure.")] = 0.1,
) -> None:
    """Bursts while the engine scheduler is idle, runs pure Python, or mixes Python and small torch operations."""
    _check_row_bytes(row_bytes)
    bench = InterferenceBench(_resolve(device), layers, pages, row_bytes, window, rounds, seed)
    _run("interference", bench.num_rounds, bench.run, json)


@app.command("overlap")
def bench_overlap(
    json: Json = None,
    device: EmulatedOnly = "auto",
    seed: Seed = 0,
    rounds: Rounds = 5,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    copy_ms: Annotated[float, typer.Option(min=0.01, max=1e6, help="Time of a layer's copies on the link.")] = 1.0,
    enqueue_ms: Annotated[float, typer.Option(min=0, help="CPU time to submit a layer that is not planned.")] = 2.4,
    trace: Annotated[
        Path | None,
        typer.Option(help="Record some more bursts each way; write a trace of one, for ui.perfetto.dev."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="The same as a picture, a PNG.")] = None,
) -> None:
    """A layer-wise forward while its layers are loaded: makespan against optimum, and the copy time that it hides."""
    _check_emulated(device)
    _check_file("--trace", trace)
    _check_file("--plot", plot)
    if trace is not None and trace == plot:
        raise typer.BadParameter(f"--trace and --plot are the same file: {trace}")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'hicache-sched[bench]'")
    bench = OverlapBench(layers, copy_ms, enqueue_ms, rounds, seed)
    _run("overlap", bench.num_rounds, bench.run, json)
    if trace is None and plot is None:
        return
    timelines = record_overlap(bench)
    for file, write in ((trace, write_trace), (plot, write_plot)):
        if file is not None:
            write(file, timelines)
            Console().print(f"written to {file}")


@app.command("wakeup")
def bench_wakeup(
    json: Json = None,
    device: EmulatedOnly = "auto",
    seed: Seed = 0,
    rounds: Rounds = 5,
    bursts: Annotated[int, typer.Option(min=1, help="Bursts of four layers for each figure.")] = 25,
    window: Annotated[float, typer.Option(min=0.01, help="Seconds for which CPU time is counted.")] = 0.5,
) -> None:
    """How soon a coroutine and a blocked thread go on when their layer has landed, and what waiting costs."""
    _check_emulated(device)
    bench = WakeupBench(bursts, window, rounds, seed)
    _run("wakeup", bench.num_rounds, bench.run, json)


@app.command("serving")
def bench_serving(
    json: Json = None,
    device: EmulatedOnly = "auto",
    seed: Seed = 0,
    rounds: Rounds = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests to serve.")] = 500,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients; each sends when its last was served.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Requests that are computed together.")] = 16,
    prefixes: Annotated[int, typer.Option(min=1, help="Prefixes that requests share.")] = 64,
    prefix_pages: Annotated[int, typer.Option(min=1, help=f"Pages, of {PAGE_SIZE} tokens, of a prefix.")] = 64,
    device_prefixes: Annotated[int, typer.Option(min=1, help="Prefixes that the device has room for.")] = 24,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a request, on average.")] = 8500,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 78,
    token_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token and layer in the anchor pool.")] = 1152,
    side_token_bytes: Annotated[int, typer.Option(min=1, help="The same in the side pool.")] = 132,
    link_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Link from host to device.")] = 50.0,
    submit_ms: Annotated[float, typer.Option(min=0, help="CPU time to submit a layer of a pool, page by page.")] = 2.4,
    compute_us: Annotated[float, typer.Option(min=0, help="Time to compute a token, in all layers.")] = 25.0,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a forward.")] = 16384,
    request_cpu_ms: Annotated[float, typer.Option(min=0, help="CPU time of the engine for each request.")] = 2.0,
    scale: Annotated[float, typer.Option(min=0.001, help="Of all these times, so that it takes less long.")] = 0.1,
) -> None:
    """Requests with shared prefixes through an engine that loads inline, on a plain thread, or by this package."""
    _check_emulated(device)
    needed = min(batch, prefixes)
    if device_prefixes < needed:
        raise typer.BadParameter(f"--device-prefixes must be at least {needed}, which a batch may need")
    bench = ServingBench(
        requests=requests,
        concurrency=concurrency,
        batch=batch,
        prefixes=prefixes,
        prefix_pages=prefix_pages,
        device_prefixes=device_prefixes,
        new_tokens=new_tokens,
        layers=layers,
        token_bytes=token_bytes,
        side_token_bytes=side_token_bytes,
        link_gb_per_s=link_gb_per_s,
        submit_ms=submit_ms,
        compute_us=compute_us,
        chunk=chunk,
        request_cpu_ms=request_cpu_ms,
        scale=scale,
        rounds=rounds,
        seed=seed,
    )
    _run("serving", bench.num_rounds, bench.run, json)


@app.command("all")
def bench_all(
    json: Annotated[Path | None, typer.Option("--json", help="Write a file for each into this folder.")] = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """All of them, one after the other, as they are where nothing is said."""
    device = _resolve(device)
    if json is not None:
        try:
            json.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise typer.BadParameter(f"--json {json} cannot be a folder: {exc.strerror}") from None

    def file(name: str) -> Path | None:
        return None if json is None else json / f"{name}.json"

    bench_copy(json=file("copy"), device=device, seed=seed)
    bench_handout(json=file("handout"), device=device, seed=seed)
    bench_interference(json=file("interference"), device=device, seed=seed)
    bench_overlap(json=file("overlap"), seed=seed)
    bench_wakeup(json=file("wakeup"), seed=seed)
    bench_serving(json=file("serving"), seed=seed)


class _Run(Protocol):
    def __call__(self, on_round: Callable[[], None]) -> Report: ...


def _run(name: str, num_rounds: int, run: _Run, json: Path | None) -> None:
    _check_file("--json", json)
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=num_rounds)
        report = run(lambda: progress.advance(task))
    report.print(console)
    if json is not None:
        report.write_json(json)
        console.print(f"written to {json}")


def _check_file(option: str, file: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise typer.BadParameter(f"{option} {file} is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{option} {file} cannot be written")


def _check_row_bytes(row_bytes: int) -> None:
    if row_bytes % ROW_UNIT:
        raise typer.BadParameter(f"--row-bytes must be a multiple of {ROW_UNIT}, not {row_bytes}")


def _check_emulated(device: str) -> None:
    if device not in ("auto", "emulated"):
        raise typer.BadParameter(f"--device must be auto or emulated here, not {device!r}")


def _resolve(device: str) -> str:
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_cuda else "emulated"
    if device not in ("emulated", "cuda"):
        raise typer.BadParameter(f"--device must be auto, emulated or cuda, not {device!r}")
    if device == "cuda" and not has_cuda:
        raise typer.BadParameter("--device cuda needs a GPU, and torch.cuda finds none: use --device emulated")
    return device

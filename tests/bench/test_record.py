"""What is recorded of a burst and its forward, and the options of `bench overlap` that write it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from hicache_sched.bench import cli, record
from hicache_sched.bench.overlap import OverlapBench
from hicache_sched.bench.record import burst_spans, record_overlap
from hicache_sched.bench.timeline import Kind, Span, Timeline
from hicache_sched.burst_times import BurstTimes
from hicache_sched.device import EmulatedDevice
from hicache_sched.device.emulated_core import DeviceOperation, EngineName
from tests.bench.test_command import run
from tests.bench.timelines import ms, read_trace, tracks_of

LAYERS = 4
SMALL = ["--layers", str(LAYERS), "--copy-ms", "0.5", "--enqueue-ms", "1", "--rounds", "3"]


def of_kind(timeline: Timeline, kind: Kind) -> list[Span]:
    return [span for span in timeline.spans if span.kind == kind]


@pytest.fixture(scope="module")
def timelines() -> Sequence[Timeline]:
    return record_overlap(OverlapBench(layers=LAYERS, copy_ms=0.5, enqueue_ms=1.0, rounds=3, seed=0))


# -- what is recorded -----------------------------------------------------------------------------------------


def test_inline_is_recorded_and_then_async(timelines: Sequence[Timeline]) -> None:
    assert [timeline.title for timeline in timelines] == ["inline, 1 ms of CPU to submit a layer", "async, planned"]


def test_every_layer_is_copied_and_computed_once_and_in_order(timelines: Sequence[Timeline]) -> None:
    kinds: list[Kind] = ["copy", "forward"]
    for timeline in timelines:
        for kind in kinds:
            spans = of_kind(timeline, kind)
            assert [span.layer for span in spans] == [*range(LAYERS)]
            assert all(later.begin >= earlier.end for earlier, later in pairwise(spans))
            assert all(span.end > span.begin for span in spans)


def test_no_layer_is_computed_before_it_was_copied(timelines: Sequence[Timeline]) -> None:
    for timeline in timelines:
        for copy, forward in zip(of_kind(timeline, "copy"), of_kind(timeline, "forward"), strict=True):
            assert forward.begin >= copy.end


def test_nothing_is_copied_before_the_hand_out_or_computed_after_the_end(timelines: Sequence[Timeline]) -> None:
    for timeline in timelines:
        (handed_out,) = of_kind(timeline, "hand-out")
        assert timeline.start == handed_out.begin
        for span in (*of_kind(timeline, "copy"), *of_kind(timeline, "forward")):
            assert timeline.start <= span.begin <= span.end <= timeline.end


def test_inline_the_forward_is_launched_when_every_layer_was_submitted(timelines: Sequence[Timeline]) -> None:
    inline, _ = timelines
    (handed_out,) = of_kind(inline, "hand-out")
    assert of_kind(inline, "forward")[0].begin >= handed_out.end
    assert of_kind(inline, "copy")[0].begin < handed_out.end


def test_what_is_kept_of_several_has_the_median_makespan(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([9.0, 3.0, 1.0, 2.0] * 2)  # the first does not count
    make = lambda title, *_: Timeline(title, (Span("h2d engine", "copy", ms(0), ms(next(taken))),))  # noqa: E731
    monkeypatch.setattr(record, "record_forward", make)
    recorded = record_overlap(OverlapBench(layers=1, copy_ms=0.5, enqueue_ms=1.0, rounds=3, seed=0))
    assert [timeline.makespan for timeline in recorded] == [pytest.approx(2e-3)] * 2


# -- waits ----------------------------------------------------------------------------------------------------


def operations(*times: tuple[float, float], engine: str = "compute") -> list[DeviceOperation]:
    return [DeviceOperation(cast("EngineName", engine), None, ms(begin), ms(end)) for begin, end in times]


def launches(*times: tuple[float, float]) -> list[record._Launch]:
    return [record._Launch(ms(asked), ms(launched)) for asked, launched in times]


def waits(spans: Any) -> list[tuple[float, float, int | None]]:
    return [(span.begin, span.end, span.layer) for span in spans if span.kind == "wait"]


def test_the_compute_engine_waits_where_it_is_free_and_a_layer_launched_that_has_not_landed() -> None:
    spans = record._forwards(launches((0, 1), (1, 1), (1, 9)), operations((3, 4), (6, 7), (9, 10)))
    assert waits(spans) == [(ms(1), ms(3), 0), (ms(4), ms(6), 1)], "until the third was launched it waited for nothing"


def test_the_model_thread_waits_where_a_layer_is_not_enqueued() -> None:
    launching, *rest = record._launching(launches((0, 1), (1, 1.001), (1.1, 3)))
    assert (launching.begin, launching.end) == (ms(0), ms(3))
    assert waits(rest) == [(ms(0), ms(1), 0), (ms(1.1), ms(3), 2)], "a microsecond is no wait"


# -- what the scheduler says of a burst -----------------------------------------------------------------------


TIMES = BurstTimes(
    asked=ms(0),
    handed_out=ms(1),
    job_began=ms(2),
    begun=ms(3),
    planned=ms(5),
    submitted=ms(9),
    ended=ms(12),
    enqueued=(ms(6), ms(9)),
    landed=(ms(8), ms(11)),
)


def test_a_burst_is_queued_prepared_and_submitted_layer_by_layer_while_its_job_lives() -> None:
    spans, instants = burst_spans(TIMES)
    assert [(span.track, span.name, span.begin, span.end, span.kind, span.layer) for span in spans] == [
        ("data plane", "queued", ms(1), ms(3), "wait", None),
        ("data plane", "prepare", ms(3), ms(5), "other", None),
        ("loop", "job", ms(2), ms(12), "other", None),
        ("data plane", "submit layer 0", ms(5), ms(6), "submit", 0),
        ("data plane", "submit layer 1", ms(6), ms(9), "submit", 1),
    ]
    assert [(instant.track, instant.name, instant.at, instant.layer) for instant in instants] == [
        ("data plane", "layer 0 seen to have landed", ms(8), 0),
        ("data plane", "layer 1 seen to have landed", ms(11), 1),
    ]


def test_a_burst_that_the_data_plane_takes_before_the_hand_out_has_returned_is_not_queued() -> None:
    spans, _ = burst_spans(replace(TIMES, handed_out=ms(4)))
    assert "queued" not in [span.name for span in spans]


def test_of_a_burst_that_failed_what_did_not_happen_is_not_there() -> None:
    spans, instants = burst_spans(replace(TIMES, enqueued=(ms(6), None), landed=(ms(8), None)))
    assert [span.layer for span in spans if span.kind == "submit"] == [0]
    assert [instant.layer for instant in instants] == [0]


def test_of_a_burst_that_was_cancelled_only_its_job_is_there() -> None:
    never = (None, None)
    spans, instants = burst_spans(
        replace(TIMES, begun=None, planned=None, submitted=None, enqueued=never, landed=never)
    )
    assert ([span.name for span in spans], instants) == (["job"], [])


def test_inline_the_engine_scheduler_submits_and_there_is_no_job() -> None:
    spans, instants = burst_spans(replace(TIMES, job_began=None), "engine scheduler")
    assert {span.track for span in spans} == {"engine scheduler"}
    assert not instants, "nobody looks before somebody asks"


# -- the command ----------------------------------------------------------------------------------------------


def test_the_command_writes_a_trace_and_a_plot_of_both_ways(tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.png"

    ended = run("bench", "overlap", *SMALL, "--trace", str(trace), "--plot", str(plot))

    assert ended.returncode == 0, ended.stderr
    events = read_trace(trace)
    assert tracks_of(events) == {
        "inline, 1 ms of CPU to submit a layer": ["engine scheduler", "model thread", "h2d engine", "compute engine"],
        "async, planned": [
            *("engine scheduler", "model thread", "loop", "data plane", "h2d engine", "compute engine"),
        ],
    }
    for pid in (1, 2):
        copies, forwards = (
            [event for event in events if event["pid"] == pid and event.get("cat") == kind]
            for kind in ("copy", "forward")
        )
        assert [event["args"]["layer"] for event in copies] == [*range(LAYERS)]
        for copy, forward in zip(copies, forwards, strict=True):
            assert forward["args"] == copy["args"]
            assert forward["ts"] >= copy["ts"] + copy["dur"] - 1e-3, "a nanosecond of rounding"
    png = plot.read_bytes()
    assert (png[:8], png[12:16]) == (b"\x89PNG\r\n\x1a\n", b"IHDR")
    assert min(struct.unpack(">II", png[16:24])) > 100


@pytest.mark.parametrize("option", ["trace", "plot"])
def test_one_option_does_not_need_the_other(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run", lambda *args: None)
    options: dict[str, Any] = {"layers": 2, "copy_ms": 0.5, "enqueue_ms": 0.0, "rounds": 3, option: tmp_path / "file"}
    cli.bench_overlap(**options)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_without_the_options_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def record_operations(device: EmulatedDevice) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(EmulatedDevice, "record_operations", record_operations)
    cli.bench_overlap(layers=2, copy_ms=0.5, enqueue_ms=0.0, rounds=3)


@pytest.mark.parametrize("option", ["trace", "plot"])
def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(cli, "_run", lambda *args: started.append(args))
    files: dict[str, Any] = {option: tmp_path / "missing" / "file"}
    with pytest.raises(typer.BadParameter, match=f"--{option} .*: there is no folder .*missing"):
        cli.bench_overlap(**files)
    files = {option: tmp_path}
    with pytest.raises(typer.BadParameter, match=f"--{option} .* is a folder"):
        cli.bench_overlap(**files)
    with pytest.raises(typer.BadParameter, match="the same file"):
        cli.bench_overlap(trace=tmp_path / "file", plot=tmp_path / "file")
    assert started == []


def test_a_plot_without_matplotlib_is_an_error_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(cli, "_run", lambda *args: started.append(args))
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(typer.BadParameter, match=r"pip install 'hicache-sched\[bench\]'"):
        cli.bench_overlap(plot=tmp_path / "plot.png")
    assert started == []

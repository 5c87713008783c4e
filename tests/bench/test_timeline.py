"""A timeline, and its trace: what ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hicache_sched.bench.timeline import Instant, Span, Timeline, write_trace
from tests.bench.timelines import inline, ms, pipelined, read_trace, tracks_of


def test_a_makespan_ends_with_the_last_forward_whatever_ends_later() -> None:
    assert pipelined(layers=3).makespan == pytest.approx(4e-3)


def test_without_a_forward_a_makespan_ends_with_the_last_span() -> None:
    timeline = Timeline("copies", (Span("h2d engine", "copy", ms(1), ms(3)), Span("loop", "job", ms(2), ms(5))))
    assert timeline.makespan == pytest.approx(4e-3)


def test_a_timeline_starts_with_what_is_first_be_it_an_instant() -> None:
    timeline = Timeline("late", (Span("loop", "job", ms(2), ms(5)),), (Instant("loop", "asked", ms(1)),))
    assert timeline.start == ms(1)


def test_tracks_are_in_their_order_and_unknown_ones_come_last() -> None:
    names = ["d2h engine", "compute engine", "h2d engine", "loop", "engine scheduler", "data plane", "model thread"]
    timeline = Timeline("all", tuple(Span(name, "work", ms(0), ms(1)) for name in names))
    assert timeline.tracks == (
        "engine scheduler",
        "model thread",
        "loop",
        "data plane",
        "h2d engine",
        "compute engine",
        "d2h engine",
    )


def test_a_trace_has_a_process_for_each_timeline_and_a_thread_for_each_track(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, [inline(), pipelined()])
    assert tracks_of(read_trace(file)) == {
        "inline": ["engine scheduler", "h2d engine", "compute engine"],
        "async": ["engine scheduler", "loop", "data plane", "h2d engine", "compute engine"],
    }


def test_every_span_is_a_complete_event_in_microseconds_from_the_start_of_its_timeline(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, [inline(layers=2), pipelined(layers=1)])
    events = [event for event in read_trace(file) if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"], event["args"]) for event in events] == [
        (1, "hand-out", 0, 4000, {}),
        (1, "submit layer 0", 0, 2000, {"layer": 0}),
        (1, "copy layer 0", 2000, 1000, {"layer": 0}),
        (1, "forward of layer 0", 5000, 1000, {"layer": 0}),
        (1, "submit layer 1", 2000, 2000, {"layer": 1}),
        (1, "copy layer 1", 4000, 1000, {"layer": 1}),
        (1, "forward of layer 1", 6000, 1000, {"layer": 1}),
        (2, "hand-out", 0, 50, {}),
        (2, "wait for copy of layer 0", 100, 900, {"layer": 0}),
        (2, "job", 200, 20800, {}),
        (2, "copy layer 0", 0, 1000, {"layer": 0}),
        (2, "forward of layer 0", 1000, 1000, {"layer": 0}),
    ]


def test_waits_are_a_category_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, [pipelined(layers=1)])
    categories = {event["name"]: event["cat"] for event in read_trace(file) if event["ph"] == "X"}
    assert categories == {
        "hand-out": "hand-out",
        "wait for copy of layer 0": "wait",
        "job": "other",
        "copy layer 0": "copy",
        "forward of layer 0": "forward",
    }


def test_landings_are_instants_of_their_thread(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, [pipelined(layers=2)])
    instants = [event for event in read_trace(file) if event["ph"] == "i"]
    assert [(event["name"], event["ts"], event["args"]) for event in instants] == [
        ("layer 0 landed", 1000, {"layer": 0}),
        ("layer 1 landed", 2000, {"layer": 1}),
    ]


def test_what_ends_when_the_next_begins_does_not_overlap_with_it_when_it_is_rounded(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    times = [ms(i * 0.93718765) for i in range(200)]
    spans = [Span("h2d engine", "copy", *pair) for pair in pairwise(times)]
    write_trace(file, [Timeline("copies", tuple(spans))])
    read_trace(file)

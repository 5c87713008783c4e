"""Timelines for tests, and what holds of the traces of them."""

from __future__ import annotations

import json
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from hicache_sched.bench.timeline import Instant, Span, Timeline

START = 1000.0
"""In `time.monotonic` seconds; a trace does not show it."""


def ms(value: float) -> float:
    return START + value * 1e-3


def inline(layers: int = 3, submit: float = 2.0) -> Timeline:
    """Submits a layer every so many ms and computes them afterwards; each takes 1 ms to copy and to compute."""
    end = layers * submit
    spans = [Span("engine scheduler", "hand-out", ms(0), ms(end), "hand-out")]
    for i in range(layers):
        begin = submit * (i + 1)
        spans.append(Span("engine scheduler", f"submit layer {i}", ms(begin - submit), ms(begin), "submit", i))
        spans.append(Span("h2d engine", f"copy layer {i}", ms(begin), ms(begin + 1), "copy", i))
        spans.append(Span("compute engine", f"forward of layer {i}", ms(end + 1 + i), ms(end + 2 + i), "forward", i))
    return Timeline("inline", tuple(spans))


def pipelined(layers: int = 3) -> Timeline:
    """Copies back to back, each layer computed when it has landed."""
    spans = [
        Span("engine scheduler", "hand-out", ms(0), ms(0.05), "hand-out"),
        Span("compute engine", "wait for copy of layer 0", ms(0.1), ms(1), "wait", 0),
        Span("loop", "job", ms(0.2), ms(layers + 20)),
    ]
    for i in range(layers):
        spans.append(Span("h2d engine", f"copy layer {i}", ms(i), ms(i + 1), "copy", i))
        spans.append(Span("compute engine", f"forward of layer {i}", ms(i + 1), ms(i + 2), "forward", i))
    landed = [Instant("data plane", f"layer {i} landed", ms(i + 1), i) for i in range(layers)]
    return Timeline("async", tuple(spans), tuple(landed))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which is as the trace event format asks for."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            kind = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert list(event["args"]) == [kind]
            assert isinstance(event["args"][kind], str if kind == "name" else int)
            continue
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    _check_names(events)
    _check_nesting([event for event in events if event["ph"] == "X"])
    return events


def _check_names(events: list[dict[str, Any]]) -> None:
    """Every process and every thread with anything on it has one name."""
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert len(set(named)) == len(named)
    assert len(set(processes)) == len(processes)
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    assert used <= set(named)
    assert {pid for pid, _ in used} <= set(processes)


def _check_nesting(spans: list[dict[str, Any]]) -> None:
    """Viewers draw a thread's spans as a stack of calls: of two, one ends before the other begins, or is around it."""

    def track(event: dict[str, Any]) -> tuple[int, int]:
        return event["pid"], event["tid"]

    for _, group in groupby(sorted(spans, key=track), track):
        times = [(event["ts"], round(event["ts"] + event["dur"], 3)) for event in group]
        for (begin, end), (other_begin, other_end) in combinations(times, 2):
            apart = end <= other_begin or other_end <= begin
            nested = begin <= other_begin <= other_end <= end or other_begin <= begin <= end <= other_end
            assert apart or nested


def tracks_of(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By process, the threads, in the order in which a viewer shows them."""
    names: dict[str, list[str]] = {}
    for process in events:
        if process["name"] == "process_name":
            threads = {e["tid"]: e["args"] for e in events if e["pid"] == process["pid"] and e["name"] == "thread_name"}
            order = {
                e["tid"]: e["args"]["sort_index"]
                for e in events
                if e["pid"] == process["pid"] and e["name"] == "thread_sort_index"
            }
            names[process["args"]["name"]] = [threads[tid]["name"] for tid in sorted(threads, key=order.__getitem__)]
    return names

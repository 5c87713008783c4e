"""What happened when, on which track: a plain record of one burst, and a trace of it for a viewer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Kind = Literal["hand-out", "submit", "copy", "forward", "wait", "other"]
"""What is done meanwhile; "hand-out" is the time for which the engine scheduler is blocked."""

ENGINE_SCHEDULER: Final = "engine scheduler"
MODEL_THREAD: Final = "model thread"
DATA_PLANE: Final = "data plane"
LOOP: Final = "loop"
H2D_ENGINE: Final = "h2d engine"
COMPUTE_ENGINE: Final = "compute engine"
TRACKS: Final = (ENGINE_SCHEDULER, MODEL_THREAD, LOOP, DATA_PLANE, H2D_ENGINE, COMPUTE_ENGINE)
"""Tracks from top to bottom; any others come below."""


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        track: who or what does it.
        begin: when it began, in `time.monotonic` seconds.
        end: when it ended.
        layer: which layer it is for; None where it is for all of them.
    """

    track: str
    name: str
    begin: float
    end: float
    kind: Kind = "other"
    layer: int | None = None


@dataclass(frozen=True)
class Instant:
    """Something that takes none.

    Attributes:
        track: whose it is.
        at: when it was, in `time.monotonic` seconds.
        layer: which layer it is for; None where it is for all of them.
    """

    track: str
    name: str
    at: float
    layer: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One burst and the forward that it is for, loaded in one way.

    Attributes:
        title: which way, in words.
        spans: at least one; those of one track do not overlap, unless one lies within another.
    """

    title: str
    spans: tuple[Span, ...]
    instants: tuple[Instant, ...] = ()

    @property
    def start(self) -> float:
        """When the first of all began."""
        return min([span.begin for span in self.spans] + [instant.at for instant in self.instants])

    @property
    def end(self) -> float:
        """When the last layer was computed, as nobody waits for anything later; where no layer is, when all ended."""
        forwards = [span.end for span in self.spans if span.kind == "forward"]
        return max(forwards or [span.end for span in self.spans])

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end."""
        return self.end - self.start

    @property
    def tracks(self) -> tuple[str, ...]:
        """Those on which there is anything, from top to bottom."""
        used = dict.fromkeys([span.track for span in self.spans] + [instant.track for instant in self.instants])
        return (*(track for track in TRACKS if track in used), *(track for track in used if track not in TRACKS))


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write a trace that ui.perfetto.dev and chrome://tracing show, in the object form of the trace event format.

    Each timeline is a process and each track a thread of it; all timelines start at 0. What something is for is its
    category, so that waits can be told from work.
    """
    events = [event for pid, timeline in enumerate(timelines, 1) for event in _trace_events(timeline, pid)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _trace_events(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    tids = {track: tid for tid, track in enumerate(timeline.tracks, 1)}

    def us(time: float) -> float:
        return round((time - timeline.start) * 1e6, 3)

    def event(ph: str, name: str, tid: int, **more: Any) -> dict[str, Any]:
        return {"ph": ph, "name": name, "pid": pid, "tid": tid, **more}

    def args(layer: int | None) -> dict[str, int]:
        return {} if layer is None else {"layer": layer}

    events = [
        event("M", "process_name", 0, args={"name": timeline.title}),
        event("M", "process_sort_index", 0, args={"sort_index": pid}),
    ]
    for track, tid in tids.items():
        events.append(event("M", "thread_name", tid, args={"name": track}))
        events.append(event("M", "thread_sort_index", tid, args={"sort_index": tid}))
    for span in timeline.spans:
        # From the rounded times, or what ends when the next one begins might overlap with it.
        times = {"ts": us(span.begin), "dur": round(us(span.end) - us(span.begin), 3)}
        events.append(event("X", span.name, tids[span.track], cat=span.kind, args=args(span.layer), **times))
    for instant in timeline.instants:
        more = {"ts": us(instant.at), "s": "t", "cat": "instant", "args": args(instant.layer)}
        events.append(event("i", instant.name, tids[instant.track], **more))
    return events

"""Timelines as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from hicache_sched.bench.timeline import Kind, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 9.0
"""Inches. A README shows the picture some 900 pixels wide, so a point of text is there 1.4 pixels high."""
DPI: Final = 180
ROW: Final = 0.27
"""Inches of a track."""
SHADES: Final[dict[Kind, tuple[str, str]]] = {
    "hand-out": ("#D55E00", "#D55E00"),
    "submit": ("#E69F00", "#F5C95C"),
    "copy": ("#0072B2", "#56A5D6"),
    "forward": ("#00795A", "#5CC4A6"),
    "wait": ("#FFFFFF", "#FFFFFF"),
    "other": ("#C4C4C4", "#C4C4C4"),
}
"""Of the even and of the odd ones. Hues that people with any colour vision tell apart (Okabe and Ito), and each of them
is also told from the others by its brightness, its hatching or its row."""
WORDS: Final[dict[Kind, str]] = {
    "hand-out": "hand-out",
    "submit": "submission",
    "copy": "copy of a layer",
    "forward": "forward of a layer",
    "wait": "wait",
    "other": "other work",
}
INSTANT: Final[dict[str, Any]] = {"marker": "|", "color": "black", "markersize": 4, "markeredgewidth": 0.8}
"""How an instant looks."""
TEXT: Final = 8.0
"""Points of a text."""
SMALL: Final = 7.0
"""Points of a text in a bar."""
GAP: Final = 4.0
"""Points between a bar and what is said of it."""
TRIFLE: Final = 2.0
"""Points below which a wait is left out: its outline would be all that is seen."""


def write_plot(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write a picture of timelines as a PNG: see `draw`.

    :raises ImportError: matplotlib is missing.
    """
    draw(timelines).savefig(path, format="png")


def draw(timelines: Sequence[Timeline]) -> Figure:
    """Draw timelines one above the other on one time axis, with a row for each track.

    Layers are numbered where their bars have room for it. What matplotlib keeps for the whole process is left as it is.

    :raises ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [len(timeline.tracks) for timeline in timelines]
    figure = Figure(figsize=(WIDTH, ROW * sum(rows) + 0.42 * len(rows) + 0.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    last_ms = max((span.end - timeline.start) * 1e3 for timeline in timelines for span in timeline.spans)
    for each, timeline in zip(axes, timelines, strict=True):
        _style(each, timeline)
        each.set_xlim(0, 1.02 * last_ms)
    axes[-1].set_xlabel("ms since the hand-out began", fontsize=TEXT)
    kinds = {span.kind for timeline in timelines for span in timeline.spans}
    handles: list[Any] = [Patch(label=WORDS[kind], **_look(kind, 0)) for kind in SHADES if kind in kinds]
    if any(timeline.instants for timeline in timelines):
        handles.append(Line2D([], [], label="seen to have landed", linestyle="none", **INSTANT))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(handles), "columnspacing": 1.4}
    figure.legend(handles=handles, fontsize=TEXT, handlelength=1.6, frameon=False, **place)
    figure.draw_without_rendering()  # sizes are known now, and they say what has room where
    figure.set_layout_engine("none")  # or they would change with what is drawn
    for each, timeline in zip(axes, timelines, strict=True):
        _draw(each, timeline, each.get_window_extent().width / (1.02 * last_ms) * 72 / DPI)
    return figure


def _style(axes: Axes, timeline: Timeline) -> None:
    axes.set_title(timeline.title, loc="left", fontsize=TEXT + 1, fontweight="bold")
    axes.set_yticks(range(len(timeline.tracks)), timeline.tracks, fontsize=TEXT)
    axes.set_ylim(len(timeline.tracks) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw(axes: Axes, timeline: Timeline, points_per_ms: float) -> None:
    rows = {track: row for row, track in enumerate(timeline.tracks)}
    numbered = _numbered(timeline, points_per_ms)

    def ms(time: float) -> float:
        return (time - timeline.start) * 1e3

    for span, is_inner in _nested(timeline.spans):
        begin, length, row = ms(span.begin), (span.end - span.begin) * 1e3, rows[span.track]
        if span.kind == "wait" and length * points_per_ms < TRIFLE:
            continue
        height = 0.36 if is_inner else 0.72
        axes.broken_barh([(begin, length)], (row - height / 2, height), **_look(span.kind, span.layer or 0))
        if span.layer is None:
            words = f"blocked {length:.{1 if length >= 1 else 2}f} ms" if span.kind == "hand-out" else span.name
            free_until = min([ms(each.begin) for each in _after(span, timeline)], default=axes.get_xlim()[1])
            if length * points_per_ms > _points(words) and not _has_inner(span, timeline):
                color = "white" if span.kind == "hand-out" else "black"
                _write(axes, words, begin + length / 2, row, ha="center", color=color)
            elif (free_until - begin - length) * points_per_ms > _points(words) + GAP:
                _write(axes, words, begin + length + GAP / points_per_ms, row, ha="left", color="black")
        elif span.track in numbered and span.kind != "wait":
            color = "white" if span.layer % 2 == 0 else "black"
            _write(axes, str(span.layer), begin + length / 2, row, ha="center", color=color)
    for instant in timeline.instants:
        axes.plot(ms(instant.at), rows[instant.track], **INSTANT)
    _mark_end(axes, ms(timeline.end))


def _mark_end(axes: Axes, end: float) -> None:
    axes.axvline(end, color="black", linewidth=1.2, linestyle=(0, (3, 2)))
    is_on_the_right = end > 0.7 * axes.get_xlim()[1]
    axes.annotate(
        f"all computed after {end:.1f} ms",
        (end, 1.0),
        xytext=(-GAP if is_on_the_right else GAP, 1),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if is_on_the_right else "left",
        va="bottom",
        fontsize=TEXT,
    )


def _numbered(timeline: Timeline, points_per_ms: float) -> set[str]:
    """Tracks whose layers have room for their numbers, most of them."""
    numbered = set()
    for track in timeline.tracks:
        bars = [span for span in timeline.spans if span.track == track and span.kind in ("copy", "forward")]
        if bars:
            points = median(span.end - span.begin for span in bars) * 1e3 * points_per_ms
            if points > max(_points(str(span.layer)) for span in bars):
                numbered.add(track)
    return numbered


def _nested(spans: Sequence[Span]) -> Iterator[tuple[Span, bool]]:
    """Spans, each with whether it lies within another of its track; those come last, as they are drawn upon it."""
    inner = [span for span in spans if any(_lies_within(span, each) for each in spans)]
    yield from ((span, False) for span in spans if span not in inner)
    yield from ((span, True) for span in inner)


def _lies_within(span: Span, other: Span) -> bool:
    is_within = other.begin <= span.begin and span.end <= other.end
    return span.track == other.track and is_within and (span.begin, span.end) != (other.begin, other.end)


def _has_inner(span: Span, timeline: Timeline) -> bool:
    return any(_lies_within(each, span) for each in timeline.spans)


def _after(span: Span, timeline: Timeline) -> Iterator[Span]:
    return (each for each in timeline.spans if each.track == span.track and each.begin >= span.end and each != span)


def _look(kind: Kind, number: int) -> dict[str, Any]:
    """How a bar looks."""
    color = SHADES[kind][number % 2]
    if kind == "wait":
        return {"facecolor": color, "edgecolor": "#555555", "hatch": "//////", "linewidth": 0.7}
    # What takes microseconds still has an edge that is seen. Layers have none: they would run into each other.
    edges = {"hand-out": 1.5, "other": 0.7}
    return {"facecolor": color, "edgecolor": color, "linewidth": edges.get(kind, 0)}


def _write(axes: Axes, text: str, at: float, row: int, *, ha: str, color: str) -> None:
    axes.text(at, row + 0.02, text, ha=ha, va="center", fontsize=SMALL, color=color)


def _points(text: str) -> float:
    """How wide a text in a bar is, and a little more."""
    return 0.62 * SMALL * len(text) + 1

"""The picture of timelines, asked what is in it."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_sched.bench.plot import DPI, SHADES, WIDTH, WORDS, draw, write_plot
from hicache_sched.bench.timeline import Kind, Span, Timeline
from tests.bench.timelines import inline, ms, pipelined


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def drawn(*timelines: Timeline) -> list[Any]:
    """The axes of each."""
    return list(draw(timelines).axes)


def bars(axes: Any, kind: Kind) -> Iterator[tuple[float, float, str]]:
    """Begin and end, in ms, and the row of the bars of a kind."""
    from matplotlib.colors import to_hex

    rows = [label.get_text() for label in axes.get_yticklabels()]
    for bar in axes.collections:
        if to_hex(bar.get_facecolor()[0]).upper() in SHADES[kind]:
            (path,) = bar.get_paths()
            box = path.get_extents()
            yield round(box.x0, 3), round(box.x1, 3), rows[round((box.y0 + box.y1) / 2)]


def test_a_plot_is_a_png_as_wide_as_it_is_said_to_be_and_small(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    write_plot(file, [inline(32, 2.4), pipelined(32)])
    written = file.read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    (width,) = struct.unpack(">I", written[16:20])
    assert width == WIDTH * DPI
    assert len(written) < 120_000


def test_timelines_are_one_above_the_other_on_one_time_axis() -> None:
    first, second = drawn(inline(), pipelined())
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["inline", "async"]
    assert first.get_position().y0 > second.get_position().y1
    assert first.get_xlim() == second.get_xlim()
    assert first.get_shared_x_axes().joined(first, second)
    assert first.get_xlim()[1] >= 23, "all that is shown is in it"


def test_each_track_has_a_row_and_its_bars_are_there_and_where_they_belong_in_time() -> None:
    (axes,) = drawn(inline(2))
    assert [label.get_text() for label in axes.get_yticklabels()] == list(inline().tracks)
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first is on top"
    expected: dict[Kind, list[tuple[float, float, str]]] = {
        "hand-out": [(0, 4, "engine scheduler")],
        "submit": [(0, 2, "engine scheduler"), (2, 4, "engine scheduler")],
        "copy": [(2, 3, "h2d engine"), (4, 5, "h2d engine")],
        "forward": [(5, 6, "compute engine"), (6, 7, "compute engine")],
    }
    for kind, places in expected.items():
        assert list(bars(axes, kind)) == places


def test_layers_alternate_in_shade() -> None:
    (axes,) = drawn(pipelined(4))
    from matplotlib.colors import to_hex

    colors = [to_hex(bar.get_facecolor()[0]).upper() for bar in axes.collections]
    assert len(set(SHADES["copy"])) == 2
    assert [color for color in colors if color in SHADES["copy"]] == [*SHADES["copy"]] * 2


def test_what_lies_within_a_hand_out_is_drawn_upon_it_and_leaves_it_to_be_seen() -> None:
    (axes,) = drawn(inline(2))
    heights = [bar.get_paths()[0].get_extents().height for bar in axes.collections]
    zorders = [bar.get_zorder() for bar in axes.collections]
    assert heights[0] > 1.5 * heights[-1]
    assert zorders == sorted(zorders)


def test_waits_are_hatched_and_nothing_else_is() -> None:
    (axes,) = drawn(pipelined(2))
    hatched = [bar for bar in axes.collections if bar.get_hatch()]
    assert [bar.get_paths()[0].get_extents().x1 for bar in hatched] == [pytest.approx(1)]


def test_a_wait_that_would_be_nothing_but_its_outline_is_left_out() -> None:
    spans = (*inline(40).spans, Span("model thread", "wait_layer(0)", ms(1), ms(1.05), "wait", 0))
    (axes,) = drawn(Timeline("inline", spans))
    assert not [bar for bar in axes.collections if bar.get_hatch()]


def test_a_hand_out_of_microseconds_has_an_edge_that_is_seen() -> None:
    (axes,) = drawn(pipelined(40))
    (hand_out,) = (bar for bar in axes.collections if bar.get_paths()[0].get_extents().x1 == pytest.approx(0.05))
    assert hand_out.get_linewidth()[0] >= 1


def test_how_long_the_hand_out_blocked_and_when_all_was_computed_are_said() -> None:
    first, second = drawn(inline(20), pipelined(20))
    assert {"blocked 40.0 ms", "all computed after 61.0 ms"} <= set(texts(first))
    assert {"blocked 0.05 ms", "all computed after 21.0 ms", "job"} <= set(texts(second))


def test_the_end_is_marked_where_the_last_forward_ends() -> None:
    (axes,) = drawn(pipelined(5))
    assert 6 in [pytest.approx(line.get_xdata()[0]) for line in axes.lines if len(set(line.get_xdata())) == 1]


def test_layers_are_numbered_where_there_is_room() -> None:
    (axes,) = drawn(pipelined(12))
    numbers = [text for text in texts(axes) if text.isdigit()]
    assert sorted(map(int, numbers)) == sorted([*range(12)] * 2)


def test_layers_are_not_numbered_where_there_is_none() -> None:
    (axes,) = drawn(pipelined(120))
    assert not [text for text in texts(axes) if text.isdigit()]


def test_landings_are_marked_in_the_row_of_their_thread() -> None:
    (axes,) = drawn(pipelined(3))
    marks = [line for line in axes.lines if line.get_marker() == "|"]
    assert [pytest.approx(mark.get_xdata()[0]) for mark in marks] == [1, 2, 3]
    assert {mark.get_ydata()[0] for mark in marks} == {pipelined().tracks.index("data plane")}


def test_the_legend_names_what_is_in_the_picture_and_nothing_else() -> None:
    (legend,) = draw([inline()]).legends
    kinds: list[Kind] = ["hand-out", "submit", "copy", "forward"]
    assert [text.get_text() for text in legend.get_texts()] == [WORDS[kind] for kind in kinds]


def test_texts_do_not_leave_the_picture() -> None:
    figure = draw([inline(32, 2.4), pipelined(32)])
    figure.draw_without_rendering()
    everything = [text for axes in figure.axes for text in axes.texts] + figure.legends
    for each in everything:
        box = each.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= WIDTH * DPI


def test_drawing_imports_nothing_that_keeps_figures_for_the_whole_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hicache_sched.bench.plot import write_plot;"
        "from tests.bench.timelines import inline; assert 'matplotlib' not in sys.modules;"
        f"write_plot(Path({str(tmp_path / 'plot.png')!r}), [inline()]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)

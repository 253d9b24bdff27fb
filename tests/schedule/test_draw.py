"""The grid and the picture show every action where it runs."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpar.schedule.draw import draw_grid, legend
from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.figure import make_figure, save_figure
from jaxpar.schedule.library import build_schedule
from jaxpar.schedule.palette import COLOURS, colour
from jaxpar.schedule.simulate import Costs, Timeline, simulate


def timeline(name: str, num_stages: int, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    return simulate(build_schedule(name, num_stages, num_microbatches), costs)


def test_the_grid_of_1f1b() -> None:
    assert draw_grid(timeline("1f1b", 2, 3), 80).plain.split("\n") == [
        "stage 0 F0 F1       B0    F2 B1       B2    ",
        "stage 1    F0 B0    F1 B1    F2 B2    ",
        "",
    ]


# Okabe and Ito's sky blue, vermilion, orange and bluish green.
HUES = {"F": "#56b4e9", "B": "#d55e00", "I": "#e69f00", "W": "#009e73"}


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "dualpipe_v"])
def test_every_cell_of_the_grid_has_the_colour_of_its_kind(name: str) -> None:
    shown = timeline(name, 3, 7)
    grid = draw_grid(shown, 10_000)
    cells = [(grid.plain[span.start : span.end].strip(), span.style) for span in grid.spans]
    num_chunks = shown.schedule.shape.num_chunks
    actions = [action for order in shown.schedule.orders for action in order]
    assert cells == [(str(a), f"black on {colour(a.kind, a.chunk, num_chunks)}") for a in actions]
    assert {(cell[0], style) for cell, style in cells if "." not in cell} == {(a.kind, f"black on {HUES[a.kind]}") for a in actions}


def test_the_legend_has_the_colours_of_the_kinds_that_occur() -> None:
    for name, kinds in {"1f1b": "FB", "zb_h1": "FIW", "dualpipe_v": "FBIW"}.items():
        text = legend(timeline(name, 2, 4))
        assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [(f" {kind} ", f"black on {HUES[kind]}") for kind in kinds]


def test_a_wide_grid_goes_on_below_and_leaves_out_its_middle() -> None:
    """Each screen fits; cells that are all as long are never cut."""
    grid = draw_grid(timeline("zb_v", 2, 40), 61).plain
    lines = grid.split("\n")
    assert max(map(len, lines)) <= 61
    assert "more screens" in grid
    cells = {cell for line in lines if line.startswith("stage") for cell in line.split()[2:]}
    assert cells <= {str(action) for order in build_schedule("zb_v", 2, 40).orders for action in order}


def test_every_action_has_a_cell_when_times_are_uneven() -> None:
    costs = Costs(F=1, I=0.93, W=0.71, comm=0.13)
    lines = draw_grid(timeline("zb_h1", 3, 5, costs), 10_000).plain.split("\n")
    for line, order in zip(lines, build_schedule("zb_h1", 3, 5).orders, strict=False):
        assert line.split()[2:] == [str(action) for action in order]


def test_chunks_are_shades_of_the_colour_of_their_kind() -> None:
    for num_chunks in (2, 3, 8):
        shown = {colour(kind, chunk, num_chunks) for kind in COLOURS for chunk in range(num_chunks)}
        assert len(shown) == 4 * num_chunks


@pytest.mark.parametrize("name", ["1f1b", "interleaved:3", "zb_v"])
def test_the_picture_has_a_bar_for_every_action(name: str) -> None:
    pytest.importorskip("matplotlib")
    shown = timeline(name, 3, 7)
    (axes,) = make_figure([shown]).axes
    bars = [collection.get_paths()[0].get_extents() for collection in axes.collections]
    spans = [(stage, span) for stage, spans in enumerate(shown.spans) for span in spans]
    assert len(bars) == len(spans)
    for bar, (stage, span) in zip(bars, spans, strict=True):
        assert (bar.x0, bar.x1) == pytest.approx((span.start, span.end))
        assert stage < bar.y0 < bar.y1 < stage + 1


def test_panels_share_the_scale_of_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timelines = [timeline(name, 4, 8) for name in ("gpipe", "zb_v")] + [timeline("dualpipe_v", 4, 8, Costs(FB=3))]
    figure = make_figure(timelines)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 33)}
    assert len({(axes.get_position().x0, axes.get_position().width) for axes in figure.axes}) == 1
    save_figure(timelines, tmp_path / "drawn.png", "png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    save_figure(timelines, tmp_path / "drawn.svg", "svg")
    words = {element.text for element in ElementTree.parse(tmp_path / "drawn.svg").iter() if element.tag.endswith("text")}
    assert {"gpipe", "zb_v", "dualpipe_v", "stage 3", "F: forward"} <= words


def test_matplotlib_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ScheduleError, match=r"pip install 'jaxpar\[plot\]'"):
        save_figure([timeline("1f1b", 2, 2)], tmp_path / "drawn.png", "png")

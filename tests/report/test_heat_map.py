"""The picture shows every step of every expert of the right blocks, in colours that mean the same in all panels."""

import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxpar.report.errors import ReportError
from jaxpar.report.expert_load import ExpertLoad, expert_load
from jaxpar.report.heat_map import DPI, colour_map, expert_ticks, grid_of, make_figure, save_heat_map, step_edges
from tests.report.runs import many, row


def panels(figure: Any) -> list[tuple[Any, Any, Any]]:
    """(heat map, max / mean, dropped) of each block, in order."""
    maps = [axes for axes in figure.axes if axes.get_title().startswith("block")]
    strips = [axes for axes in figure.axes if axes.lines and axes not in maps]
    return list(zip(maps, strips[::2], strips[1::2], strict=True))


def made(num_steps: int, num_blocks: int, num_experts: int) -> ExpertLoad:
    return expert_load(many(num_steps, num_blocks, num_experts), "run")


@pytest.mark.parametrize(("num_steps", "num_blocks", "num_experts"), [(5, 2, 8), (1, 1, 3), (40, 7, 128), (30, 8, 16)])
def test_panels_hold_the_load_of_their_block(num_steps: int, num_blocks: int, num_experts: int) -> None:
    pytest.importorskip("matplotlib")
    load = made(num_steps, num_blocks, num_experts)
    found = panels(make_figure(load, "run"))
    assert [heat.get_title() for heat, _, _ in found] == [f"block {block}" for block in range(num_blocks)]
    for block, (heat, busiest, dropped) in enumerate(found):
        (mesh,) = heat.collections
        np.testing.assert_array_equal(mesh.get_array(), load.relative[:, block].T)
        assert mesh.get_clim() == (0, 2)
        corners = mesh.get_coordinates()
        np.testing.assert_array_equal(corners[0, :, 0], step_edges(load.steps))
        np.testing.assert_array_equal(corners[:, 0, 1], np.arange(num_experts + 1) - 0.5)
        for axes, values in ((busiest, load.max_over_mean), (dropped, 100 * load.dropped)):
            (line,) = axes.lines
            np.testing.assert_array_equal(line.get_xdata(), load.steps)
            np.testing.assert_array_equal(line.get_ydata(), values[:, block])
            assert axes.get_xlim() == heat.get_xlim()
            assert axes.get_ylim()[1] >= values.max()


def test_of_many_blocks_eight_are_drawn_and_named() -> None:
    pytest.importorskip("matplotlib")
    load = made(6, 30, 4)
    figure = make_figure(load, "run")
    chosen = [0, 4, 8, 12, 17, 21, 25, 29]
    found = panels(figure)
    assert [heat.get_title() for heat, _, _ in found] == [f"block {block}" for block in chosen]
    for block, (heat, busiest, dropped) in zip(chosen, found, strict=True):
        np.testing.assert_array_equal(heat.collections[0].get_array(), load.relative[:, block].T)
        np.testing.assert_array_equal(busiest.lines[0].get_ydata(), load.max_over_mean[:, block])
        np.testing.assert_array_equal(dropped.lines[0].get_ydata(), 100 * load.dropped[:, block])
    assert "blocks 0, 4, 8, 12, 17, 21, 25, 29 of 30" in "".join(text.get_text() for text in figure.texts)


def test_colours() -> None:
    """White at balance, blue below, red above, black over twice the mean; hues that colour-blind people tell apart."""
    pytest.importorskip("matplotlib")
    colours = colour_map()

    def rgb(load: float) -> tuple[float, float, float]:
        red, green, blue, _ = colours(load / 2)
        return red, green, blue

    assert min(rgb(1.0)) > 0.95
    assert rgb(0.0)[2] > rgb(0.0)[0] + 0.4
    assert rgb(2.0)[0] > rgb(2.0)[2] + 0.4
    assert rgb(2.001) == (0, 0, 0)
    brightness = [sum(rgb(load)) for load in np.linspace(0, 2, 41)]
    assert brightness == sorted(brightness[:21]) + sorted(brightness[21:], reverse=True)


def test_what_is_over_the_range_and_what_is_missing() -> None:
    pytest.importorskip("matplotlib")
    figure = make_figure(expert_load([row(1, [[0.9, 0.1, 0.1, 0.1]]), row(2, [[0.0] * 4])], "run"), "run")
    ((heat, _, _),) = panels(figure)
    (mesh,) = heat.collections
    mesh.update_scalarmappable()
    faces = mesh.get_facecolor().reshape(4, 2, 4)
    assert tuple(faces[0, 0]) == (0, 0, 0, 1)
    assert {tuple(face) for face in faces[:, 1]} == {(0.75, 0.75, 0.75, 1)}
    assert "grey: nothing was routed" in "".join(text.get_text() for text in figure.texts)
    assert "grey" not in "".join(text.get_text() for text in make_figure(made(2, 1, 4), "run").texts)


def test_one_colour_bar_and_strips_of_one_scale() -> None:
    pytest.importorskip("matplotlib")
    rows = many(4, 5, 8)
    rows[0]["moe_load"][3] = [0.93] + [0.01] * 7
    rows[1]["moe_dropped"] = [0.0, 0.62, 0.0, 0.0, 0.0]
    figure = make_figure(expert_load(rows, "run"), "run")
    found = panels(figure)
    bars = [axes for axes in figure.axes if axes not in {axes for panel in found for axes in panel}]
    assert len(bars) == 1
    assert bars[0].get_ylabel() == "load / mean load"
    assert {busiest.get_ylim() for _, busiest, _ in found} == {(1, 7.5)}  # 0.93 of 1 over 8 is 7.44 x the mean
    assert {dropped.get_ylim() for _, _, dropped in found} == {(0, 65)}
    assert {busiest.get_yscale() for _, busiest, _ in found} == {"log"}


def test_drops_that_no_row_tells_of() -> None:
    pytest.importorskip("matplotlib")
    rows = many(3, 1, 2)
    for each in rows:
        del each["moe_dropped"]
    ((_, busiest, dropped),) = panels(make_figure(expert_load(rows, "run"), "run"))
    assert "not logged" in [text.get_text() for text in dropped.texts]
    assert "not logged" not in [text.get_text() for text in busiest.texts]


@pytest.mark.parametrize(
    ("num_panels", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2), (5, 3, 2), (6, 3, 2), (7, 4, 2), (8, 4, 2)]
)
def test_the_grid(num_panels: int, columns: int, rows: int) -> None:
    grid = grid_of(num_panels, 8)
    assert (grid.columns, grid.rows) == (columns, rows)
    assert grid.size[0] < 13


def test_no_two_axes_overlap_and_all_are_inside() -> None:
    pytest.importorskip("matplotlib")
    for num_blocks in (1, 3, 7, 9):
        boxes = [axes.get_position() for axes in make_figure(made(3, num_blocks, 8), "run").axes]
        assert all(0 < box.x0 < box.x1 < 1 and 0 < box.y0 < box.y1 < 1 for box in boxes)
        for i, box in enumerate(boxes):
            assert box.count_overlaps(boxes[:i]) == 0


def test_no_text_leaves_the_picture() -> None:
    """Rates of three digits, a long name, and steps in the hundred thousands."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for num_blocks, num_experts in ((1, 8), (2, 256), (30, 128)):
        rows = many(20, num_blocks, num_experts, every=123_456)
        rows[0]["moe_dropped"] = [1.0] * num_blocks
        figure = make_figure(expert_load(rows, "run"), "runs/" + "a_long_name_" * 20)
        renderer = FigureCanvasAgg(figure).get_renderer()
        box = figure.get_tightbbox(renderer)
        width, height = figure.get_size_inches()
        assert box is not None
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height


def test_every_expert_has_dots_of_its_own() -> None:
    for num_experts in (1, 8, 64, 128, 256, 512):
        assert grid_of(8, num_experts).height * DPI / num_experts >= 2.5 - 1e-9


def test_ticks_of_experts() -> None:
    assert expert_ticks(8) == list(range(8))
    assert expert_ticks(1) == [0]
    assert expert_ticks(128) == list(range(0, 128, 16))
    assert expert_ticks(60) == [0, 8, 16, 24, 32, 40, 48, 56]


def test_steps_are_true_to_scale() -> None:
    assert step_edges(np.array([7])).tolist() == [6.5, 7.5]
    assert step_edges(np.array([10, 20, 30])).tolist() == [5, 15, 25, 35]
    assert step_edges(np.array([1, 10, 20, 24])).tolist() == [-3.5, 5.5, 15, 22, 28.5]


def test_few_steps_have_their_numbers() -> None:
    pytest.importorskip("matplotlib")
    figure = make_figure(made(5, 1, 4), "run")
    ((_, _, dropped),) = panels(figure)
    assert list(dropped.get_xticks()) == [10, 20, 30, 40, 50]
    assert dropped.get_xlabel() == "step"
    uneven = expert_load([row(step, [[0.5, 0.5]]) for step in (1, 2, 900)], "run")
    assert list(panels(make_figure(uneven, "run"))[0][2].get_xticks()) != [1, 2, 900]


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load = made(3, 2, 8)
    save_heat_map(load, "runs/$5_of_$6", tmp_path / "a.png", "png")
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = grid_of(2, 8).size
    assert struct.unpack(">II", png[16:24]) == pytest.approx((DPI * width, DPI * height), abs=1)
    save_heat_map(load, "runs/$5_of_$6", tmp_path / "a.svg", "svg")
    words = {element.text for element in ElementTree.parse(tmp_path / "a.svg").iter() if element.tag.endswith("text")}
    assert {"block 0", "block 1", "step", "expert", "runs/$5_of_$6: 8 experts a block", "Load of each expert over training"} <= words
    save_heat_map(load, "runs/$5_of_$6", tmp_path / "b.svg", "svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_matplotlib_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"pip install 'jaxpar\[plot\]'"):
        save_heat_map(made(1, 1, 2), "run", tmp_path / "a.png", "png")

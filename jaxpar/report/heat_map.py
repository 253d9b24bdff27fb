"""Load of experts over training as a picture for a paper: a panel a block, steps to the right, experts down, colour for the load.

Colours have one fixed range, so that pictures of two runs can be laid side by side: white is the mean, blue less, red more, black
more than twice.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jaxpar.report.errors import ReportError
from jaxpar.report.expert_load import ExpertLoad
from jaxpar.report.load_text import evenly_chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

MOST_PANELS = 8
TOP_LOAD = 2.0  # x the mean; the middle of 0 and this is 1, balance
# Ends of ColorBrewer's RdBu, which people with any common colour blindness can tell apart, without its darkest: black is `over`.
MAP, DARKEST = "RdBu_r", 0.08
OVER, NOTHING = "black", "0.75"
DPI = 200
# inches
LEFT, RIGHT, TITLE, FOOT = 0.98, 1.0, 0.86, 0.5
BETWEEN, ROW_GAP, STRIP, STRIP_GAP = 0.2, 0.42, 0.46, 0.13
WIDTHS = {1: 5.2, 2: 3.6, 3: 2.7, 4: 2.3}  # of a panel, by columns
LOWEST, HIGHEST = 1.3, 2.3  # of a heat map, where its experts then have what they need
AN_EXPERT, LEAST = 0.13, 0.0125  # wanted, and needed: two and a half dots of a PNG
MARKED = 12  # steps; more of them lie too close for dots
NAMED = 5  # steps; so many can all have their number on the axis
LONGEST_NAME = 48  # letters that fit above one panel
SMALL, NORMAL, LARGE = 7.5, 8.5, 11.0  # points


class Grid(NamedTuple):
    """Panels in rows, and the size of one: (width, height of its heat map)."""

    columns: int
    rows: int
    width: float
    height: float

    @property
    def panel_height(self) -> float:
        return self.height + 2 * (STRIP + STRIP_GAP)

    @property
    def size(self) -> tuple[float, float]:
        """Of the whole figure."""
        width = LEFT + self.columns * self.width + (self.columns - 1) * BETWEEN + RIGHT
        return width, TITLE + self.rows * self.panel_height + (self.rows - 1) * ROW_GAP + FOOT


def save_heat_map(load: ExpertLoad, name: str, path: Path | str, form: Literal["png", "svg"]) -> None:
    """Draw to a file; text of an SVG stays text. Needs matplotlib. name: of the run, for the title."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ReportError(["matplotlib draws it and is not installed; pip install 'jaxpar[plot]'"], str(path)) from None
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpar"}):
        undated = {"Date": None} if form == "svg" else None  # the same picture every day
        make_figure(load, name).savefig(path, format=form, dpi=DPI, metadata=undated)


def shown_blocks(load: ExpertLoad) -> list[int]:
    """The blocks that have a panel."""
    return evenly_chosen(load.num_blocks, MOST_PANELS)


def grid_of(num_panels: int, num_experts: int) -> Grid:
    """As near to a square as a page allows, every row full where that can be."""
    columns = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}.get(num_panels, 4)
    height = max(min(max(AN_EXPERT * num_experts, LOWEST), HIGHEST), LEAST * num_experts)
    return Grid(columns, -(-num_panels // columns), WIDTHS[columns], height)


def make_figure(load: ExpertLoad, name: str) -> "Figure":
    """Panels of one size, each with two strips below it, and one colour bar for all."""
    from matplotlib.figure import Figure

    blocks = shown_blocks(load)
    grid = grid_of(len(blocks), load.num_experts)
    figure = Figure(figsize=grid.size, facecolor="white")
    colours, edges = colour_map(), step_edges(load.steps)
    busiest, gone = load.max_over_mean, 100 * load.dropped
    for i, block in enumerate(blocks):
        map_axes, max_axes, drop_axes = _panel_axes(figure, grid, i)
        mesh = _heat_map(map_axes, load.relative[:, block], edges, colours)
        map_axes.set_title(f"block {block}", fontsize=NORMAL, pad=3)
        _max_strip(max_axes, load.steps, busiest[:, block], _round_above(busiest[:, blocks], 1.5))
        _strip(drop_axes, load.steps, gone[:, block], (0.0, _round_above(gone[:, blocks], 1.0)))
        first, last = i % grid.columns == 0, i + grid.columns >= len(blocks)
        for axes, words in ((map_axes, "expert"), (max_axes, "max /\nmean"), (drop_axes, "dropped,\n%")):
            axes.set_xlim(edges[0], edges[-1])
            _label(axes, load.steps, words if first else None, last=last and axes is drop_axes)
        if i == 0:
            _colour_bar(figure, grid, mesh)
    _titles(figure, load, name, blocks)
    return figure


def colour_map() -> "Colormap":
    """From blue through white to red, with colours for what is over the range and for steps in which nothing was routed."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(mpl.colormaps[MAP](np.linspace(DARKEST, 1 - DARKEST, 255)), "load")
    return colours.with_extremes(over=OVER, bad=NOTHING)


def step_edges(steps: np.ndarray) -> np.ndarray:
    """[n + 1]: a logged step reaches half way to its neighbours, so that the axis is true to scale; the ends, half the usual distance."""
    half = float(np.median(np.diff(steps))) / 2 if len(steps) > 1 else 0.5
    return np.concatenate([[steps[0] - half], (steps[1:] + steps[:-1]) / 2, [steps[-1] + half]])


def _panel_axes(figure: "Figure", grid: Grid, i: int) -> list["Axes"]:
    """The heat map of panel i and its two strips, top to bottom."""
    width, height = grid.size
    row, column = divmod(i, grid.columns)
    left = LEFT + column * (grid.width + BETWEEN)
    low = height - TITLE - row * (grid.panel_height + ROW_GAP)
    axes = []
    for tall, gap in ((grid.height, 0.0), (STRIP, STRIP_GAP), (STRIP, STRIP_GAP)):
        low -= tall + gap
        axes.append(figure.add_axes((left / width, low / height, grid.width / width, tall / height)))
    return axes


def _heat_map(axes: "Axes", relative: np.ndarray, edges: np.ndarray, colours: "Colormap") -> "QuadMesh":
    """relative: [n, experts]."""
    num_experts = relative.shape[1]
    cells = np.arange(num_experts + 1) - 0.5
    mesh = axes.pcolormesh(edges, cells, np.ma.masked_invalid(relative.T), cmap=colours, vmin=0.0, vmax=TOP_LOAD, rasterized=True)
    axes.set_ylim(num_experts - 0.5, -0.5)
    axes.set_yticks(expert_ticks(num_experts))
    return mesh


def expert_ticks(num_experts: int) -> list[int]:
    """At most 9 numbers, a power of two apart."""
    apart = 1
    while -(-num_experts // apart) > 8:
        apart *= 2
    return list(range(0, num_experts, apart))


def _max_strip(axes: "Axes", steps: np.ndarray, values: np.ndarray, top: float) -> None:
    """On a logarithmic axis: near balance small differences count, and early in training one expert may get all."""
    axes.set_yscale("log")
    _strip(axes, steps, values, (1.0, top))
    if top >= 4:
        axes.set_yticks([1, min((2, 3, 5, 10, 20), key=lambda tick: abs(tick - top**0.5)), top])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _strip(axes: "Axes", steps: np.ndarray, values: np.ndarray, ends: tuple[float, float]) -> None:
    """A small line; the axis starts at the best value."""
    axes.plot(steps, values, color="0.15", linewidth=0.9, marker="o" if len(steps) <= MARKED else "", markersize=2.5, clip_on=False)
    axes.set_ylim(*ends)
    axes.set_yticks(ends)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.spines[["top", "right"]].set_visible(False)
    if np.isnan(values).all():
        axes.annotate("not logged", (0.5, 0.4), xycoords="axes fraction", ha="center", fontsize=SMALL, color="0.4")


def _round_above(values: np.ndarray, least: float) -> float:
    """A round number that no value exceeds, the same for every panel."""
    largest = max(np.nanmax(values), least) if np.isfinite(values).any() else least
    unit = 10.0 ** np.floor(np.log10(largest)) / 2
    return float(np.ceil(largest / unit - 1e-9) * unit)


def _label(axes: "Axes", steps: np.ndarray, words: str | None, *, last: bool) -> None:
    """words: beside the first panel of a row, with numbers on the axis. Steps stand under the last panel of a column."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    axes.tick_params(labelsize=SMALL, length=2.5, labelleft=words is not None, labelbottom=last)
    axes.xaxis.set_major_locator(FixedLocator(steps.tolist()) if _can_name(steps) else MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1e5 else f"{value / 1000:g}k")
    if last:
        axes.set_xlabel("step", fontsize=NORMAL, labelpad=2)
    if words is not None:
        turned = 90 if words == "expert" else 0
        label = axes.annotate(words, (0, 0.5), (-25, 0), xycoords="axes fraction", textcoords="offset points", ha="right", va="center")
        label.set(fontsize=NORMAL, rotation=turned)


def _can_name(steps: np.ndarray) -> bool:
    """Few, and none so near to another that their numbers would touch."""
    apart = np.diff(steps)
    return len(steps) <= NAMED and (len(steps) == 1 or bool(apart.max() <= 2 * apart.min()))


def _colour_bar(figure: "Figure", grid: Grid, mesh: "QuadMesh") -> None:
    """Beside the first row's heat maps: as tall as they are."""
    width, height = grid.size
    place = ((width - RIGHT + 0.2) / width, (height - TITLE - grid.height) / height, 0.13 / width, grid.height / height)
    bar = figure.colorbar(mesh, cax=figure.add_axes(place), extend="max", extendfrac=0.08)
    bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["0", "0.5", "1", "1.5", "2"])
    bar.ax.tick_params(labelsize=SMALL, length=2.5)
    bar.set_label("load / mean load", fontsize=NORMAL)


def _titles(figure: "Figure", load: ExpertLoad, name: str, blocks: Sequence[int]) -> None:
    width, height = figure.get_size_inches()
    shown = name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"
    which = "" if len(blocks) == load.num_blocks else f"; blocks {', '.join(map(str, blocks))} of {load.num_blocks}"
    grey = "; grey: nothing was routed" if np.isnan(load.relative[:, blocks]).any() else ""
    left = LEFT / width
    figure.text(left, 1 - 0.26 / height, "Load of each expert over training", fontsize=LARGE, fontweight="bold", va="center")
    words = f"{shown}: {load.num_experts} experts a block{which}{grey}"
    figure.text(left, 1 - 0.47 / height, words, fontsize=NORMAL, va="center", color="0.3", parse_math=False)

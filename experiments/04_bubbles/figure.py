"""What `run.py` measured, as two panels: step time and memory over microbatches, by schedule."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
Style = Literal["", "-", "--", ":"]


class Look(NamedTuple):
    """Colours are Okabe and Ito's; markers tell the schedules apart without them."""

    colour: str
    marker: str


LOOKS = {
    "gpipe": Look("#000000", "o"),
    "1f1b": Look("#D55E00", "s"),
    "interleaved": Look("#E69F00", "^"),
    "zb_h1": Look("#0072B2", "D"),
    "zb_v": Look("#56B4E9", "v"),
    "dualpipe_v": Look("#009E73", "P"),
}
GREY = "0.45"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """`result` as in result.json."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(11, 4.6), facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    _steps(left, result["steps"])
    _memory(right, result["memory"])
    lines = {name: Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label=name) for name, look in LOOKS.items()}
    named = {point["schedule"] for part in ("steps", "memory") for point in result[part]["points"]}
    figure.legend(handles=[line for name, line in lines.items() if name in named], loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=200)


def _steps(axes: "Axes", part: Mapping[str, Any]) -> None:
    """Time of one microbatch, so that a bubble shows as a rise to the left. Both predictions: scaled by one constant each."""
    unit, curves = part["ms_per_unit"], dict(_curves(part["points"], "schedule"))
    for i, ((name,), points) in enumerate(curves.items()):
        look, shift = LOOKS[name], 1.035 ** (i - (len(curves) - 1) / 2)  # side by side, where they would hide one another
        counts = [point["microbatches"] for point in points]
        makespan = [unit["makespan"] * point["makespan"] / point["microbatches"] for point in points]
        measured = [point["step_ms"] / point["microbatches"] for point in points]
        axes.plot(counts, makespan, color=look.colour, linestyle=(4 * (i % 2), (4, 4)), linewidth=1.4)
        axes.plot([m * shift for m in counts], measured, color=look.colour, marker=look.marker, linestyle="", markersize=6)
    work = [(point["microbatches"], unit["work"] * point["work"] / point["microbatches"]) for point in part["points"]]
    axes.plot(*zip(*sorted(work), strict=True), color=GREY, linewidth=4, alpha=0.5, zorder=0, solid_capstyle="round")
    _over_microbatches(axes, part, "Step time / M, measured and predicted", "ms a microbatch")
    axes.set_ylim(bottom=0)
    _key(axes, {"measured": ("", 1), "work, scaled (all schedules)": ("-", 4), "makespan, scaled": ("--", 1)})


def _memory(axes: "Axes", part: Mapping[str, Any]) -> None:
    for (name, stash), points in _curves(part["points"], "schedule", "stash"):
        look, kept = LOOKS[name], stash == "residuals"
        mib = [point["temp_bytes"] / MIB for point in points]
        counts = [point["microbatches"] for point in points]
        axes.plot(
            counts, mib, color=look.colour, marker=look.marker, linestyle="-" if kept else ":", markerfacecolor=None if kept else "white"
        )
    _over_microbatches(axes, part, "Compiled temporaries of a device", "MiB")
    sizes = [2**i for i in range(4, 20) if 2**i <= 2 * max(point["temp_bytes"] for point in part["points"]) / MIB]
    axes.set_yscale("log", base=2)
    axes.set_yticks(sizes, [str(size) for size in sizes])
    _key(axes, {"stash: residuals": ("-", 1.5), "stash: inputs": (":", 1.5)})


def _key(axes: "Axes", entries: Mapping[str, tuple[Style, float]]) -> None:
    """What the lines (style, width) of a panel mean, whatever their colour; no style: a marker."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=GREY, linestyle=ls, linewidth=lw, marker="" if ls else "o", label=label) for label, (ls, lw) in entries.items()
    ]
    axes.legend(handles=handles, frameon=False, fontsize=9, handlelength=2.4)


def _over_microbatches(axes: "Axes", part: Mapping[str, Any], title: str, unit: str) -> None:
    counts = sorted({point["microbatches"] for point in part["points"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(m) for m in counts])
    axes.set_xlabel("microbatches M")
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _curves(points: list[dict[str, Any]], *keys: str) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Points of each combination of these keys, in order of M."""
    for names in dict.fromkeys(tuple(point[key] for key in keys) for point in points):
        chosen = [point for point in points if tuple(point[key] for key in keys) == names]
        yield names, sorted(chosen, key=lambda point: point["microbatches"])

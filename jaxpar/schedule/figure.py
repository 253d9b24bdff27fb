"""A timeline as a picture for a paper: one row a stage, schedules below each other on one time axis, idle time left white."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.palette import NAMES, colour, shade
from jaxpar.schedule.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# inches
ROW, TITLE, FOOT = 0.27, 0.42, 0.95
LEFT, RIGHT = 0.75, 0.2
LABELLED = 0.24  # width of the shortest action in which its microbatch can be read
NARROWEST, WIDEST = 7.0, 18.0
SIZE = 8.5  # points, of a microbatch number
LONGEST_NAME = 28  # letters that leave room for the figures beside them in the narrowest picture


def save_figure(timelines: Sequence[Timeline], path: Path | str, form: Literal["png", "svg"]) -> None:
    """Draw to a file; text of an SVG stays text. Needs matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ScheduleError(["matplotlib draws it and is not installed; pip install 'jaxpar[plot]'"], str(path)) from None
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpar"}):
        undated = {"Date": None} if form == "svg" else None  # the same picture every day
        make_figure(timelines).savefig(path, format=form, dpi=200, metadata=undated)


def make_figure(timelines: Sequence[Timeline]) -> "Figure":
    """Panels of equal scale in both directions: what looks longer is longer."""
    from matplotlib.figure import Figure

    longest = max(timeline.makespan for timeline in timelines)
    shortest = min(end - start for timeline in timelines for spans in timeline.spans for _, start, end in spans if end > start)
    width = LEFT + RIGHT + min(max(LABELLED * longest / shortest, NARROWEST - LEFT - RIGHT), WIDEST - LEFT - RIGHT)
    heights = [ROW * len(timeline.spans) for timeline in timelines]
    height = sum(heights) + TITLE * len(timelines) + FOOT
    figure = Figure(figsize=(width, height), facecolor="white")
    inches = (width - LEFT - RIGHT) / longest  # of one unit of time
    top = height
    for i, (timeline, tall) in enumerate(zip(timelines, heights, strict=True)):
        top -= TITLE + tall
        axes = figure.add_axes((LEFT / width, top / height, 1 - (LEFT + RIGHT) / width, tall / height))
        axes.set_xlim(0, longest)
        _panel(axes, timeline, inches, last=i == len(timelines) - 1)
    _legend(figure, timelines)
    return figure


def _panel(axes: "Axes", timeline: Timeline, inches: float, *, last: bool) -> None:
    num_stages = len(timeline.spans)
    for stage, spans in enumerate(timeline.spans):
        for i, (_, start, _) in enumerate(spans):
            neighbours = [j for j in (i - 1, i + 1) if 0 <= j < len(spans) and spans[j].start == start and spans[i].end > start]
            share = 2 if neighbours else 1  # an overlapped pair: one above the other
            _bar(axes, timeline, stage, i, (1 / share, 0.5 if neighbours and neighbours[0] < i else 0.0), inches)
    axes.set_ylim(num_stages, 0)
    axes.set_yticks([stage + 0.5 for stage in range(num_stages)], [f"stage {stage}" for stage in range(num_stages)], fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.plot([timeline.makespan] * 2, [0, num_stages], color="black", linewidth=1.2, clip_on=False)
    name, bubbles = timeline.schedule.name, (timeline.bubble_of_makespan, timeline.bubble_of_ideal)
    figures = f"makespan {timeline.makespan:g}     bubble {bubbles[0]:.1%} of makespan, {bubbles[1]:.1%} of ideal time"
    shown = name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"
    for text, x, size, weight, side in ((shown, 0, 11, "bold", "left"), (figures, 1, 9.5, "normal", "right")):
        axes.annotate(text, (x, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=size, fontweight=weight, ha=side)
    if last:
        axes.set_xlabel("time", fontsize=9.5)
        axes.tick_params(axis="x", length=3, labelsize=8.5)
    else:
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)


def _bar(axes: "Axes", timeline: Timeline, stage: int, i: int, place: tuple[float, float], inches: float) -> None:
    """place: (height, offset) within the row."""
    action, start, end = timeline.spans[stage][i]
    height, offset = place
    face = colour(action.kind, action.chunk, timeline.schedule.shape.num_chunks)
    edge = 0.8 if (end - start) * inches > 0.08 else 0.2
    low = stage + 0.04 + 0.92 * offset  # a little white between rows
    axes.broken_barh([(start, end - start)], (low, 0.92 * height), facecolor=face, edgecolor="white", linewidth=edge)
    label = str(action.microbatch)
    size = SIZE if height == 1 else 0.62 * SIZE
    if (end - start) * inches > (0.6 * len(label) + 0.4) * size / 72:
        axes.text((start + end) / 2, low + 0.46 * height, label, fontsize=size, ha="center", va="center_baseline")


def _legend(figure: "Figure", timelines: Sequence[Timeline]) -> None:
    """Kinds that occur; shades of grey for the chunks of the schedule that has most."""
    from matplotlib.patches import Patch

    present = {span.action.kind for timeline in timelines for spans in timeline.spans for span in spans}
    handles = [Patch(facecolor=colour(kind), label=f"{kind}: {name}") for kind, name in NAMES.items() if kind in present]
    num_chunks = max(timeline.schedule.shape.num_chunks for timeline in timelines)
    if num_chunks > 1:
        greys = [shade((110, 110, 110), chunk, num_chunks) for chunk in range(num_chunks)]
        handles += [Patch(facecolor=grey, label=f"chunk {chunk}") for chunk, grey in enumerate(greys)]
    handles.append(Patch(facecolor="white", edgecolor="0.6", label="idle"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8.5, frameon=False, handlelength=1.3, columnspacing=1.4)

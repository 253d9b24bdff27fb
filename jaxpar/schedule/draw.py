"""A schedule in the terminal: the grid of its actions in time, the figures of one, the comparison of several."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from jaxpar.schedule.actions import Action
from jaxpar.schedule.lower import lower
from jaxpar.schedule.palette import NAMES, colour
from jaxpar.schedule.simulate import Span, Timeline
from jaxpar.schedule.ticks import simulate_ticks

MOST_BANDS = 6  # screens of a long timeline; the middle of more is more of the same
SHORTEST = 0.25  # of the longest action: shorter ones lose their label rather than stretch the grid


def draw_grid(timeline: Timeline, width: int) -> Text:
    """One line a stage, one cell an action, as long as it takes; timelines wider than `width` go on below."""
    margin = len(f"stage {timeline.schedule.shape.num_stages - 1} ")
    shortest = _shortest(timeline)
    label = max(len(str(span.action)) for spans in timeline.spans for span in spans) + 1
    lines = [_line(spans, label / shortest, timeline.schedule.shape.num_chunks) for spans in timeline.spans]
    length, room = max(map(len, lines)), max((width - margin) // label, 1) * label  # whole cells where all are as long
    starts = list(range(0, length, room))
    shown = starts if len(starts) <= MOST_BANDS else [*starts[: MOST_BANDS // 2], None, *starts[-(MOST_BANDS // 2) :]]
    grid = Text()
    for start in shown:
        if start is None:
            grid.append(f"\n{'':{margin}}... {len(starts) - MOST_BANDS} more screens of {room} columns ...\n\n", style="dim")
            continue
        for stage, line in enumerate(lines):
            grid.append(f"{f'stage {stage}':<{margin}}")
            grid.append_text(line[start : start + room])
            grid.append("\n")
        if start != starts[-1] and len(starts) > 1:
            grid.append("\n")
    return grid


def _shortest(timeline: Timeline) -> float:
    """The time that one label's width stands for."""
    durations = [end - start for spans in timeline.spans for _, start, end in spans]
    return max(min(durations), max(durations) * SHORTEST)


def _line(spans: Sequence[Span], columns: float, num_chunks: int) -> Text:
    """Columns follow from times, so that what happens at once stands in one column of all lines."""
    line = Text()
    for i, (action, start, end) in enumerate(spans):
        first, last = max(round(start * columns), len(line)), round(end * columns)
        if i + 1 < len(spans) and spans[i + 1].start == start:  # an overlapped pair, side by side
            last = (first + last) // 2
        line.append(" " * (first - len(line)))
        line.append(f"{str(action)[: last - first]:<{last - first}}", style=f"black on {colour(action.kind, action.chunk, num_chunks)}")
    return line


def legend(timeline: Timeline) -> Text:
    """What the letters and colours mean, of the kinds that occur."""
    present = {span.action.kind for spans in timeline.spans for span in spans}
    text = Text()
    for kind, name in NAMES.items():
        if kind in present:
            text.append(f" {kind} ", style=f"black on {colour(kind)}")
            text.append(f" {name}   ")
    text.append("number: microbatch" + (", .chunk (paler)" if timeline.schedule.shape.num_chunks > 1 else ""))
    return text


def describe(timeline: Timeline) -> str:
    """Sizes and times that the grid stands for."""
    shape = timeline.schedule.shape
    chunks = f", {shape.num_chunks} chunks a stage ({shape.placement})" if shape.num_chunks > 1 else ""
    sizes = f"{timeline.schedule.name}: {shape.num_stages} stages, {shape.num_microbatches} microbatches{chunks}"
    return f"{sizes}; times of a stage {_times(timeline)}"


def _times(timeline: Timeline) -> str:
    costs = timeline.costs
    present = {span.action.kind for spans in timeline.spans for span in spans}
    named: dict[str, float] = {kind: costs.of((Action(kind, 0),)) for kind in NAMES if kind in present}
    if costs.FB is not None:
        named["FB"] = costs.FB
    return ", ".join(f"{name} {value:g}" for name, value in named.items()) + f"; message {costs.comm:g}"


def summary(timeline: Timeline) -> Table:
    """The figures of one schedule."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    peaks = timeline.peak_in_flight
    ticks = lower(timeline.schedule)
    for name, value in {
        "makespan": f"{timeline.makespan:g}",
        "makespan in ticks (simulated)": f"{simulate_ticks(ticks, timeline.costs):g} in {ticks.num_ticks} ticks",
        "bubble, idle / ideal time m(F + B)": _percent(timeline.bubble_of_ideal),
        "bubble, idle / makespan": _percent(timeline.bubble_of_makespan),
        "bubble, idle inside the longest stage's span": _percent(timeline.bubble_rate),
        "peak in flight, stages 0 to p - 1 (microbatches)": "  ".join(f"{peak:g}" for peak in peaks),
        "messages a step": str(timeline.num_messages),
    }.items():
        table.add_row(name, value)
    return table


def comparison(timelines: Sequence[Timeline]) -> Table:
    """One row a schedule."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for column in ("makespan", "idle / m(F + B)", "idle / makespan", "idle in span", "peak in flight", "messages"):
        table.add_column(column, justify="right")
    for timeline in timelines:
        bubbles = (timeline.bubble_of_ideal, timeline.bubble_of_makespan, timeline.bubble_rate)
        peak = f"{max(timeline.peak_in_flight):g}"
        table.add_row(timeline.schedule.name, f"{timeline.makespan:g}", *map(_percent, bubbles), peak, str(timeline.num_messages))
    return table


def as_dict(timeline: Timeline) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "schedule": timeline.schedule.name,
        "shape": asdict(timeline.schedule.shape),
        "costs": asdict(timeline.costs),
        "makespan": timeline.makespan,
        "idle": timeline.idle,
        "bubble_of_ideal": timeline.bubble_of_ideal,
        "bubble_of_makespan": timeline.bubble_of_makespan,
        "bubble_rate": timeline.bubble_rate,
        "peak_in_flight": timeline.peak_in_flight,
        "num_messages": timeline.num_messages,
        "spans": [[{**span.action._asdict(), "start": span.start, "end": span.end} for span in spans] for spans in timeline.spans],
    }


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"

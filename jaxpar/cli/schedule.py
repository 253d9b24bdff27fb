"""`jaxpar schedule`: a pipeline schedule, drawn and measured; several, compared. Starts no JAX."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxpar.cli.common import JsonFile, write_file, write_json
from jaxpar.schedule import draw
from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.figure import save_figure
from jaxpar.schedule.from_csv import read_csv, write_csv
from jaxpar.schedule.library import NAMES, build_schedule, schedule_problems
from jaxpar.schedule.simulate import Costs, Timeline, simulate

COSTS = ("F", "I", "W", "B", "FB", "comm")
COST_HELP = "Times of a whole stage and of a message: F=1,I=1,W=1,comm=0.1. B is I + W; FB a forward and a backward overlapped."


def schedule(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=f"{', '.join(NAMES)}, or the path of a .csv file.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", help="Stages; those of the file for a .csv.")] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", help="Microbatches; those of the file for a .csv.")] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", help="Chunks a stage, for interleaved; interleaved:2 says the same.")] = None,
    cost: Annotated[str, typer.Option("--cost", help=COST_HELP)] = "F=1,I=1,W=1,comm=0",
    compare: Annotated[str | None, typer.Option("--compare", help="One table of several: gpipe,1f1b,interleaved:2,zb_v.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the timeline to this file.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the timeline to this file.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a file that pipeline.schedule reads.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw a pipeline schedule: makespan, bubble, activations in flight, messages."""
    names = [part.strip() for part in compare.split(",") if part.strip()] if compare is not None else [name] if name else []
    problems = _usage_problems(name, compare, names, csv)
    costs = _parse_costs(cost, problems)
    stages, microbatches = _sizes(names, stages, microbatches, problems)
    if stages is not None and microbatches is not None:
        for each in names:
            problems += schedule_problems(each, stages, microbatches, chunks)
    if problems or stages is None or microbatches is None:
        raise ScheduleError(list(dict.fromkeys(problems)), "jaxpar schedule")
    timelines = [simulate(build_schedule(each, stages, microbatches, chunks), costs) for each in names]
    _show(timelines, compared=compare is not None)
    if png is not None:
        write_file(png, lambda file: save_figure(timelines, file, "png"))
    if svg is not None:
        write_file(svg, lambda file: save_figure(timelines, file, "svg"))
    if csv is not None:
        write_file(csv, lambda file: write_csv(timelines[0].schedule, file))
    if json_file is not None:
        found = [draw.as_dict(timeline) for timeline in timelines]
        write_file(json_file, lambda file: write_json(file, found[0] if compare is None else {"schedules": found}))


def _usage_problems(name: str | None, compare: str | None, names: list[str], csv: Path | None) -> list[str]:
    problems = []
    if name and compare is not None:
        problems.append(f"{name} and --compare: one or the other; --compare {','.join([name, *names])} would work")
    elif not names:
        problems.append("no schedule; jaxpar schedule 1f1b --stages 4 --microbatches 8, or --compare 1f1b,zb_v in place of 1f1b")
    if csv is not None and compare is not None:
        problems.append("--csv with --compare: a file holds one schedule; name one in place of --compare")
    return problems


def _parse_costs(text: str, problems: list[str]) -> Costs:
    """F=1,comm=0.1; what is left out keeps its default."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or name not in COSTS:
            problems.append(f"--cost {part!r}: write NAME=NUMBER; names are {', '.join(COSTS)}")
        elif not math.isfinite(value) or value < 0 or (value == 0 and name != "comm"):
            problems.append(f"--cost {part!r}: a time is a number above 0 (comm may be 0); {name}=1 would work")
        else:
            found[name] = value
    return Costs(**found)


def _sizes(names: list[str], stages: int | None, microbatches: int | None, problems: list[str]) -> tuple[int | None, int | None]:
    """What is not given is that of the first .csv file; without one it is missing."""
    files = [name for name in names if name.endswith(".csv")]
    if files and (stages is None or microbatches is None):
        try:
            shape = read_csv(files[0]).shape
        except ScheduleError as error:
            problems += [f"{files[0]}: {problem}" for problem in error.problems]
            return None, None
        stages = shape.num_stages if stages is None else stages
        microbatches = shape.num_microbatches if microbatches is None else microbatches
    for option, value, example in (("--stages", stages, 4), ("--microbatches", microbatches, 8)):
        if value is None and names:
            problems.append(f"{option} is missing; {option} {example} would work")
    return stages, microbatches


def _show(timelines: list[Timeline], *, compared: bool) -> None:
    console = Console(highlight=False)
    if compared:
        console.print(draw.comparison(timelines))
        return
    (timeline,) = timelines
    console.print(draw.describe(timeline), soft_wrap=True)
    console.print()
    console.print(draw.draw_grid(timeline, console.width))
    console.print(draw.legend(timeline))
    console.print()
    console.print(draw.summary(timeline))

"""`jaxpar report`: how far a run came and how its experts were loaded, from its rows of metrics. Starts no JAX."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxpar.cli.common import JsonFile, write_file, write_json
from jaxpar.core.shares import entropy
from jaxpar.core.words import percent, times
from jaxpar.report.errors import ReportError
from jaxpar.report.expert_load import ExpertLoad, expert_load, has_experts, last_evaluation
from jaxpar.report.heat_map import save_heat_map, shown_blocks
from jaxpar.report.load_text import bar_lines, legend, levels_for, verdict
from jaxpar.report.run_folder import Outcome, outcome, read_run

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run: the one with metrics.jsonl.")]


def report(
    run_dir: RunDir,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the load of experts over training to this file.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the load of experts over training to this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Say how far a run came and how its experts were loaded; draw the load over training."""
    rows = read_run(run_dir)
    reached = outcome(rows)
    console = Console(highlight=False)
    console.print(f"{run_dir}: {outcome_words(reached)}", soft_wrap=True, markup=False)
    load = expert_load(rows, str(run_dir)) if has_experts(rows) else None
    evaluated = last_evaluation(rows, str(run_dir))
    if load is None:
        console.print("no experts: no row of this run tells of any")
    else:
        show(console, load, evaluated)
    if json_file is not None:
        write_file(json_file, lambda file: write_json(file, as_dict(run_dir, reached, load, evaluated)))
    if png is not None:
        _draw(load, run_dir, png, "png")
    if svg is not None:
        _draw(load, run_dir, svg, "svg")


def outcome_words(reached: Outcome) -> str:
    """One line: the last step and what it gave."""
    words = [f"step {reached.step}"]
    if reached.loss is not None:
        words.append(f"loss {reached.loss:.4f}")
    if reached.eval_loss is not None:
        words.append(f"evaluation loss {reached.eval_loss:.4f}")
    if reached.tokens_per_s is not None:
        words.append(f"{reached.tokens_per_s:,.0f} tokens/s")
    return ", ".join(words)


def show(console: Console, load: ExpertLoad, evaluated: ExpertLoad | None) -> None:
    """The last logged step: figures by block, a bar for each expert, the verdict; the verdict on the last evaluation."""
    console.print(f"\nload of experts at step {load.steps[-1]}, {load.num_experts} a block:")
    console.print(figures(load))
    levels = levels_for(sys.stdout.encoding)
    console.print(f"by expert: {legend(levels)}", soft_wrap=True)
    for line in bar_lines(load.relative[-1], range(load.num_blocks), levels):
        console.print(line, soft_wrap=True)
    console.print(f"\n{verdict(load.relative[-1], load.dropped[-1])}", soft_wrap=True)
    if evaluated is not None:
        console.print(f"evaluation at step {evaluated.steps[-1]}: {verdict(evaluated.relative[-1], evaluated.dropped[-1])}", soft_wrap=True)


def figures(load: ExpertLoad) -> Table:
    """One row a block. A block without an entry: its rows have no such number, or nothing was routed."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    overflowed = not np.isnan(load.overflow[-1]).all()
    columns = ["block", "max / mean", "least / mean", "dropped", "balance", "load entropy / ln E", "router's"]
    for column in [*columns, *(["overflow"] if overflowed else [])]:
        table.add_column(column, justify="right")
    for block in blocks_of(load):
        least = f"{_cell(block['least_over_mean'], times)} (expert {block['least_expert']})"
        cells = [
            _cell(block["max_over_mean"], times),
            least if block["least_over_mean"] is not None else "-",
            _cell(block["dropped"], percent),
            _cell(block["balance"], times),
            _cell(block["load_entropy_over_ln_experts"], lambda value: f"{value:.3f}"),
            _cell(block["entropy_over_ln_experts"], lambda value: f"{value:.3f}"),
            *([_cell(block["overflow"], percent)] if overflowed else []),
        ]
        table.add_row(str(block["block"]), *cells)
    return table


def blocks_of(load: ExpertLoad) -> list[dict[str, Any]]:
    """The last logged step by block; None: not logged, or nothing was routed."""
    ln_experts = math.log(load.num_experts) or math.nan  # a lone expert leaves nothing to choose
    found = []
    for block, relative in enumerate(load.relative[-1]):
        numbers = {
            "max_over_mean": relative.max(),
            "least_over_mean": relative.min(),
            "dropped": load.dropped[-1, block],
            "balance": load.balance[-1, block],
            "load_entropy_over_ln_experts": entropy(load.load[-1, block]) / ln_experts if relative.max() > 0 else math.nan,
            "entropy_over_ln_experts": load.entropy[-1, block] / ln_experts,
            "overflow": load.overflow[-1, block],
        }
        experts = {"block": block, "busiest_expert": int(relative.argmax()), "least_expert": int(relative.argmin())}
        found.append({**experts, **{name: _or_none(value) for name, value in numbers.items()}, "load": load.load[-1, block].tolist()})
    return found


def as_dict(run_dir: Path, reached: Outcome, load: ExpertLoad | None, evaluated: ExpertLoad | None) -> dict[str, Any]:
    """All of it, for programs: numbers of the last logged step by block, and what the picture's lines show, [steps][blocks]."""
    facts = {name: value if name == "step" else _or_none(value) for name, value in reached._asdict().items()}
    result: dict[str, Any] = {"run_dir": str(run_dir), **facts, "experts": None}
    if load is not None:
        result["experts"] = {
            "num_blocks": load.num_blocks,
            "num_experts": load.num_experts,
            "blocks": blocks_of(load),
            "verdict": verdict(load.relative[-1], load.dropped[-1]),
            "evaluation": None if evaluated is None else {"step": int(evaluated.steps[-1]), "blocks": blocks_of(evaluated)},
            "steps": load.steps.tolist(),
            "max_over_mean": [[_or_none(value) for value in row] for row in load.max_over_mean],
            "dropped": [[_or_none(value) for value in row] for row in load.dropped],
        }
    return result


def _draw(load: ExpertLoad | None, run_dir: Path, path: Path, kind: Literal["png", "svg"]) -> None:
    if load is None:
        raise ReportError([f"not drawn: {run_dir} is a run without experts, and the picture shows their load"], str(path))
    if path.suffix.lower() != f".{kind}":
        raise ReportError([f"not drawn: --{kind} writes {kind.upper()}; {path.with_suffix(f'.{kind}')} would work"], str(path))
    write_file(path, lambda _: save_heat_map(load, str(run_dir), path, kind))
    if len(blocks := shown_blocks(load)) < load.num_blocks:
        print(f"  it shows blocks {', '.join(map(str, blocks))} of {load.num_blocks}")


def _or_none(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _cell(value: float | None, words: Callable[[float], str]) -> str:
    return "-" if value is None else words(value)

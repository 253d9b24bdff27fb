"""What a run folder says: its rows of metrics, and the few numbers that every run has."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpar.core.records import Row, read_records
from jaxpar.report.errors import ReportError

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
NAMED = 3  # run folders that a message offers


class Outcome(NamedTuple):
    """The last of each number that a run logged; None: never."""

    step: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None


def read_run(folder: Path) -> list[Row]:
    """The rows of a run, at least one, with steps that do not fall."""
    source = str(folder)
    if not folder.is_dir():
        what = "is a file; a report needs the folder of a run" if folder.exists() else "no such folder"
        raise ReportError([f"{what}{_or_runs(folder.parent)}"], source)
    path = folder / METRICS
    if not path.exists():
        if (folder / CONFIG).exists():
            raise ReportError([f"no metrics yet: {METRICS} comes with the first logged step (train.log_every)"], source)
        raise ReportError([f"not the folder of a run: neither {METRICS} nor {CONFIG} is in it{_or_runs(folder)}"], source)
    try:
        rows = read_records(path)
    except OSError as error:
        raise ReportError([f"cannot be read: {error.strerror}"], str(path)) from None
    if not rows:
        raise ReportError(["no metrics yet: not one whole row; the first logged step brings one (train.log_every)"], str(path))
    if problems := _step_problems(rows):
        raise ReportError(problems, str(path))
    return rows


def outcome(rows: Sequence[Row]) -> Outcome:
    """How far a run came."""
    return Outcome(rows[-1]["step"], *(_last(rows, name) for name in ("loss", "eval_loss", "tokens_per_s")))


def _last(rows: Sequence[Row], name: str) -> float | None:
    return next((float(row[name]) for row in reversed(rows) if isinstance(row.get(name), int | float)), None)


def _or_runs(folder: Path) -> str:
    """`; runs here: a, b`: the run folders in a folder."""
    found = sorted(str(path.parent) for path in folder.glob(f"*/{METRICS}"))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"; runs here: {', '.join(found[:NAMED])}{more}" if found else "; jaxpar report runs/NAME, the `run folder` that training prints"


def _step_problems(rows: Sequence[Row]) -> list[str]:
    problems, before = [], None
    for number, row in enumerate(rows, 1):
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            problems.append(f"row {number}: step is {step!r}, not a whole number")
        elif before is not None and step < before:
            problems.append(f"row {number}: step {step} after step {before}; steps rise")
        else:
            before = step
    return problems

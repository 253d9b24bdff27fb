"""How tokens spread over experts, step by step: arrays from the rows of a run.

A load is the share of a block's choices that fell on an expert, before any drop. What counts is that share / the block's mean: 1 for all
experts when they are balanced, whatever their number, and whether or not shares sum to 1 (under expert_choice they need not).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxpar.core.records import Row
from jaxpar.core.shares import over_mean
from jaxpar.report.errors import ReportError

LOAD = "moe_load"
EVAL_PREFIX = "eval_"  # of the same in rows of an evaluation
PER_BLOCK = ("dropped", "entropy", "balance", "overflow")  # rows have them as moe_NAME, one number a block


@dataclass(frozen=True)
class ExpertLoad:
    """Steps [n], rising; load [n, blocks, experts]; the others [n, blocks], NaN in steps whose row has none."""

    steps: np.ndarray
    load: np.ndarray
    dropped: np.ndarray  # fraction of choices without a place
    entropy: np.ndarray  # of a token's probabilities, in nats
    balance: np.ndarray  # loss without its coefficient; 1 is perfect
    overflow: np.ndarray  # fraction of choices without room in a device's buffer

    @property
    def num_blocks(self) -> int:
        return self.load.shape[1]

    @property
    def num_experts(self) -> int:
        return self.load.shape[2]

    @cached_property
    def relative(self) -> np.ndarray:
        """[n, blocks, experts]: load / mean load."""
        return over_mean(self.load)

    @cached_property
    def max_over_mean(self) -> np.ndarray:
        """[n, blocks]: the busiest expert's."""
        return self.relative.max(axis=-1)


def has_experts(rows: Sequence[Row]) -> bool:
    """Some row says how experts were loaded."""
    return any(LOAD in row for row in rows)


def expert_load(rows: Sequence[Row], source: str) -> ExpertLoad:
    """Of all rows that have a load. Steps that the run skipped, for their numbers were not finite, are left out.

    source: what a message calls the run.
    """
    if not has_experts(rows):
        raise ReportError([f"a run without experts: no row has {LOAD}; a model with model.moe writes it"], source)
    used = [row for row in rows if LOAD in row and not row.get("skipped")]
    if not used:
        raise ReportError([f"every row with {LOAD} is of a step that was skipped, for its numbers were not finite"], source)
    steps = np.array([row["step"] for row in used])
    problems = [f"step {step} has two rows with {LOAD}; one is right" for step in steps[1:][np.diff(steps) == 0]]
    load = _stacked(used, LOAD, 2, problems)
    if problems:
        raise ReportError(problems, source)
    columns = {name: _column(used, f"moe_{name}", load.shape[1], problems) for name in PER_BLOCK}
    if problems:
        raise ReportError(problems, source)
    return ExpertLoad(steps, load, **columns)


def last_evaluation(rows: Sequence[Row], source: str) -> ExpertLoad | None:
    """Of the last row that an evaluation of a model with experts has written: one step."""
    last = next((row for row in reversed(rows) if f"{EVAL_PREFIX}{LOAD}" in row), None)
    if last is None:
        return None
    evaluated = {key.removeprefix(EVAL_PREFIX): value for key, value in last.items() if key.startswith(EVAL_PREFIX)}
    return expert_load([{**evaluated, "step": last["step"]}], source)


def _column(rows: Sequence[Row], key: str, num_blocks: int, problems: list[str]) -> np.ndarray:
    """[n, blocks] of a key that rows may lack."""
    column = np.full((len(rows), num_blocks), np.nan)
    having = [i for i, row in enumerate(rows) if key in row]
    if having:
        found = _stacked([rows[i] for i in having], key, 1, problems)
        if found.shape[1:] == (num_blocks,):
            column[having] = found
        elif found.size:
            problems.append(f"{key} has {found.shape[1]} blocks and {LOAD} {num_blocks}; they are of one model, so one number")
    return column


def _stacked(rows: Sequence[Row], key: str, num_dims: int, problems: list[str]) -> np.ndarray:
    """[n, ...] of one key; where there are problems, what is returned is of no use."""
    tables = [_numbers(row[key], num_dims) for row in rows]
    size, size_at = next(((table.shape, row["step"]) for row, table in zip(rows, tables, strict=True) if table is not None), ((), 0))
    for row, table in zip(rows, tables, strict=True):
        at = f"step {row['step']}: {key}"
        if table is None:
            problems.append(f"{at} is not {'a number' if num_dims == 1 else 'a list of numbers, all as long,'} for each block")
        elif table.shape != size:
            rule = "a report is about one model; train the other in a folder of its own (run.dir)"
            problems.append(f"{at} has {_size(table.shape)}, and {_size(size)} at step {size_at}; {rule}")
        else:
            problems += [f"{at}{found}" for found in _wrong_numbers(table)]
    return np.empty((0,) * (num_dims + 1)) if problems else np.stack([table for table in tables if table is not None])


def _numbers(value: Any, num_dims: int) -> np.ndarray | None:
    """A table of so many dims with something in it; None where it is none."""
    try:
        table = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return table if table.ndim == num_dims and table.size else None


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{count} {what}" for count, what in zip(shape, ("blocks", "experts"), strict=False))


def _wrong_numbers(table: np.ndarray) -> list[str]:
    """The first number that is not finite, or below 0, and how many there are."""
    wrong = np.argwhere(~np.isfinite(table) | (table < 0))
    if not len(wrong):
        return []
    place = ", ".join(f"{what} {i}" for what, i in zip(("block", "expert"), wrong[0], strict=False))
    more = f", and {len(wrong) - 1} more such numbers" if len(wrong) > 1 else ""
    return [f" of {place} is {table[tuple(wrong[0])]:g}{more}; it must be 0 or more and finite"]

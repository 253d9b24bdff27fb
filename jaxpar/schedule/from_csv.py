"""Schedules as .csv files, in the notation of torch.distributed.pipelining: a row a stage, cells such as `5F0`.

`5F0` is F of microbatch 0 through virtual stage 5; kinds are F, B, I, W. Empty cells are idle time and mean nothing: the order counts.
`(0F5;7B1)OVERLAP_F_B` is read as its actions one after the other. Cells for communication, sharding and gradient reduction are skipped:
these follow from the order. How many chunks a stage has, and whether they lie in loops or in a V, is seen from the rows.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from jaxpar.schedule.actions import Action, Kind, Placement, Schedule, Shape
from jaxpar.schedule.check import Words, find_faults
from jaxpar.schedule.errors import ScheduleError

CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
SKIPPED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Entry(NamedTuple):
    """An action as a file says it, and the cell that says it (from 1)."""

    virtual: int
    kind: Kind
    microbatch: int
    cell: int


@dataclass(frozen=True)
class Parsed:
    """rows: one a stage. problems: cells that cannot be read."""

    rows: list[list[Entry]]
    problems: list[str]


def read_csv(path: Path | str) -> Schedule:
    """The schedule of a file; ScheduleError names file, row and cell of every violation."""
    parsed = _parse(Path(path))
    problems = parsed.problems or list(_size_problems(parsed.rows))
    shape = None if problems else _shape(parsed.rows)
    if shape and not (problems := list(_place_problems(shape, parsed.rows))):
        orders = (tuple(Action(kind, i, shape.chunk(virtual)) for virtual, kind, i, _ in row) for row in parsed.rows)
        schedule = Schedule(str(path), shape, tuple(orders))
        for fault in find_faults(schedule, _words(shape)):
            cell = "" if fault.position is None else f", cell {parsed.rows[fault.stage][fault.position].cell}"
            problems.append(f"row {fault.stage + 1}{cell}: {fault.text}")
        if not problems:
            return schedule
    raise ScheduleError(problems, str(path))


def write_csv(schedule: Schedule, path: Path | str) -> None:
    """A file that `read_csv` reads back."""
    shape = schedule.shape
    rows = [[_cell(shape, stage, action) for action in order] for stage, order in enumerate(schedule.orders)]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _cell(shape: Shape, stage: int, action: Action) -> str:
    return f"{shape.virtual(stage, action.chunk)}{action.kind}{action.microbatch}"


def _words(shape: Shape) -> Words:
    """The notation of the file in messages."""
    return Words(
        stage=lambda stage: f"row {stage + 1}",
        chunk=lambda stage, chunk: f"virtual stage {shape.virtual(stage, chunk)}",
        action=lambda stage, action: _cell(shape, stage, action),
    )


def _parse(path: Path) -> Parsed:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise ScheduleError([f"cannot be read: {error.strerror}"], str(path)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError([f"is no .csv file: {error}"], str(path)) from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    rows, problems = [], []
    for number, line in enumerate(lines, 1):
        row: list[Entry] = []
        known = len(problems)
        for position, text in enumerate(line, 1):
            entries = _entries(text.strip(), position)
            if entries is None:
                shown = repr(text.strip()[:24])
                problems.append(f"row {number}, cell {position}: {shown} is no action; write virtual stage, kind, microbatch: 0F0")
            row += entries or []
        if not row and len(problems) == known:
            problems.append(f"row {number}: no actions; each row is a stage")
        rows.append(row)
    return Parsed(rows, problems if rows else ["no rows; each row is a stage"])


def _entries(text: str, position: int) -> list[Entry] | None:
    """The actions of a cell; None if it cannot be read."""
    if not text or SKIPPED.fullmatch(text):
        return []
    pair = PAIR.fullmatch(text)
    found = [CELL.fullmatch(part) for part in (pair[1].split(";") if pair else [text])]
    if any(match is None for match in found):
        return None
    return [Entry(int(match[1]), cast(Kind, match[2]), int(match[3]), position) for match in found if match]


def _size_problems(rows: list[list[Entry]]) -> Iterator[str]:
    """Numbers without holes, so that a slip of the pen asks for no million stages; a whole number of chunks a row."""
    for what, numbers in (
        ("virtual stage", {entry.virtual for row in rows for entry in row}),
        ("microbatch", {entry.microbatch for row in rows for entry in row}),
    ):
        hole = next(i for i in range(len(numbers) + 1) if i not in numbers)
        if hole <= max(numbers):
            yield f"{what} {hole} is nowhere, but {max(numbers)} is; they are numbered from 0 without holes"
    highest = max(entry.virtual for row in rows for entry in row)
    if (highest + 1) % len(rows):
        row, entry = next((number, entry) for number, row in enumerate(rows, 1) for entry in row if entry.virtual == highest)
        total = -(-(highest + 1) // len(rows)) * len(rows)
        rule = "each row holds as many"
        yield f"row {row}, cell {entry.cell}: virtual stages 0 to {highest} in {len(rows)} rows: {rule}; 0 to {total - 1} would work"


def _shape(rows: list[list[Entry]]) -> Shape:
    """The placement that fits more actions; loop if both fit the same."""
    num_microbatches = 1 + max(entry.microbatch for row in rows for entry in row)
    num_chunks = (1 + max(entry.virtual for row in rows for entry in row)) // len(rows)

    def shape(placement: Placement) -> Shape:
        return Shape(len(rows), num_microbatches, num_chunks, placement)

    def fits(shape: Shape) -> int:
        return sum(shape.stage(entry.virtual) == stage for stage, row in enumerate(rows) for entry in row)

    return max(shape("loop"), shape("v"), key=fits)


def _place_problems(shape: Shape, rows: list[list[Entry]]) -> Iterator[str]:
    """Actions in the row of another stage; one line for each virtual stage and row."""
    for stage, row in enumerate(rows):
        wrong = {entry.virtual: entry for entry in reversed(row) if shape.stage(entry.virtual) != stage}
        for virtual, entry in sorted(wrong.items()):
            name, home = f"{virtual}{entry.kind}{entry.microbatch}", shape.stage(virtual)
            own = " and ".join(str(shape.virtual(stage, chunk)) for chunk in range(shape.num_chunks))
            way = {"loop": " (each chunk goes down the rows)", "v": " (chunks go down the rows and up again in turn)"}[shape.placement]
            rule = f"virtual stage {virtual} belongs in row {home + 1}, and {own} in this one{way if shape.num_chunks > 1 else ''}"
            yield f"row {stage + 1}, cell {entry.cell}: {name} is in the wrong row; {rule}"

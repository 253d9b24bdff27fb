"""Run records: one JSON object a line, one authoritative line a step.

Every line is written whole and flushed, so a kill leaves at most a torn last line, which readers drop. A run that goes on
after step n first cuts all lines past n (`keep_until`), in one atomic replacement: what it does again is then written again.
Numbers that JSON does not have (NaN, infinities) are written as the strings "nan", "inf", "-inf" and read back as numbers.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]
NOT_IN_JSON = ("nan", "inf", "-inf")


class RecordError(ValueError):
    """A record file that is damaged somewhere else than in its last line."""


class RecordWriter:
    """Appends rows to a file; a torn last line of an earlier process is removed first."""

    def __init__(self, path: Path):
        _cut_torn_line(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """One line, on its way to disk when this returns."""
        self._file.write(to_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def to_line(row: Mapping[str, Any]) -> str:
    """A row as one line of strict JSON."""
    return json.dumps(_clean(row), allow_nan=False) + "\n"


def _clean(value: Any) -> Any:
    """Numbers that JSON has not, as words, also within lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return {key: _clean(v) for key, v in value.items()} if isinstance(value, Mapping) else value


def read_records(path: Path) -> list[Row]:
    """All rows; [] where there is no file. RecordError with the line number when one that is not the last cannot be read."""
    return list(_rows(path)) if path.exists() else []


def keep_until(path: Path, step: int) -> int:
    """Cut the rows of steps after `step`; returns how many. A reader sees the file before or after, never between."""
    rows = read_records(path)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        beside = path.with_name(f".{path.name}.new")
        beside.write_text("".join(map(to_line, kept)), encoding="utf-8")
        os.replace(beside, path)
    return len(rows) - len(kept)


def _rows(path: Path) -> Iterator[Row]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line or number == len(lines):  # what follows the last newline is empty, or torn
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}: line {number} is not a record: {error}") from error
        if not isinstance(row, dict):
            raise RecordError(f"{path}: line {number} is not a record: an object is wanted, found {line[:40]}")
        yield {key: _number(v) for key, v in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(v) for v in value]
    return float(value) if isinstance(value, str) and value in NOT_IN_JSON else value


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)

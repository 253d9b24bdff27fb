"""Record files: strict JSON, torn lines, cuts."""

import json
import math
from pathlib import Path

import pytest

from jaxpar.core.records import RecordError, RecordWriter, keep_until, read_records


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RecordWriter(path) as writer:
        writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "other": -math.inf, "words": "text", "flag": True})
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON: no NaN, no Infinity
    (row,) = read_records(path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["other"], row["words"], row["flag"]) == (math.inf, -math.inf, "text", True)


def test_a_torn_last_line_is_dropped_and_the_next_writer_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_records(path) == [{"step": 1}]
    with RecordWriter(path) as writer:
        writer.write({"step": 2})
    assert read_records(path) == [{"step": 1}, {"step": 2}]


def test_a_damaged_line_inside_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(RecordError, match="line 2"):
        read_records(path)


def test_keep_until_cuts_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RecordWriter(path) as writer:
        for step in range(1, 6):
            writer.write({"step": step})
    assert keep_until(path, 3) == 2
    assert [row["step"] for row in read_records(path)] == [1, 2, 3]
    assert keep_until(path, 3) == 0
    assert keep_until(tmp_path / "none.jsonl", 3) == 0

"""Schedules as .csv files: what is written is read back; what is wrong is named with file, row and cell."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from jaxpar.schedule.actions import Action, Schedule
from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.from_csv import read_csv, write_csv
from jaxpar.schedule.library import build_schedule, schedule_problems
from tests.schedule.built import schedules


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules") / "own.csv"


@settings(deadline=None, max_examples=60)
@given(schedules(most_stages=5, most_microbatches=10))
def test_round_trip(file: Path, schedule: Schedule) -> None:
    write_csv(schedule, file)
    read = read_csv(file)
    shape = schedule.shape
    assert read.orders == schedule.orders
    assert (read.shape.num_microbatches, read.shape.num_chunks) == (shape.num_microbatches, shape.num_chunks)
    if shape.num_stages > 1:  # on one stage a loop and a V are the same
        assert read.shape == shape
    assert schedule_problems(str(file), shape.num_stages, shape.num_microbatches) == []


def test_cells_of_torch(file: Path) -> None:
    """Idle cells, communication and sharding are passed over; an overlapped pair is two actions; spaces do not matter."""
    rows = ["0UNSHARD,0F0,0SEND_F0,,0RECV_B0, 0B0 ,0REDUCE_GRAD", ",1RECV_F0,(1F0;1I0)OVERLAP_F_B,1SEND_B0,1W0,,,", ""]
    file.write_text("\ufeff" + "\r\n".join(rows), encoding="utf-8")
    assert read_csv(file).orders == ((Action("F", 0), Action("B", 0)), (Action("F", 0), Action("I", 0), Action("W", 0)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0\n", ["row 2: virtual stage 1: no backward (B, or I and W) for microbatch 0"]),
        ("0F0,0B0,,0F0\n1F0,1B0\n", ["row 1, cell 4: 0F0 comes again; once is right"]),
        ("0B0,0F0\n1F0,1B0\n", ["row 1, cell 1: 0B0 comes before 0F0, which it needs", "row 1, cell 1: deadlock: row 1 at 0B0 waits for"]),
        (
            "0F0,,0B0,0F1,0B1\n1F1,1B1,1F0,1I0,1W0\n",
            ["row 1, cell 3: deadlock: row 1 at 0B0 waits for 1I0 of row 2; row 2 at 1F1 waits for 0F1 of row 1"],
        ),
        (
            "0F0,3F0,0B0,3B0\n1F0,2F0,2B0,1B0\n",
            ["row 1, cell 3: deadlock: row 1 at 0B0 waits for 1B0 of row 2; row 2 at 2B0 waits for 3B0"],
        ),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2I0,1B0\n", ["row 2: virtual stage 2: I without W for microbatch 0"]),
        ("0F0,0X0\n1F0,1B0,oops\n", ["row 1, cell 2: '0X0' is no action; write virtual stage", "row 2, cell 3: 'oops' is no action"]),
        ("0F0,0B0\n\n1F0,1B0\n", ["row 2: no actions; each row is a stage"]),
        ("0F0,0B0\n1F0,1B0,2F0\n", ["row 2, cell 3: virtual stages 0 to 2 in 2 rows: each row holds as many; 0 to 3 would work"]),
        (
            "0F0,3F0,3B0,0B0,1F0\n2F0,2B0,1B0\n",
            [
                "row 1, cell 5: 1F0 is in the wrong row; virtual stage 1 belongs in row 2, and 0 and 3 in this one "
                "(chunks go down the rows and up again in turn)"
            ],
        ),
        (
            "0F0,2F0,2B0,0B0,1F0\n1F0,3F0,3B0,1B0\n",
            [
                "row 1, cell 5: 1F0 is in the wrong row; virtual stage 1 belongs in row 2, and 0 and 2 in this one "
                "(each chunk goes down the rows)"
            ],
        ),
        ("0F0,0B0\n99999999F0,99999999B0\n", ["virtual stage 1 is nowhere, but 99999999 is; they are numbered from 0"]),
        ("0F0,0B0,0F900000000\n1F0,1B0\n", ["microbatch 1 is nowhere, but 900000000 is"]),
        (f"{'1' * 5000}F0\n", ["row 1, cell 1: '111"]),
        ("0SEND_F0\n", ["row 1: no actions; each row is a stage"]),
        ("", ["no rows; each row is a stage"]),
    ],
)
def test_what_is_wrong(file: Path, text: str, said: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(ScheduleError) as error:
        read_csv(file)
    assert str(error.value).startswith(f"{file}: ")
    assert len(error.value.problems) == len(said), error.value
    for line, words in zip(error.value.problems, said, strict=True):
        assert line.startswith(words)


def test_files_that_are_no_schedules(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    (tmp_path / "folder.csv").mkdir()
    for name, words in (("gone", "No such file"), ("binary", "is no .csv file"), ("folder", "Is a directory")):
        with pytest.raises(ScheduleError, match=words):
            read_csv(tmp_path / f"{name}.csv")


def test_sizes_other_than_those_of_the_file(file: Path) -> None:
    write_csv(build_schedule("zb_v", 4, 8), file)
    assert build_schedule(str(file), 4, 8, 2).orders == build_schedule("zb_v", 4, 8).orders
    assert schedule_problems(str(file), 2, 9, 1) == [
        f"2 stages: {file} is a schedule for 4; 4 would work",
        f"9 microbatches: {file} is a schedule for 8; 8 would work",
        f"1 chunks a stage: {file} is a schedule for 2; 2 would work",
    ]

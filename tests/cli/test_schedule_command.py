"""`jaxpar schedule`: what it prints and writes, what it refuses; it starts no JAX."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.cli.main import run
from jaxpar.schedule.from_csv import read_csv

SIZES = ("--stages", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def test_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "--compare", "gpipe,1f1b,interleaved:2,zb_h1,zb_v", *SIZES]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [(row[0], row[1]) for row in rows] == [
        ("gpipe", "33"),
        ("1f1b", "33"),
        ("interleaved:2", "28.5"),
        ("zb_h1", "27"),
        ("zb_v", "25.5"),
    ]


def test_one_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "interleaved", "--chunks", "2", *SIZES, "--json", "out/own.json", "--csv", "own.csv"]) == 0
    out = capsys.readouterr().out
    for words in (
        "interleaved:2: 4 stages, 8 microbatches, 2 chunks",
        "stage 3",
        "F0.1",
        "28.5",
        "makespan in ticks (simulated)",
        "idle / makespan",
        "15.8 %",
        "18.8 %",
        "112",
    ):
        assert words in out
    found = json.loads(Path("out/own.json").read_text())
    assert (found["makespan"], found["num_messages"], found["peak_in_flight"]) == (28.5, 112, [5.5, 4.5, 3.5, 2.5])
    assert run(["schedule", "own.csv", "--cost", "F=2,B=3,comm=.5"]) == 0
    assert "times of a stage F 2, B 3; message 0.5" in capsys.readouterr().out
    assert read_csv("own.csv").shape.num_chunks == 2


def test_the_grid_is_in_colour_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert run(["schedule", "zb_h1", *SIZES]) == 0
    out = capsys.readouterr().out
    for cell, (red, green, blue) in {"F0": (86, 180, 233), "I0": (230, 159, 0), "W0": (0, 158, 115)}.items():
        assert f"\x1b[30;48;2;{red};{green};{blue}m{cell} \x1b[0m" in out


def test_json_of_a_comparison() -> None:
    assert run(["schedule", "--compare", "gpipe,zb_h2", *SIZES, "--json", "both.json"]) == 0
    assert [found["schedule"] for found in json.loads(Path("both.json").read_text())["schedules"]] == ["gpipe", "zb_h2"]


def test_pictures() -> None:
    pytest.importorskip("matplotlib")
    assert run(["schedule", "--compare", "1f1b,zb_v", *SIZES, "--png", "a.png", "--svg", "a.svg"]) == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert "zb_v" in Path("a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("no schedule; jaxpar schedule 1f1b --stages 4",)),
        (("1f1b",), ("--stages is missing; --stages 4 would work", "--microbatches is missing")),
        (("1f1b", "--stages", "0", "--microbatches", "-1"), ("0 stages: 1 or more", "-1 microbatches: 1 or more")),
        (("1f1c", *SIZES), ("did you mean 1f1b?",)),
        (("dualpipe_v", "--stages", "4", "--microbatches", "7"), ("dualpipe_v needs 8 or more", "8 microbatches would work", "or zb_v")),
        (("1f1b", "--compare", "zb_v", *SIZES), ("1f1b and --compare: one or the other; --compare 1f1b,zb_v would work",)),
        (("--compare", "1f1b,zb_x,zb_w", "--csv", "a.csv", *SIZES), ("'zb_x'", "'zb_w'", "a file holds one schedule")),
        (("zb_v", "--cost", "F=x,Q=1,W,I=-1", "--chunks", "3", *SIZES), ("'F=x'", "'Q=1'", "'W'", "'I=-1'", "zb_v has 2; 2 would work")),
        (("gone.csv",), ("gone.csv: cannot be read",)),
        (("bad.csv",), ("bad.csv: row 1, cell 2: 0F0 comes again; once is right",)),
        (("good.csv", "--stages", "0"), ("0 stages: 1 or more",)),
        (("good.csv", "--stages", "3"), ("3 stages: good.csv is a schedule for 1; 1 would work",)),
        (("1f1b", *SIZES, "--csv", "bad.csv/x.csv"), ("bad.csv/x.csv", "cannot be written")),
    ],
)
def test_exit_2_with_a_message(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    Path("good.csv").write_text("0F0,0B0\n")
    Path("bad.csv").write_text("0F0,0F0,0B0\n1F0,1B0\n")
    assert run(["schedule", *arguments]) == 2
    err = capsys.readouterr().err
    for word in words:
        assert word in err
    assert len(err.splitlines()) <= 1 + len(words)


def test_jax_is_not_started() -> None:
    code = "import sys; from jaxpar.cli.main import run; run(sys.argv[1:]); print([m for m in ('jax', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code, "schedule", "zb_v", *SIZES], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"

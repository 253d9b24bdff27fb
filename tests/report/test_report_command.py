"""`jaxpar report`: what it prints and writes, what it refuses; it starts no JAX."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.cli.main import run
from tests.report.runs import many, row, write_run

ROWS = [
    row(10, [[0.25] * 4, [0.25] * 4]),
    row(
        20,
        [[0.3, 0.25, 0.25, 0.2], [0.6, 0.2, 0.2, 0.0]],
        moe_dropped=[0.0, 0.35],
        moe_balance=[1.01, 1.76],
        moe_entropy=[math.log(4), 0.5 * math.log(4)],
    ),
    {"step": 21, "loss": 3.5, "eval_loss": 3.75, "eval_moe_load": [[0.25] * 4] * 2},
]
DENSE = [{"step": 1, "loss": 3.0, "tokens_per_s": 1234.5}, {"step": 2, "loss": 2.5, "eval_loss": 2.75, "tokens_per_s": 2345.0}]


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/moe"), ROWS)
    write_run(Path("runs/dense"), DENSE)


def test_the_last_logged_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "runs/moe"]) == 0
    out = capsys.readouterr().out
    assert "runs/moe: step 21, loss 3.5000, evaluation loss 3.7500, 2,000 tokens/s" in out
    assert "load of experts at step 20, 4 a block" in out
    rows = [line.split() for line in out.splitlines() if "(expert" in line]
    assert rows == [
        ["0", "1.20", "0.80", "(expert", "3)", "0.0", "%", "1.01", "0.993", "1.000"],
        ["1", "2.40", "0.00", "(expert", "3)", "35.0", "%", "1.76", "0.685", "0.500"],
    ]
    assert "block 0  ▅▄▄▃\n" in out
    assert "block 1  █▃▃·\n" in out
    verdict = "block 1: expert 0 gets 2.40 x the mean; 1 of 8 experts gets less than 0.1 x the mean; 35.0 % of the choices of block 1"
    assert out.splitlines()[-2].startswith(verdict)
    assert out.splitlines()[-1] == "evaluation at step 21: balanced: every expert gets 1.00 to 1.00 x the mean of its block"
    assert "overflow" not in out


def test_overflow_has_a_column_where_it_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("ragged"), [row(1, [[0.5, 0.5]], moe_overflow=[0.02])])
    assert run(["report", "ragged"]) == 0
    out = capsys.readouterr().out
    assert "overflow" in out
    assert "2.0 %" in out


def test_what_is_missing_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    """One expert has no entropy to compare, a block without tokens no ratio, an old row no drops."""
    write_run(Path("odd"), [{"step": 1, "moe_load": [[1.0], [0.0]], "moe_entropy": [0.0, 0.0]}])
    assert run(["report", "odd", "--json", "odd.json"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("-")]
    assert rows == [["0", "1.00", "1.00", "(expert", "0)", *"----"], ["1", *"------"]]
    blocks = json.loads(Path("odd.json").read_text())["experts"]["blocks"]
    assert [block["max_over_mean"] for block in blocks] == [1.0, None]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "runs/moe", "--json", "out/report.json"]) == 0
    assert "wrote out/report.json" in capsys.readouterr().out
    found = json.loads(Path("out/report.json").read_text())
    assert {key: found[key] for key in ("run_dir", "step", "loss", "eval_loss", "tokens_per_s")} == {
        "run_dir": "runs/moe",
        "step": 21,
        "loss": 3.5,
        "eval_loss": 3.75,
        "tokens_per_s": 2000.0,
    }
    experts = found["experts"]
    assert (experts["num_blocks"], experts["num_experts"], experts["steps"]) == (2, 4, [10, 20])
    assert experts["dropped"] == [[0.1, 0.1], [0.0, 0.35]]
    assert experts["max_over_mean"] == [[1.0, 1.0], [pytest.approx(1.2), pytest.approx(2.4)]]
    worst = experts["blocks"][1]
    assert (worst["block"], worst["busiest_expert"], worst["least_expert"]) == (1, 0, 3)
    assert (worst["max_over_mean"], worst["least_over_mean"], worst["entropy_over_ln_experts"]) == pytest.approx((2.4, 0.0, 0.5))
    assert worst["load_entropy_over_ln_experts"] == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.2)) / math.log(4))
    assert worst["load"] == [0.6, 0.2, 0.2, 0.0]
    assert worst["overflow"] is None


def test_the_last_evaluation_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A router may be balanced in training and not in evaluation (`base`)."""
    evaluated = {"eval_loss": 3.0, "eval_moe_load": [[0.7, 0.1, 0.1, 0.1]], "eval_moe_dropped": [0.5]}
    balanced = {"moe_load": [[0.25] * 4], "moe_dropped": [0.0]}
    write_run(Path("base"), [{"step": 4, **balanced, **evaluated}, {"step": 5, **balanced}])
    assert run(["report", "base", "--json", "base.json"]) == 0
    out = capsys.readouterr().out
    assert "balanced: every expert gets 1.00 to 1.00 x the mean" in out
    assert "evaluation at step 4: block 0: expert 0 gets 2.80 x the mean; 50.0 % of the choices of block 0 are dropped" in out
    found = json.loads(Path("base.json").read_text())["experts"]["evaluation"]
    assert (found["step"], found["blocks"][0]["dropped"]) == (4, 0.5)


def test_a_picture_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "runs/moe", "--png", "load.jpg"]) == 2
    assert "--png writes PNG; load.png would work" in capsys.readouterr().err


def test_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write_run(Path("deep"), many(3, 12, 8))
    assert run(["report", "deep", "--png", "a/a.png", "--svg", "a.svg"]) == 0
    assert Path("a/a.png").read_bytes().startswith(b"\x89PNG")
    assert "deep: 8 experts a block" in Path("a.svg").read_text()
    out = capsys.readouterr().out
    assert "wrote a/a.png\n  it shows blocks 0, 2, 3, 5, 6, 8, 9, 11 of 12\n" in out
    assert "wrote a.svg" in out


def test_a_run_without_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "runs/dense", "--json", "dense.json"]) == 0
    out = capsys.readouterr().out
    assert "runs/dense: step 2, loss 2.5000, evaluation loss 2.7500, 2,345 tokens/s" in out
    assert "no experts" in out
    found = json.loads(Path("dense.json").read_text())
    assert (found["step"], found["experts"]) == (2, None)


@pytest.mark.parametrize("option", ["--png", "--svg"])
def test_a_picture_of_no_experts_is_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert run(["report", "runs/dense", option, "x.pic"]) == 2
    out, err = capsys.readouterr()
    assert "loss 2.5000" in out
    assert "runs/dense is a run without experts" in err
    assert not Path("x.pic").exists()


def test_a_loss_that_is_not_finite_is_null_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("lost"), [{"step": 3, "loss": "nan"}])
    assert run(["report", "lost", "--json", "lost.json"]) == 0
    assert "step 3, loss nan" in capsys.readouterr().out
    assert json.loads(Path("lost.json").read_text())["loss"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gone",), "gone: 1 problem\n  no such folder"),
        (("runs",), "not the folder of a run"),
        (("bad",), "step 2: moe_load of block 0, expert 1 is nan"),
        (("grown",), "step 2: moe_load has 1 blocks x 3 experts, and 1 blocks x 2 experts at step 1"),
        (("damaged",), "line 1 is not a record"),
        (("runs/moe", "--json", "runs/moe/config.yaml/x.json"), "cannot be written"),
        ((), "Missing argument"),
    ],
)
def test_exit_2_with_a_message(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    write_run(Path("bad"), [row(1, [[0.5, 0.5]]), row(2, [[0.5, "nan"]])])
    write_run(Path("grown"), [row(1, [[0.5, 0.5]]), row(2, [[0.4, 0.3, 0.3]])])
    write_run(Path("damaged"), ROWS)
    Path("damaged/metrics.jsonl").write_text("{]\n{}\n")
    assert run(["report", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["report", "runs/moe", "--png", "a.png"]) == 2
    out, err = capsys.readouterr()
    assert "2.40" in out
    assert "pip install 'jaxpar[plot]'" in err


def process(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, its output in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "jaxpar", *arguments], capture_output=True, env={**os.environ, **env}, text=True, encoding="utf-8"
    )


def test_the_command_in_a_pipe() -> None:
    done = process("report", "runs/moe", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "block 1  █▃▃·\n" in done.stdout
    assert "\x1b" not in done.stdout
    plain = process("report", "runs/moe", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0, plain.stderr
    assert "block 1  8330\n" in plain.stdout
    refused = process("report", "runs/gone")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_jax_is_not_started() -> None:
    code = "import sys; from jaxpar.cli.main import run; run(sys.argv[1:]); print([m for m in ('jax', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code, "report", "runs/moe"], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"

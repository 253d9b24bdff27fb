"""`jaxpar train` killed in every way and started again under another mesh: one curve, one row a step, the promised exit status."""

import json
import signal
import subprocess
import time

import numpy as np
import pytest

from jaxpar.core.records import Row, read_records
from tests.cli.conftest import Command

# Enough steps that a signal sent after row 5 meets a run that still trains; a constant rate, dropout to see its bits resume.
STEPS = 150
SAME = (f"train.steps={STEPS}", "optimizer.schedule=constant", "model.dropout=0.1", "checkpoint.save_every=50", "mesh.fake_devices=auto")
ONE_MESH = ("mesh.data=2",)
OTHER_MESH = ("mesh.tensor=2", "mesh.context=2", "zero_stage=3")


def rows_of(command: Command, folder: str) -> list[Row]:
    return read_records(command.folder / folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(command: Command) -> list[float]:
    """Losses of the run that nothing stopped."""
    code, out, err = command.train(*SAME, *ONE_MESH, "run.dir=straight", "--json", "straight.json")
    assert code == 0, err
    for words in (
        "2 fake CPU devices",
        "data 2, on 2 x cpu",
        "blocks.attention.query.kernel",
        "documents",
        "evaluation loss",
        "sample",
        "next:",
    ):
        assert words in out
    result = json.loads((command.folder / "straight.json").read_text())
    rows = rows_of(command, "straight")
    assert (result["step"], result["loss"], result["eval_loss"]) == (STEPS, rows[-1]["loss"], rows[-1]["eval_loss"])
    assert result["sample"].startswith("def ")
    return [row["loss"] for row in rows]


def assert_same_curve(command: Command, folder: str, straight: list[float]) -> list[Row]:
    rows = rows_of(command, folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([row["loss"] for row in rows], straight, rtol=1e-5)
    return rows


@pytest.mark.parametrize("number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGUSR1))])
def test_a_signal_saves_and_the_same_command_goes_on(command: Command, straight: list[float], number: signal.Signals) -> None:
    folder = f"run.dir={number.name}"
    code, out, err = command.stop_at(5, number, *SAME, *ONE_MESH, folder)
    assert code == 75, err
    assert "Traceback" not in err
    assert f"{number.name}: saved step" in out
    stopped = len(rows_of(command, number.name))
    assert 5 <= stopped < STEPS
    code, out, err = command.train(*SAME, *OTHER_MESH, folder)
    assert code == 0, err
    assert f"step {stopped}, from" in out
    rows = assert_same_curve(command, number.name, straight)
    assert [row["attempt"] for row in rows] == [1] * stopped + [2] * (STEPS - stopped)
    assert [row["tokens"] for row in rows] == [256 * n for n in range(1, STEPS + 1)]


def test_sigkill_goes_on_from_the_last_checkpoint(command: Command, straight: list[float]) -> None:
    code, _, _ = command.stop_at(57, signal.SIGKILL, *SAME, *ONE_MESH, "run.dir=killed")
    assert code == -signal.SIGKILL
    assert len(rows_of(command, "killed")) >= 57
    code, out, err = command.train(*SAME, *OTHER_MESH, "run.dir=killed")
    assert code == 0, err
    assert "run again" in out
    assert_same_curve(command, "killed", straight)


def test_a_signal_before_the_first_step_ends_cleanly(command: Command) -> None:
    process = command.start("train", str(command.config), *SAME, "mesh.data=4", "run.dir=early")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("compiling"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert rows_of(command, "early") == [] or "saved step" in out


def test_a_second_ctrl_c_stops_at_once_and_damages_nothing(command: Command) -> None:
    long = ("train.steps=100000", "train.eval_every=0", "checkpoint.save_every=20", "optimizer.schedule=constant", "run.dir=twice")
    process = command.start("train", str(command.config), *long)
    while len(rows_of(command, "twice")) < 50:
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)  # both signals wait until the process may go on: the first cannot be answered in between
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (75, 130)  # 75: the save was done before the second
    code, out, err = command.train(
        "train.steps=100", "train.eval_every=0", "checkpoint.save_every=20", "optimizer.schedule=constant", "run.dir=twice"
    )
    assert code == 0, err
    assert "from" in out


def test_the_commands_that_read_a_run(command: Command, straight: list[float]) -> None:
    overrides = [str(command.config), *SAME, "run.dir=straight"]
    code, out, err = command("eval", *overrides, "mesh.tensor=2", "--json", "eval.json")
    assert code == 0, err
    assert len(straight) == STEPS
    found = json.loads((command.folder / "eval.json").read_text())
    assert found["step"] == STEPS
    assert found["eval_loss"] == pytest.approx(rows_of(command, "straight")[-1]["eval_loss"], rel=1e-5)
    texts = []
    for mesh in ("mesh.data=1", "mesh.data=2"):
        code, out, err = command("sample", *overrides, mesh, "--prompt", "the ", "--tokens", "20", "--temperature", "0")
        assert code == 0, err
        texts.append(out.splitlines()[1:])
    assert texts[0] == texts[1]
    assert texts[0][0].startswith("the ")
    code, _, err = command("sample", *overrides, "--tokens", "1000")
    assert (code, "do not fit into data.seq_len=32; 28 tokens would fit" in err) == (2, True), err
    code, _, err = command("eval", *overrides, "model.norm_eps=1e-3")
    assert (code, "model.norm_eps" in err) == (2, True), err


def test_start_up_imports_no_jax_before_the_config_is_good() -> None:
    script = "import sys, jaxpar, jaxpar.cli.main as m; print(m.run(['train', 'none.yaml']), 'jax' in sys.modules, 'flax' in sys.modules)"
    import sys

    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.split() == ["2", "False", "False"]

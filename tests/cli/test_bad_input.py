"""What the user can mend: the message, exit status 2, no traceback, nothing computed."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Command

STEPS = ("train.steps=2",)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("optimizer.learning_rat=1",), ("optimizer.learning_rat: unknown key", "did you mean")),
        (("mesh.data=2", "mesh.fake_devices=4"), ("data 2 = 2", "4 devices")),
        (("mesh.data=8", "mesh.fake_devices=4"), ("data 8 = 8", "4 devices")),
        (("mesh.data=3", "mesh.fake_devices=auto"), ("global_batch_size",)),
        (("model.num_heads=3", "optimizer.warmup_steps=9"), ("model.num_heads", "warmup_steps")),
        (("run.dir=tiny.yaml/run",), ("cannot write in tiny.yaml/run", "run.dir=")),
        (("checkpoint.resume=nowhere",), ("checkpoint.resume",)),
        (("--nonsense",), ("No such option",)),
        (("data.source=text", "data.path=gone.txt"), ("gone.txt",)),
        (("data.source=tokens", "data.path=odd.bin"), ("odd.bin", "1001", "2")),
    ],
)
def test_exit_2_with_a_message(command: Command, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    (command.folder / "odd.bin").write_bytes(bytes(1001))
    before = set(command.folder.iterdir())
    code, _, err = command.train(*STEPS, *overrides)
    assert code == 2, err
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert {path for path in command.folder.iterdir() if path.name != "runs"} <= before


def test_a_damaged_checkpoint_stops_and_loses_nothing(command: Command) -> None:
    assert command.train(*STEPS, "run.dir=damaged")[0] == 0
    state = command.folder / "damaged" / "checkpoints" / "2" / "state"
    victim = max((path for path in state.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    code, _, err = command.train("train.steps=4", "optimizer.schedule=constant", "run.dir=damaged")
    assert code == 2, err
    assert "Traceback" not in err
    assert victim.name in err
    assert victim.exists()


def test_no_checkpoint_to_read(command: Command) -> None:
    code, _, err = command("eval", str(command.config), "run.dir=empty")
    assert (code, "no checkpoint in empty; train first" in err) == (2, True), err


def test_an_accelerator_that_is_asked_for_is_not_replaced(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX_PLATFORMS=cuda and no GPU: never fake devices in silence."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, _, err = command.train(*STEPS, "mesh.data=2", "mesh.fake_devices=auto", "run.dir=asked")
    assert code == 2, err
    assert "Traceback" not in err
    assert "JAX_PLATFORMS=cuda: 1 problem" in err


def test_doctor(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        "doctor", str(command.config), "mesh.data=2", "mesh.fake_devices=auto", "--json", str(tmp_path / "doctor.json")
    )
    assert code == 0, err
    assert "fits" in out
    assert "process 0: 2:" in out
    assert "jaxpar[cuda12]" in out
    code, out, _ = command("doctor", "--schema")
    assert code == 0
    assert '"$schema"' in out


@pytest.mark.slow
def test_an_evaluation_that_loses_rows_fails_after_its_numbers(command: Command) -> None:
    """Trained where all experts are, evaluated where a device has room for what it gets if all are balanced."""
    moe = ("model.moe.num_experts=4", "model.moe.expert_dim=32", "model.moe.capacity_factor=null", "run.dir=lossy")
    code, _, err = command.train(*STEPS, *moe)
    assert code == 0, err
    tight = ("mesh.expert=4", "mesh.fake_devices=4", "model.moe.dispatch=ragged", "model.moe.ragged_buffer_factor=1")
    code, out, err = command("eval", str(command.config), *STEPS, *moe, *tight, "--json", "lossy.json")
    assert code == 3, err
    assert "Traceback" not in err
    assert re.search(r"evaluation of step 2: block \d lost 0\.\d+ of its choices.*model\.moe\.ragged_buffer_factor=1", err)
    assert "step 2: loss" in out
    assert json.loads((command.folder / "lossy.json").read_text())["eval_moe_overflow_worst"] > 0

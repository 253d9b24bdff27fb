"""The README is true: its commands run as written (shortened), its config loads, its file tree and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
# What CI runs as it stands: installing, and this test suite.
BY_CI = ("pip install", "pytest")
SHORT = ["train.steps=2", "train.eval_every=0", "train.eval_batches=1", "train.sample_tokens=2", "optimizer.warmup_steps=0"]


def commands() -> list[str]:
    """Every command of an indented block, `a && b` as two, comments cut."""
    lines = re.findall(r"^    ((?:pip|jaxpar|python|pytest) .*|pytest)$", TEXT, re.MULTILINE)
    return [part.split("  #")[0].strip() for line in lines for part in line.split(" && ")]


def test_the_two_commands_of_a_fresh_machine_are_there() -> None:
    assert "    pip install -e . && jaxpar train configs/run/quickstart.yaml\n" in TEXT
    assert "    pip install -e '.[test]' && pytest\n" in TEXT
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(
        step in ci
        for step in ("pip install -q -e .\n", "jaxpar train configs/run/quickstart.yaml", "pip install -q -e '.[test]'", "pytest -q")
    )


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    """In order, in a folder of its own: `sample` and `eval` read what `train` left."""
    for name in ("configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_NUMPY_DTYPE_PROMOTION")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    run = [c for c in commands() if not c.startswith(BY_CI)]
    assert len(run) >= 8
    for command in run:
        words = command.split() + ([] if command.startswith(("jaxpar doctor", "jaxpar schedule", "jaxpar report")) else SHORT)
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_config_in_the_readme_loads(tmp_path: Path) -> None:
    block = re.search(r"^    include:.*?(?=^\S)", TEXT, re.MULTILINE | re.DOTALL)
    assert block
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = tmp_path / "configs.yaml"
    path.write_text(re.sub(r"^    ", "", block[0], flags=re.MULTILINE).replace("[model/", "[configs/model/"))
    assert load_config(path).mesh.sizes["tensor"] == 2


def test_paths_named_in_the_readme_exist() -> None:
    named = re.findall(r"\b((?:jaxpar|configs|experiments|tests)/[\w/.]+\w)", TEXT)
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / name).exists()]

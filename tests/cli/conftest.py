"""The command as a user runs it: a process of its own, which makes its fake devices itself."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxpar.core.records import read_records
from tests.train.tiny import write_config

SET_BY_THE_TESTS = ("NPROC", "XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION")


@dataclass
class Command:
    """`jaxpar` in a folder."""

    folder: Path
    config: Path

    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in SET_BY_THE_TESTS}
        return env | {"PYTHONWARNINGS": "default"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jaxpar", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self.environment(), stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """(exit status, standard output, standard error)."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def train(self, *overrides: str) -> tuple[int, str, str]:
        return self("train", str(self.config), *overrides)

    def stop_at(self, step: int, number: signal.Signals, *overrides: str) -> tuple[int, str, str]:
        """Train, and send the signal when the row of `step` is written."""
        folder = next(text.partition("=")[2] for text in overrides if text.startswith("run.dir="))
        process = self.start("train", str(self.config), *overrides)
        while process.poll() is None and len(read_records(self.folder / folder / "metrics.jsonl")) < step:
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    folder = tmp_path_factory.mktemp("cli")
    return Command(folder, write_config(folder))

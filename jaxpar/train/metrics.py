"""Rows of metrics: what a step cost and gave, written to metrics.jsonl and TensorBoard.

Times are wall clock between completions of steps, so that they add up to the time of training: evaluation is timed
apart (`eval_s`), saving and compilation not at all. Tokens are rows x seq_len of the global batch, whatever the layout.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.build import Parts
from jaxpar.config.exchange import exchange_bytes
from jaxpar.core.records import RecordWriter, Row
from jaxpar.train.flops import flops_per_token
from jaxpar.train.memory import memory_metric
from jaxpar.train.peaks import peak_flops_per_s

LEAF_NORMS = "leaf_norms"  # a vector: for naming bad tensors, not a row's number
TENSORBOARD_HINT = "no TensorBoard: pip install 'jaxpar[log]' for it, or set log.tensorboard=false (metrics.jsonl has everything)"


@dataclass
class Clock:
    """Time and waiting since the last row."""

    tokens_per_step: int
    flops_per_token: int
    num_devices: int
    peak_flops_per_s: float | None
    mark_s: float = 0.0
    steps: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0

    def restart(self) -> None:
        """What came before now is not part of a step."""
        self.mark_s = time.perf_counter()

    def step_done(self) -> None:
        now = time.perf_counter()
        self.train_s += now - self.mark_s
        self.steps += 1
        self.mark_s = now

    def take(self) -> Row:
        """Rates over the steps since the last call."""
        step_s = self.train_s / self.steps
        per_s = self.tokens_per_step / step_s
        per_device = per_s / self.num_devices
        flops_per_s = per_device * self.flops_per_token
        row = {
            "step_time_s": step_s,
            "data_wait_s": self.wait_s / self.steps,
            "tokens_per_s": per_s,
            "tokens_per_s_per_device": per_device,
            "model_tflops_per_s_per_device": flops_per_s / 1e12,
        }
        if self.peak_flops_per_s:
            row["mfu"] = flops_per_s / self.peak_flops_per_s
        self.steps, self.train_s, self.wait_s = 0, 0.0, 0.0
        return row


def clock_of(parts: Parts) -> Clock:
    """The clock of a run."""
    data = parts.config.data
    device = parts.mesh.devices.flat[0]
    return Clock(data.global_batch_size * data.seq_len, flops_per_token(parts)[0], parts.mesh.size, peak_flops_per_s(device.device_kind))


@dataclass(frozen=True)
class StepNumbers:
    """What a step gave: scalars, terms that are arrays (one number or list a block), and the norm of every gradient leaf."""

    scalars: dict[str, float]
    tables: dict[str, np.ndarray]
    leaf_norms: np.ndarray


def step_numbers(metrics: Mapping[str, jax.Array]) -> StepNumbers:
    """Wait for a step, and take its numbers to the host."""
    host = jax.device_get(dict(metrics))
    leaf_norms = host.pop(LEAF_NORMS)
    return StepNumbers(*scalars_and_tables(host), leaf_norms)


def scalars_and_tables(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Terms that are one number, and the others."""
    tables = {name: np.asarray(value) for name, value in values.items() if np.ndim(value)}
    return {name: float(value) for name, value in values.items() if name not in tables}, tables


class MetricsLog:
    """metrics.jsonl and, where wanted and installed, TensorBoard."""

    def __init__(self, run_dir: Path, attempt: int, tensorboard: bool, first_step: int):
        """attempt: number of this start of the run, in every row. first_step: TensorBoard drops what earlier attempts wrote after it."""
        self.missing: str | None = None
        self._attempt = attempt
        self._records = RecordWriter(run_dir / "metrics.jsonl")
        self._board: Any = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                self.missing = TENSORBOARD_HINT
            else:
                self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1, flush_secs=30)

    def write(self, row: Mapping[str, Any]) -> None:
        """A row; `step` in it is the axis of all plots."""
        self._records.write({"attempt": self._attempt, **row})
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._records.close()
        if self._board is not None:
            self._board.close()


def fixed_row(parts: Parts) -> Row:
    """What of a row does not come from the step: the memory metric, and the bytes that experts exchange."""
    name, value = memory_metric(list(parts.mesh.local_mesh.devices.flat))
    return {name: value} | ({"moe_exchange_bytes": exchange_bytes(parts.config, parts.layout)} if parts.config.model.moe else {})

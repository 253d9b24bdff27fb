"""Rows of runs with experts, made up."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def row(step: int, load: Sequence[Sequence[Any]], **more: Any) -> Row:
    """A logged step; every block drops a tenth and has balance 1 and entropy 0.5 unless `more` says."""
    blocks = len(load)
    terms = {"moe_dropped": [0.1] * blocks, "moe_balance": [1.0] * blocks, "moe_entropy": [0.5] * blocks, "moe_z": [0.0] * blocks}
    return {"step": step, "loss": 4.0 - step / 100, "tokens_per_s": 2000.0, "moe_load": load, **terms, **more}


def many(num_steps: int, num_blocks: int, num_experts: int, every: int = 10) -> list[Row]:
    """Random shares and drops."""
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(num_experts, 4.0), (num_steps, num_blocks))
    drops = draw.uniform(0.0, 0.3, (num_steps, num_blocks))
    return [row(every * (i + 1), shares[i].tolist(), moe_dropped=drops[i].tolist()) for i in range(num_steps)]


def write_run(folder: Path, rows: Sequence[Mapping[str, Any]], config: str = "name: made_up\n") -> Path:
    """A run folder with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder

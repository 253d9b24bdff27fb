"""Kills a run at random steps, goes on under another mesh each time, and compares its curve with an uninterrupted one.

    python run.py [--kills 5] [--steps 120] [--seed 0]

SGD in float32, so that a difference shows as one: Adam hides a constant factor in the gradient.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jaxpar

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "run" / "quickstart.yaml"
SGD = ["optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.schedule=constant", "optimizer.warmup_steps=0", "model.dropout=0.1"]
MESHES = (
    ["mesh.data=2", "mesh.context=2", "mesh.tensor=2"],
    ["mesh.data=8", "mesh.context=1", "mesh.tensor=1", "zero_stage=3"],
    ["mesh.data=2", "mesh.context=1", "mesh.tensor=4", "zero_stage=2", "num_microbatches=2"],
    ["mesh.data=1", "mesh.context=4", "mesh.tensor=2", "context.method=all_gather"],
    ["mesh.data=1", "mesh.context=1", "mesh.tensor=8", "sequence_parallel=false"],
    ["mesh.data=1", "mesh.context=1", "mesh.tensor=1"],
)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def command(folder: Path, mesh: list[str], steps: int) -> list[str]:
    run = [f"run.dir={folder}", f"train.steps={steps}", "train.sample_tokens=0", "checkpoint.save_every=5", "log.tensorboard=false"]
    return [sys.executable, "-m", "jaxpar", "train", str(CONFIG), *SGD, *run, *mesh]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step, as the run folder says it; a step that stands there twice is a failure."""
    rows = [row for row in jaxpar.read_records(folder / "metrics.jsonl") if "loss" in row]
    steps = [row["step"] for row in rows]
    if len(set(steps)) != len(steps):
        sys.exit(f"{folder}: steps recorded twice")
    return {row["step"]: row["loss"] for row in rows}


def last_step(folder: Path) -> int:
    return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def run_until(folder: Path, mesh: list[str], steps: int, kill_at: int, how: signal.Signals) -> str:
    """Start, wait for a step, send the signal; what came of it."""
    process = subprocess.Popen(command(folder, mesh, steps), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and last_step(folder) < kill_at:
        time.sleep(0.05)
    process.send_signal(how)
    output, _ = process.communicate()
    wanted = -signal.SIGKILL if how == signal.SIGKILL else 75
    if process.returncode != wanted:
        sys.exit(f"exit {process.returncode} after {how.name}, not {wanted}\n{output[-3000:]}")
    return f"{how.name} at step {last_step(folder)} on {' '.join(mesh)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        subprocess.run(command(whole, MESHES[0], args.steps), check=True, capture_output=True)
        for i, at in enumerate(sorted(rng.sample(range(2, args.steps - 5), args.kills))):
            print(run_until(broken, MESHES[i % len(MESHES)], args.steps, at, SIGNALS[i % len(SIGNALS)]), flush=True)
        subprocess.run(command(broken, MESHES[args.kills % len(MESHES)], args.steps), check=True, capture_output=True)
        want, got = losses(whole), losses(broken)
    if want.keys() != got.keys():
        sys.exit(f"steps differ: {sorted(want.keys() ^ got.keys())}")
    worst = max(abs(got[step] / want[step] - 1) for step in want)
    print(f"{len(want)} steps, {args.kills} kills: largest relative difference of a loss {worst:.2g}")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())

"""Our step against the plain-JAX step of the same maths, in turn, several times: python run.py --baseline jax_plain.py

Prints a table of ratios (ours / plain) of step time, time from command to first step, and peak memory: medians over pairs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs" / "run"
SHAPES = {
    "bench": {},
    "bench_small": {"BENCH_EMBED": "64", "BENCH_MLP": "128", "BENCH_VOCAB": "512", "BENCH_SEQ": "64"},
}
LAYOUTS = {
    "single": [],
    "dp8": ["mesh.fake_devices=8", "mesh.data=8"],
    "fsdp8": ["mesh.fake_devices=8", "mesh.data=8", "zero_stage=3"],
    # The plain step has no sequence parallelism either.
    "tp2fsdp4": ["mesh.fake_devices=8", "mesh.data=4", "mesh.tensor=2", "zero_stage=3", "sequence_parallel=false"],
}
FIGURES = ("step_ms", "startup_s", "peak_rss_mb")


def last_json(command: list[str], cwd: Path, env: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def pair(shape: str, layout: str, baseline: Path) -> tuple[dict[str, float], dict[str, float]]:
    """One run of each, the same environment for both."""
    env = SHAPES[shape]
    plain = [sys.executable, baseline.name, "--layout", layout, "--scan", "--remat"]
    ours = [
        sys.executable,
        str(HERE / "ours.py"),
        str(CONFIGS / f"{shape}.yaml"),
        f"run.dir={tempfile.gettempdir()}/jaxpar-overhead-{os.getpid()}",
        *LAYOUTS[layout],
    ]
    return last_json(ours, HERE, env), last_json(plain, baseline.parent, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", type=Path, required=True, help="the plain-JAX script")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--json", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    table = Table(
        "shape", "layout", *(f"{name} ours/plain" for name in FIGURES), "step ms ours", "step ms plain", title="medians of paired runs"
    )
    results = []
    for shape in args.shapes:
        for layout in args.layouts:
            pairs = [pair(shape, layout, args.baseline.resolve()) for _ in range(args.pairs)]
            ratios = {name: statistics.median(ours[name] / plain[name] for ours, plain in pairs) for name in FIGURES}
            times = [statistics.median(run[i]["step_ms"] for run in pairs) for i in (0, 1)]
            results.append({"shape": shape, "layout": layout, "pairs": pairs, "ratios": ratios})
            table.add_row(shape, layout, *(f"{ratios[name]:.2f}" for name in FIGURES), *(f"{ms:.1f}" for ms in times))
            print(f"{shape} {layout}: {ratios}", file=sys.stderr)
    args.json.write_text(json.dumps(results, indent=1))
    Console().print(table)


if __name__ == "__main__":
    main()

"""Many short runs on eight fake devices, to see whether any hangs: python run.py [--runs 50] [--steps 200]

XLA:CPU hung here when steps were dispatched ahead on fewer cores than devices; the cure is in `mesh.build.prepare_fake_devices`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "run"
LAYOUTS = (
    ["mesh.data=8"],
    ["mesh.data=2", "mesh.context=2", "mesh.tensor=2", "zero_stage=3"],
    ["mesh.tensor=4", "mesh.data=2"],
    ["mesh.replica=2", "mesh.data=4", "zero_stage=1", "num_microbatches=2"],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    args = parser.parse_args()
    failed = 0
    for i in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [*LAYOUTS[i % len(LAYOUTS)], f"train.steps={args.steps}", f"run.dir={folder}/run", "mesh.fake_devices=8"]
            command = [sys.executable, "-m", "jaxpar", "train", str(CONFIGS / "bench_small.yaml"), *overrides]
            began = time.perf_counter()
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s, check=False)
                words = "ok" if done.returncode == 0 else f"exit {done.returncode}\n{done.stderr[-2000:]}"
            except subprocess.TimeoutExpired:
                words = "hang"
            failed += words != "ok"
            print(f"run {i + 1} of {args.runs}: {words}, {time.perf_counter() - began:.1f} s", flush=True)
    print(f"{args.runs - failed} of {args.runs} runs of {args.steps} steps ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

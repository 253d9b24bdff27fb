"""Makes the golden files beside it from Hugging Face `transformers`: an implementation of the same models that is not ours.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers==5.24.0
    hf/bin/python tests/goldens/make_hf_goldens.py            # writes hf_*.npz
    hf/bin/python tests/goldens/make_hf_goldens.py --check    # recomputes and compares with the files; exit 3 where they differ

A file holds `config` (JSON: the arguments of the Hugging Face config), `weights/<name>` (all that is learned under its Hugging
Face name, float32), and computed in float64, of a model, `logits` [rows, positions, vocabulary] of `tokens` [rows, positions],
or of a layer alone, `outputs` of `inputs`, both [rows, positions, width]. Cases are in `hf_dense.py` and `hf_experts.py`.
"""

import argparse
import json
import sys
from pathlib import Path

import hf_dense
import hf_experts
import numpy as np
import torch
import transformers
from hf_case import Case, arrays_of

HERE = Path(__file__).parent
CASES = hf_dense.CASES | hf_experts.CASES
FLOAT64_AGREES = 1e-11  # of results of order 1: the same sums on another machine


def make(name: str, case: Case, seed: int) -> dict[str, np.ndarray]:
    """Arrays of one golden file."""
    return {"config": np.array(json.dumps(case.config)), **arrays_of(name, case, seed)}


def differences(name: str, result: str, arrays: dict[str, np.ndarray]) -> list[str]:
    """What the committed file holds otherwise than `arrays`."""
    with np.load(HERE / f"hf_{name}.npz") as file:
        found = dict(file)
    if found.keys() != arrays.keys():
        return [f"{name}: arrays {sorted(found.keys() ^ arrays.keys())} are only on one side"]
    lines = [f"{name}: {key} differs" for key in arrays if key != result and not np.array_equal(found[key], arrays[key])]
    gap = float(np.abs(found[result] - arrays[result]).max())
    return lines + ([f"{name}: {result} differ by {gap:.3g}, more than {FLOAT64_AGREES}"] if gap > FLOAT64_AGREES else [])


def main() -> None:
    parser = argparse.ArgumentParser(description="Golden results from Hugging Face transformers")
    parser.add_argument("--check", action="store_true", help="recompute and compare with the files; exit 3 where they differ")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"only these of {', '.join(CASES)}")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    chosen = [(seed, name) for seed, name in enumerate(CASES) if not args.cases or name in args.cases]
    wrong: list[str] = []
    for seed, name in chosen:
        arrays = make(name, CASES[name], seed)
        if args.check:
            wrong += differences(name, CASES[name].result, arrays)
        else:
            np.savez_compressed(HERE / f"hf_{name}.npz", allow_pickle=False, **arrays)
    print(*wrong, sep="\n", end="")
    if args.check and not wrong:
        print(f"{len(chosen)} files equal transformers {transformers.__version__} on torch {torch.__version__}")
    sys.exit(3 if wrong else 0)


if __name__ == "__main__":
    main()

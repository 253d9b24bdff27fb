"""Logits equal Hugging Face `transformers` with random weights, on one device and on a mesh of every axis that a model sees.

The golden files come from `tests/goldens/make_hf_goldens.py`: float64 logits, so float64 here is held to rounding and
float32 to the issue's 1e-5, both absolute on logits of standard deviation 1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.build import Parts, build
from jaxpar.config.run import RunConfig
from jaxpar.core.tree import leaf_types, tree_differences
from jaxpar.mesh.specs import batch_spec
from tests.models import hf_names

CASES = ("llama", "llama_scaled", "gpt2", "qwen3", "mistral")
GATES = {"float32": 1e-5, "float64": 1e-12}
RUNS = [("float32", {}), ("float32", {"data": 2, "tensor": 2}), ("float64", {}), ("float64", {"data": 2, "context": 2, "tensor": 2})]


def read(case: str, given: str = "tokens", result: str = "logits") -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """(config, weights, given, result) of a golden file."""
    with np.load(Path(__file__).parents[1] / "goldens" / f"hf_{case}.npz") as file:
        weights = {name.removeprefix("weights/"): file[name] for name in file.files if name.startswith("weights/")}
        return json.loads(str(file["config"])), weights, file[given], file[result]


def parts_of(model: Mapping[str, Any], seq_len: int, rows: int, mesh: Mapping[str, int], dtype: str) -> Parts:
    tree = {
        "model": model,
        "mesh": {"data": 1, **mesh},
        "data": {"source": "synthetic", "seq_len": seq_len, "global_batch_size": rows, "isolate_documents": False},
        "optimizer": {"name": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0},
        "train": {"steps": 1},
        "compute_dtype": dtype,
        "param_dtype": dtype,
        "attention": "reference" if dtype == "float64" else "xla",
        "zero_stage": 3,
    }
    return build(RunConfig.model_validate(tree), devices=jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))])


def logits_of(parts: Parts, weights: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """[rows, S, V] in natural order."""
    layout, placement = parts.layout, parts.placement
    params = jax.tree.map(lambda w: w.astype(parts.config.param_dtype), weights)
    lines = tree_differences(leaf_types(params), leaf_types(placement.shapes), found_in="golden file", wanted_in="model")
    assert not lines, "\n".join(lines)
    batch = parts.feed.place({"tokens": tokens, "samples": np.arange(len(tokens), dtype=np.uint32)}, None)
    specs = batch_spec(layout, microbatched=False)
    mapped = jax.shard_map(
        parts.forward.logits,
        mesh=placement.mesh,
        in_specs=(placement.param_specs, {name: specs[name] for name in batch}),
        out_specs=P(layout.batch_axes or None, layout.context_axes or None, layout.split("vocab") or None),
    )
    logits = jax.jit(mapped)(jax.device_put(params, placement.state_shardings.params), batch)
    return np.asarray(logits)[:, np.argsort(parts.feed.order)]


@pytest.mark.parametrize(("dtype", "mesh"), RUNS, ids=lambda value: value if isinstance(value, str) else "x".join(value) or "one")
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face(case: str, dtype: str, mesh: dict[str, int]) -> None:
    hf, weights, tokens, want = read(case)
    model = hf_names.model_config(case, hf)
    with jax.enable_x64(dtype == "float64"):
        parts = parts_of(model, tokens.shape[1], len(tokens), mesh, dtype)
        got = logits_of(parts, hf_names.parameters(case, model, weights), tokens)
    assert got.dtype == dtype
    assert np.std(want) > 0.5
    assert np.abs(got - want).max() <= GATES[dtype]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", {"norm_eps": 1e-5}),
        ("llama", {"rope_theta": 10_100.0}),
        ("llama_scaled", {"rope_scaling": None}),
        ("llama_scaled", {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.9, "original_max_seq_len": 64}}),
        ("gpt2", {"norm_eps": 1e-6}),
        ("qwen3", {"rope_theta": 10_000.0}),
        ("mistral", {"sliding_window": 7}),
    ],
)
def test_gate_notices_a_wrong_number(case: str, change: dict[str, Any]) -> None:
    """Each number of a config moves the logits by far more than the gate: the goldens can tell."""
    hf, weights, tokens, want = read(case)
    model = hf_names.model_config(case, hf) | change
    parts = parts_of(model, tokens.shape[1], len(tokens), {}, "float32")
    got = logits_of(parts, hf_names.parameters(case, model, weights), tokens)
    assert np.abs(got - want).max() > GATES["float32"]

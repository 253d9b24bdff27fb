"""Loss and every gradient leaf of drawn layouts equal one device's, on packed rows with uneven padding."""

import random
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpar.config.checks import check
from jaxpar.config.run import RunConfig
from tests.equivalence.harness import FLOAT32, assert_float32, assert_float64, config, num_devices

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gqa_tied": {"num_kv_heads": 2, "tied_embeddings": True, "qk_norm": True},
    "gpt2": {
        "norm": "layernorm",
        "bias": True,
        "activation": "gelu",
        "positions": "learned",
        "max_positions": 32,
        "tied_embeddings": True,
        "dropout": 0.1,
    },
    "gemma": {
        "num_kv_heads": 4,
        "sliding_window": 9,
        "attention_softcap": 5.0,
        "logits_softcap": 3.0,
        "vocab_size": 90,
        "vocab_multiple": 8,
    },
    "one_kv_head": {"num_kv_heads": 1, "head_dim": 16, "rope_scaling": {"factor": 4.0, "original_max_seq_len": 8}, "dropout": 0.2},
    "attention_dropout": {"attention_dropout": 0.2, "dropout": 0.1},
}
NUM_DRAWN = 44
NUM_FLOAT32 = 8


def draw(index: int) -> tuple[str, RunConfig]:
    """A random valid layout of at least two devices; every model gets its share."""
    rng = random.Random(1000 + index)
    name = sorted(MODELS)[index % len(MODELS)]
    while True:
        change = {
            "model": MODELS[name],
            "mesh": {axis: rng.choice([1, 1, 2, 2, 4, 8]) for axis in ("replica", "data", "context", "tensor")},
            "zero_stage": rng.choice([0, 1, 2, 3]),
            "sequence_parallel": rng.random() < 0.6,
            "num_microbatches": rng.choice([1, 2, 4]),
            "context": {"method": rng.choice(["ring", "all_gather", "ulysses"])},
            "remat": {"policy": rng.choice(["none", "full", "selective"])},
            "z_loss": rng.choice([0.0, 1e-2]),
            "loss_chunk_tokens": rng.choice([5, 64, 1024]),
        }
        run = config(change)
        if 2 <= num_devices(run) <= 8 and not check(run, num_devices(run)):
            return name, run


def describe(index: int) -> str:
    name, run = draw(index)
    mesh = "-".join(f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1)
    sp = "sp" if run.sequence_parallel else "nosp"
    return f"{index}-{name}-{mesh}-z{run.zero_stage}-{run.context.method}-{sp}-m{run.num_microbatches}-{run.remat.policy}"


def cases(numbers: range, num_default: int) -> list[Any]:
    """One worker for all layouts of a model, so that they share its one-device program; those after `num_default` are slow."""
    out = []
    for i in numbers:
        marks = [pytest.mark.xdist_group(sorted(MODELS)[i % len(MODELS)])]
        out.append(pytest.param(i, id=describe(i), marks=marks + [pytest.mark.slow] * (i - numbers.start >= num_default)))
    return out


@pytest.mark.parametrize("index", cases(range(NUM_DRAWN), num_default=6))
def test_float64_gate(index: int) -> None:
    assert_float64(draw(index)[1])


@pytest.mark.parametrize("index", cases(range(NUM_DRAWN, NUM_DRAWN + NUM_FLOAT32), num_default=1))
def test_float32_gate(index: int) -> None:
    name, run = draw(index)
    assert_float32(
        config({"model": MODELS[name]}, run.model_dump(include={"mesh", "zero_stage", "num_microbatches", "context", "remat"}), FLOAT32)
    )


def test_the_draw_covers_what_it_should() -> None:
    runs = [draw(i)[1] for i in range(NUM_DRAWN)]
    assert {run.zero_stage for run in runs} == {0, 1, 2, 3}
    assert {run.context.method for run in runs if run.mesh.context > 1} == {"ring", "all_gather", "ulysses"}
    assert {run.remat.policy for run in runs} == {"none", "full", "selective"}
    assert {run.num_microbatches for run in runs} == {1, 2, 4}
    assert {run.sequence_parallel for run in runs if run.mesh.tensor > 1} == {True, False}
    assert any(sum(size > 1 for size in run.mesh.sizes.values()) >= 3 for run in runs)
    assert jnp.dtype(runs[0].compute_dtype) == jnp.float64

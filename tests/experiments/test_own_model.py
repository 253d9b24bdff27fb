"""The model of `experiments/02_your_own_model`: the same maths under every layout, and documents of a packed row kept apart."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from jaxpar.config.load import load_config
from jaxpar.config.run import RunConfig
from jaxpar.models.init import init_params
from jaxpar.models.nnx_model import NNXModel
from tests.equivalence import harness

FOLDER = Path(__file__).parents[2] / "experiments" / "02_your_own_model"
RULES = {"rules": {"taps": None}, "model": {"vocab_size": 93, "vocab_multiple": 8}}
LAYOUTS = {
    "zig-zag": {"mesh": {"data": 2, "context": 2, "tensor": 2}, "num_microbatches": 2, "remat": {"policy": "full"}},
    "ZeRO-3": {"mesh": {"data": 8}, "zero_stage": 3},
    "tensor without sequence parallel": {"mesh": {"data": 1, "tensor": 4}, "sequence_parallel": False},
}


@pytest.fixture(scope="module")
def own() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", FOLDER / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(own: ModuleType, run: RunConfig) -> NNXModel:
    return own.Recurrent(run.model)


@pytest.fixture(scope="module")
def one_device(own: ModuleType) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    run = harness.config(RULES, harness.ONE_DEVICE)
    return harness.gradients(run, harness.packed_rows(16, 32, 93), model=model_of(own, run))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradients_equal_one_device(own: ModuleType, one_device: tuple[dict, dict], layout: dict) -> None:
    run = harness.config(RULES, layout)
    means, grads = harness.gradients(run, harness.packed_rows(16, 32, 93), model=model_of(own, run))
    assert abs(means["loss"] - one_device[0]["loss"]) <= harness.FLOAT64_GATE * one_device[0]["loss"]
    errors = harness.leaf_errors(grads, one_device[1])
    assert max(errors.values()) <= harness.FLOAT64_GATE, errors
    assert min(np.linalg.norm(g) for g in grads.values()) > 1e-6  # every leaf takes part


def logits_alone(own: ModuleType, tokens: np.ndarray, **packing: np.ndarray) -> np.ndarray:
    """float64 logits [rows, S, V] on one device."""
    run = harness.config(RULES, harness.ONE_DEVICE, {"data": {"isolate_documents": bool(packing)}})
    with jax.enable_x64(True):
        parts = harness.parts_of(run, model_of(own, run))
        params = init_params(parts.model, 0, "float64")
        # Weights of order 1, so that a leak would be far above rounding.
        params = jax.tree.map(lambda w: w * 10, params)
        batch = {"tokens": tokens, "samples": np.arange(len(tokens), dtype=np.uint32), **packing}
        return np.asarray(jax.jit(parts.forward.logits)(params, batch))


def test_packed_document_equals_the_document_alone(own: ModuleType) -> None:
    """Documents of lengths that are shorter and longer than the convolution, each against a row of its own."""
    lengths, size = (2, 5, 1, 17, 7), 32
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 93, (1, size), dtype=np.int32)
    segments = np.repeat(np.arange(1, 6, dtype=np.int32), lengths)[None]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    packed = logits_alone(own, tokens, segments=segments, positions=positions)
    starts = np.cumsum((0, *lengths))
    alone = np.zeros((len(lengths), size), np.int32)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        alone[row, :length] = tokens[0, start : start + length]
    separate = logits_alone(own, alone)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        np.testing.assert_allclose(packed[0, start : start + length], separate[row, :length], rtol=0, atol=1e-12)


def test_logits_depend_on_earlier_tokens_only(own: ModuleType) -> None:
    tokens = np.random.default_rng(1).integers(0, 93, (1, 32), dtype=np.int32)
    changed = tokens.copy()
    changed[0, 20] = (changed[0, 20] + 1) % 93
    before, after = (logits_alone(own, t)[0, :, :93] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:20], after[:20])
    assert (np.abs(before[20:] - after[20:]).max(axis=-1) > 1e-6).all()


def test_config_file_loads(own: ModuleType) -> None:
    run = load_config(FOLDER / "config.yaml")
    parts = harness.parts_of(run, model_of(own, run))
    assert {"blocks", "embed", "head"} == set(parts.placement.shapes)


def test_unknown_dim_is_named(own: ModuleType) -> None:
    """Without the rule for `taps` nothing is replicated in silence."""
    run = harness.config(harness.ONE_DEVICE, harness.FLOAT32)
    with pytest.raises(ValueError, match=r"unknown dim 'taps'.*under rules:"):
        harness.parts_of(run, model_of(own, run))

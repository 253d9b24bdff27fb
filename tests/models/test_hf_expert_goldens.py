"""Models and layers with experts equal Hugging Face `transformers` with random weights, whatever carries tokens to experts.

Gates are those of `test_hf_goldens`: of logits, or of what DeepSeek-V3's layer alone makes of random vectors. No token is dropped.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.model import ModelConfig
from jaxpar.core.tree import named_leaves
from jaxpar.models.moe import Moe
from jaxpar.models.nnx_model import Part
from tests.models import hf_expert_names, hf_names
from tests.models.test_hf_goldens import GATES, logits_of, parts_of, read

MODELS = ("mixtral", "qwen3_moe", "qwen3_moe_mixed")
LAYER = "deepseek_v3_layer"
DISPATCHERS = ("local", "all_to_all")
RUNS = [(dtype, dispatch, {}) for dtype in GATES for dispatch in DISPATCHERS]
RUNS += [("float32", "all_to_all", {"expert": 2, "tensor": 2}), ("float64", "ragged", {"expert": 2, "context": 2})]

Change = dict[str, Any]


def model_error(case: str, dtype: str, mesh: Mapping[str, int], moe: Change) -> float:
    """The largest distance from a model's logits, with changes in `moe:`."""
    hf, weights, tokens, want = read(case)
    model = hf_names.model_config(case, hf)
    changed = model | {"moe": model["moe"] | moe}
    with jax.enable_x64(dtype == "float64"):
        parts = parts_of(changed, tokens.shape[1], len(tokens), mesh, dtype)
        got = logits_of(parts, hf_names.parameters(case, model, weights), tokens)
    return error(got, want, dtype)


def layer_error(dtype: str, moe: Change, weights_change: dict[str, np.ndarray] | None = None) -> float:
    """The same of the outputs of DeepSeek-V3's layer."""
    hf, weights, inputs, want = read(LAYER, "inputs", "outputs")
    model = {"num_layers": 1, "embed_dim": hf["hidden_size"], "num_heads": 1, "mlp_dim": 1, "vocab_size": 1}
    model["moe"] = hf_expert_names.deepseek_config(hf) | moe
    layer = Part(Moe(ModelConfig.model_validate(model)))
    tree = hf_expert_names.moe(weights | (weights_change or {}))
    assert {n: w.shape for n, w in named_leaves(tree).items()} == {n: spec.shape for n, spec in named_leaves(layer.specs).items()}
    batch = {"tokens": np.zeros(inputs.shape[:2], np.int32), "samples": np.arange(len(inputs), dtype=np.uint32)}
    with jax.enable_x64(dtype == "float64"):
        forward = parts_of(model, inputs.shape[1], len(inputs), {}, dtype).forward
        params, x_bSD = jax.tree.map(lambda w: jnp.asarray(w, dtype), (tree, inputs))
        y_bSD, _ = jax.jit(lambda params, x_bSD: layer.bind(params)(x_bSD, forward.context(batch, None), 0))(params, x_bSD)
    return error(np.asarray(y_bSD), want, dtype)


def error(got: np.ndarray, want: np.ndarray, dtype: str) -> float:
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert np.std(want) > 0.5
    return float(np.abs(got - want).max())


@pytest.mark.parametrize(
    ("dtype", "dispatch", "mesh"), RUNS, ids=lambda value: value if isinstance(value, str) else "x".join(value) or "one"
)
@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_hugging_face(case: str, dtype: str, dispatch: str, mesh: dict[str, int]) -> None:
    assert model_error(case, dtype, mesh, {"dispatch": dispatch}) <= GATES[dtype]


@pytest.mark.parametrize("dispatch", DISPATCHERS)
@pytest.mark.parametrize("dtype", GATES)
def test_layer_equals_hugging_face(dtype: str, dispatch: str) -> None:
    assert layer_error(dtype, {"dispatch": dispatch}) <= GATES[dtype]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("mixtral", {"softmax": "before", "renormalize": False}),
        ("mixtral", {"top_k": 3}),
        ("qwen3_moe", {"renormalize": False}),
        ("qwen3_moe_mixed", {"renormalize": True}),
    ],
)
def test_gate_notices_a_wrong_number(case: str, change: Change) -> None:
    """As for dense models: the goldens can tell."""
    assert model_error(case, "float32", {}, change) > 1000 * GATES["float32"]


@pytest.mark.parametrize(
    "change",
    [
        {"num_groups": 1, "top_groups": 1},
        {"top_groups": 3},
        {"group_score": "max"},
        {"renormalize": False},
        {"routed_scaling": 2.4},
    ],
    ids=lambda change: "-".join(change),
)
def test_layer_gate_notices_a_wrong_number(change: Change) -> None:
    assert layer_error("float32", change) > 1000 * GATES["float32"]


def test_layer_gate_notices_a_bias_left_out() -> None:
    assert layer_error("float32", {}, {"gate.e_score_correction_bias": np.zeros(16, np.float32)}) > 1000 * GATES["float32"]

"""One program under two layouts: loss terms and every gradient leaf of the product's own step, compared by relative L2.

Gates of design section 8. float64: each leaf within 1e-11 of one device. float32: its error against the float64
one-device gradient is at most 4 times that of one device in float32.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.build import Parts, build
from jaxpar.config.layout import Layout
from jaxpar.config.model import ModelConfig
from jaxpar.config.run import RunConfig
from jaxpar.core.protocols import Model
from jaxpar.core.tree import named_leaves
from jaxpar.models.init import init_params
from jaxpar.models.transformer import Transformer
from jaxpar.step.train_step import make_gradients

FLOAT64_GATE = 1e-11
FLOAT32_FACTOR = 4.0

BASE: Mapping[str, Any] = {
    "model": {"num_layers": 4, "embed_dim": 64, "num_heads": 8, "mlp_dim": 128, "vocab_size": 96},
    "data": {"source": "synthetic", "seq_len": 32, "global_batch_size": 16},
    "optimizer": {"name": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0},
    "train": {"steps": 4},
    "compute_dtype": "float64",
    "param_dtype": "float64",
    "attention": "reference",
    "zero_stage": 0,
}


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in change.items():
        out[key] = merged(out.get(key, {}), value) if isinstance(value, Mapping) else value
    return out


def config(*changes: Mapping[str, Any]) -> RunConfig:
    """BASE with changes laid over it, in order."""
    tree: dict[str, Any] = dict(BASE)
    for change in changes:
        tree = merged(tree, change)
    return RunConfig.model_validate(tree)


def packed_rows(rows: int, seq_len: int, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of random documents with uneven padding: some rows full, some nearly empty, one all padding."""
    rng = np.random.default_rng(seed)
    shape = (rows, seq_len)
    out = {
        "tokens": rng.integers(0, vocab, shape, dtype=np.int32),
        "targets": rng.integers(0, vocab, shape, dtype=np.int32),
        "weights": np.ones(shape, np.float32),
        "positions": np.zeros(shape, np.int32),
        "segments": np.zeros(shape, np.int32),
        "samples": np.arange(rows, dtype=np.uint32) + 7,
    }
    for row in range(rows):
        valid = [seq_len, 0, 3, seq_len // 2 + 1][row % 4] if row < 8 else seq_len
        at, segment = 0, 1
        while at < valid:
            length = min(int(rng.integers(1, seq_len // 2)), valid - at)
            out["positions"][row, at : at + length] = np.arange(length)
            out["segments"][row, at : at + length] = segment
            out["weights"][row, at + length - 1] = 0
            at, segment = at + length, segment + 1
        out["weights"][row, valid:] = 0
    return out


def rows_of(run: RunConfig, seed: int) -> dict[str, np.ndarray]:
    return packed_rows(run.data.global_batch_size, run.data.seq_len, run.model.vocab_size, seed)


def num_devices(run: RunConfig) -> int:
    return int(np.prod(list(run.mesh.sizes.values())))


def parts_of(run: RunConfig, model: Model | None = None) -> Parts:
    return build(run, model=model, devices=jax.devices()[: num_devices(run)])


def gradients(
    run: RunConfig, rows: Mapping[str, np.ndarray], step: int = 3, model: Model | None = None, values: Any = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Means of the loss terms (arrays for those of a number a block) and every gradient leaf, in a program of the config's own dtype."""
    with jax.enable_x64(run.compute_dtype == "float64"):
        parts = parts_of(run, model)
        if values is None:
            values = initial(run) if model is None else jax.jit(lambda: init_params(model, run.seed, run.param_dtype))()
        params = jax.device_put(stored(parts.layout, values), parts.placement.state_shardings.params)
        batch = parts.feed.place(rows, run.num_microbatches)
        step_fn = jax.jit(make_gradients(parts.forward, parts.placement, run.seed))
        means, grads = step_fn(params, batch, jnp.asarray(step, jnp.int32))
        return {n: np.asarray(v) if v.ndim else float(v) for n, v in means.items()}, natural(parts.layout, grads)


def stored(layout: Layout, params: Any) -> Any:
    """Parameters in natural order -> as the stages of a pipeline store them, ones where a row belongs to no layer."""
    if layout.stages is None:
        return params
    rows = np.asarray(layout.stages.layer_of_row)

    def one(leaf: np.ndarray) -> np.ndarray:
        out = np.asarray(leaf)[np.maximum(rows, 0)]
        out[rows < 0] = 1
        return out

    return params | {"blocks": jax.tree.map(one, params["blocks"])}


def natural(layout: Layout, grads: Any) -> dict[str, np.ndarray]:
    """Gradients by leaf, layers in natural order; rows that belong to no layer must have none."""
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(grads).items()}
    if layout.stages is None:
        return leaves
    rows = np.asarray(layout.stages.layer_of_row)
    for name in leaves:
        if name.startswith("blocks."):
            assert not leaves[name][rows < 0].any(), f"{name}: a row of no layer has a gradient"
            leaves[name] = leaves[name][np.asarray(layout.stages.row_of_layer)]
    return leaves


@cache
def _initial(model_json: str, seed: int, dtype: str) -> Any:
    """Initial parameters, made once: that they do not depend on the layout is a test of its own.

    Drawn in float32 for every dtype: a float64 draw is of other random numbers, so nothing in float32 could be judged by it.
    """
    model = Transformer(ModelConfig.model_validate_json(model_json))
    return jax.tree.map(lambda x: np.asarray(x, dtype), jax.jit(lambda: init_params(model, seed, "float32"))())


def initial(run: RunConfig) -> Any:
    return _initial(run.model.model_dump_json(), run.seed, run.param_dtype)


ONE_DEVICE = {
    "mesh": {"pipe": 1, "replica": 1, "data": 1, "expert": 1, "context": 1, "tensor": 1},
    "num_microbatches": 1,
    "zero_stage": 0,
    "remat": {"policy": "none"},
}
FLOAT32 = {"compute_dtype": "float32", "param_dtype": "float32"}


@cache
def _reference(run_json: str, rows_seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    run = RunConfig.model_validate_json(run_json)
    return gradients(run, rows_of(run, rows_seed))


def one_device(run: RunConfig, rows_seed: int = 0, **dtypes: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The same config on one device, one microbatch, no remat; shared between the layouts of one model."""
    tree = merged(merged(run.model_dump(), ONE_DEVICE), dtypes)
    tree["context"] = {"method": "ring"}
    if tree["model"].get("moe"):
        tree["model"]["moe"]["dispatch"] = "local"
    return _reference(RunConfig.model_validate(tree).model_dump_json(), rows_seed)


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / max(float(np.linalg.norm(want)), 1e-300))


# A constant added to every key moves all logits of a query alike, so without rotary angles or key norm its gradient is
# rounding noise: it is judged together with its neighbour.
NOISE = {"blocks.attention.key.bias": "blocks.attention.query.bias"}


def leaf_errors(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Relative L2 of every leaf; leaves of NOISE are joined to their neighbour."""
    assert got.keys() == want.keys()
    return {name: relative_l2(_joined(got, name), _joined(want, name)) for name in want if name not in NOISE}


def _joined(tree: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    names = [name, *(noise for noise, neighbour in NOISE.items() if neighbour == name and noise in tree)]
    return np.concatenate([tree[n].ravel() for n in names])


def assert_float64(run: RunConfig, rows_seed: int = 0) -> None:
    """Loss terms and every leaf equal one device's at float64's gate."""
    means, grads = gradients(run, rows_of(run, rows_seed))
    want_means, want = one_device(run, rows_seed)
    for name, value in want_means.items():
        assert np.max(np.abs(means[name] - value)) <= FLOAT64_GATE * max(np.max(np.abs(value)), 1.0), (name, means[name], value)
    errors = leaf_errors(grads, want)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= FLOAT64_GATE, f"{worst}: relative L2 {errors[worst]:.3g}; all: {errors}"


def assert_float32(run: RunConfig, rows_seed: int = 0, factor: float = FLOAT32_FACTOR) -> None:
    """Every leaf's error against float64 is at most `factor` times that of one device in float32 (in the run's compute dtype)."""
    _, grads = gradients(run, rows_of(run, rows_seed))
    _, exact = one_device(run, rows_seed, compute_dtype="float64", param_dtype="float64")
    _, single = one_device(run, rows_seed)
    errors, floor = leaf_errors(grads, exact), leaf_errors(single, exact)
    bad = {name: (errors[name], floor[name]) for name in errors if errors[name] > factor * floor[name]}
    assert not bad, f"(error, error of one device) by leaf: {bad}"

"""Counts, FLOPs and bytes against published numbers, hand arithmetic and the real optimizer trees."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config.checks import layout_of
from jaxpar.config.model import ModelConfig
from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.config.run import RunConfig
from jaxpar.config.sizes import (
    forward_flops_per_token,
    matmul_parameters,
    parameter_count,
    parameter_table,
    state_bytes_per_device,
    train_flops_per_token,
)
from jaxpar.models.init import is_spec
from jaxpar.models.transformer import Transformer
from jaxpar.optim.build import build_optimizer

MET_03: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "mlp_dim": 128,
    "vocab_size": 256,
}


def test_flops_of_the_golden_case():
    model = ModelConfig(**MET_03)
    assert matmul_parameters(model) == 90_112
    assert train_flops_per_token(model, 128) == 638_976
    assert train_flops_per_token(model, 128, causal=False) == 737_280
    assert 3 * forward_flops_per_token(model, 128) == 638_976
    assert matmul_parameters(ModelConfig(**{**MET_03, "num_kv_heads": 4})) == 98_304


def test_flops_count_the_head_once_tied_or_not_and_no_padding():
    model = ModelConfig(**MET_03)
    changes: list[dict[str, Any]] = [{"tied_embeddings": True}, {"vocab_multiple": 100}, {"bias": True}, {"norm": "layernorm"}]
    for change in changes:
        assert train_flops_per_token(ModelConfig(**MET_03, **change), 128) == train_flops_per_token(model, 128)


@pytest.mark.parametrize(("window", "seq_len"), [(32, 128), (128, 128), (500, 128), (1, 4)])
def test_sliding_window_counts_the_area_of_the_mask(window, seq_len):
    model = ModelConfig(**MET_03, sliding_window=window)
    # the mask's pairs are window x seq_len - window^2 / 2 + window / 2; the convention drops the half diagonal, as seq_len / 2 does
    pairs = sum(min(i + 1, window) for i in range(seq_len))
    kept = pairs - min(window, seq_len) / 2
    attention = forward_flops_per_token(model, seq_len) - 2 * matmul_parameters(model)
    assert attention == math.floor(4 * 2 * 4 * 16 * kept / seq_len)


def test_table_of_a_model_with_everything():
    model = ModelConfig(
        **MET_03, bias=True, norm="layernorm", activation="swiglu", positions="learned", max_positions=32, qk_norm=True, vocab_multiple=100
    )
    table = {leaf.path: (leaf.names, leaf.shape) for leaf in parameter_table(model)}
    assert table["embed.tokens.table"] == (("vocab", "embed"), (300, 64))
    assert table["embed.positions.table"] == (("positions", "embed"), (32, 64))
    assert table["blocks.attention.key.kernel"] == (("layers", "embed", "kv_heads", "head_dim"), (2, 64, 2, 16))
    assert table["blocks.attention.query.bias"] == (("layers", "heads", "head_dim"), (2, 4, 16))
    assert table["blocks.attention.out.bias"] == (("layers", "embed"), (2, 64))
    assert table["blocks.attention.query_norm.scale"] == (("layers", "head_dim"), (2, 16))
    assert table["blocks.mlp.down.bias"] == (("layers", "embed"), (2, 64))
    assert table["blocks.mlp_norm.bias"] == (("layers", "embed"), (2, 64))
    assert table["head.out.kernel"] == (("embed", "vocab"), (64, 300))
    # by hand: embeddings 2 x 256 x 64 + 32 x 64; a layer: q, o 2 x 4096, k, v 2 x 2048, biases 192, mlp 3 x 8192 + 320,
    # norms 4 x 64 + 2 x 16; final norm 128
    layer = 2 * 4096 + 2 * 2048 + 192 + 3 * 8192 + 320 + 256 + 32
    assert parameter_count(model) == 2 * 256 * 64 + 32 * 64 + 2 * layer + 128


LAYER_NORM: dict[str, Any] = {"norm": "layernorm", "activation": "gelu", "bias": True, "positions": "learned", "max_positions": 32}


@pytest.mark.parametrize("change", [{}, LAYER_NORM | {"tied_embeddings": True}, {"qk_norm": True, "vocab_multiple": 100}, {"bias": True}])
def test_table_equals_the_tree_of_the_model(change):
    config = ModelConfig(**MET_03, **change)
    specs = jax.tree_util.tree_leaves_with_path(Transformer(config).params, is_leaf=is_spec)
    tree = {jax.tree_util.keystr(path, simple=True, separator="."): (spec.names, spec.shape) for path, spec in specs}
    per_layer = {
        path: (("layers", *names), (2, *shape)) if path.startswith("blocks.") else (names, shape) for path, (names, shape) in tree.items()
    }
    assert {leaf.path: (leaf.names, leaf.shape) for leaf in parameter_table(config)} == per_layer


def run(optimizer: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    tree = {
        "model": {"num_layers": 2, "embed_dim": 256, "num_heads": 4, "mlp_dim": 512, "vocab_size": 512},
        "data": {"source": "synthetic", "seq_len": 64, "global_batch_size": 16},
        "optimizer": {"lr": 1e-3, **(optimizer or {})},
        "train": {"steps": 10},
    }
    return RunConfig.model_validate(tree | changes)


@pytest.mark.parametrize(("stage", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_bytes_by_zero_stage(stage, shares):
    config = run(zero_stage=stage, mesh={"data": 4, "context": 2})
    norms = 4 * 5 * 256  # vectors are never sharded
    matrices = 4 * parameter_count(config.model) - norms
    state = state_bytes_per_device(config, layout_of(config, 8))
    want = tuple(matrices // share + norms for share in shares)
    assert (state.parameters, state.gradients, state.optimizer) == (want[0], want[1], 2 * want[2])
    assert state.total == state.parameters + state.gradients + state.optimizer
    assert {leaf.path for leaf in state.replicated} == {"blocks.attention_norm.scale", "blocks.mlp_norm.scale", "head.norm.scale"}


def test_bytes_with_tensor_and_replica():
    config = run(zero_stage=3, mesh={"replica": 2, "data": 2, "tensor": 2})
    norms = 5 * 256  # vectors: neither split over tensor nor sharded
    matrices = parameter_count(config.model) - norms
    assert state_bytes_per_device(config, layout_of(config, 8)).parameters == 4 * (matrices // 4 + norms)


def test_leaves_that_zero_does_not_shard_are_listed_and_counted_whole():
    model = {"num_layers": 2, "embed_dim": 36, "num_heads": 6, "mlp_dim": 64, "vocab_size": 512, "qk_norm": True}
    config = run(zero_stage=3, mesh={"data": 4}, model=model)
    state = state_bytes_per_device(config, layout_of(config, 4))
    blocks = {f"blocks.{name}.scale" for name in ("attention_norm", "mlp_norm", "attention.query_norm", "attention.key_norm")}
    assert {leaf.path for leaf in state.replicated} == blocks | {"head.norm.scale"}
    whole = 5 * 36 + 2 * 2 * 6
    assert state.parameters == 4 * ((parameter_count(config.model) - whole) // 4 + whole)


def test_float64_state_is_twice_as_large():
    config = run()
    wide = run(param_dtype="float64")
    layout = layout_of(config, 1)
    assert state_bytes_per_device(wide, layout).total == 2 * state_bytes_per_device(config, layout).total


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "adamw"}, {"name": "lion"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}, {"name": "muon"}, {"name": "adafactor"}],
    ids=lambda optimizer: "-".join(map(str, optimizer.values())),
)
def test_optimizer_bytes_equal_the_real_state(optimizer):
    config = run(optimizer)
    table = parameter_table(config.model)
    params = nested({leaf.path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in table})
    rule = build_optimizer(OptimizerConfig(lr=1e-3, **optimizer), 10, nested({leaf.path: leaf.names for leaf in table}))
    state = jax.tree.leaves(jax.eval_shape(rule.init, params))
    floats = sum(leaf.size * 4 for leaf in state if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.shape not in ((), (3,), (5, 3)))
    assert state_bytes_per_device(config, layout_of(config, 1)).optimizer == floats

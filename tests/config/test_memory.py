"""Bytes of state against hand arithmetic and the real optimizer trees."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config.checks import check, layout_of
from jaxpar.config.memory import buffer_rows_per_token, operand_bytes, state_bytes_per_device
from jaxpar.config.moe import MoeConfig
from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.config.parameters import parameter_count, parameter_table
from jaxpar.config.run import RunConfig
from jaxpar.optim.build import build_optimizer
from tests.config.dotted import nested

SMALL: dict[str, Any] = {"num_layers": 2, "embed_dim": 256, "num_heads": 4, "mlp_dim": 512, "vocab_size": 512}


def run(optimizer: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    tree = {
        "model": SMALL,
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


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "adamw"}, {"name": "lion"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}, {"name": "muon"}, {"name": "adafactor"}],
    ids=lambda optimizer: "-".join(map(str, optimizer.values())),
)
@pytest.mark.parametrize("moe", [None, {"num_experts": 4, "expert_dim": 128, "router": "sigmoid_bias", "shared_experts": 1, "every": 2}])
def test_optimizer_bytes_equal_the_real_state(optimizer, moe):
    config = run(optimizer, model=SMALL | {"moe": moe})
    table = parameter_table(config.model)
    params = nested({leaf.path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in table})
    rule = build_optimizer(OptimizerConfig(lr=1e-3, **optimizer), 10, nested({leaf.path: leaf.names for leaf in table}))
    state = jax.tree.leaves(jax.eval_shape(rule.init, params))
    floats = sum(leaf.size * 4 for leaf in state if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.shape not in ((), (3,), (5, 3)))
    assert state_bytes_per_device(config, layout_of(config, 1)).optimizer == floats


# Experts: over `expert`, their ZeRO over data and context.


@pytest.mark.parametrize(("stage", "zero"), [(0, 1), (1, 1), (3, 2)])
def test_bytes_of_experts(stage, zero):
    moe = {"num_experts": 8, "expert_dim": 128, "router": "sigmoid_bias"}
    config = run(zero_stage=stage, mesh={"data": 2, "expert": 4, "tensor": 2}, model=SMALL | {"moe": moe})
    assert check(config, 16) == []
    state = state_bytes_per_device(config, layout_of(config, 16))
    experts = 2 * 8 * 3 * 256 * 128 // (4 * 2) // zero
    router, vectors = 2 * 256 * 8 // (8 if zero == 2 else 1), 2 * 8 + 5 * 256
    split = (2 * 4 * 256 * 256 + 2 * 512 * 256) // 2 // (8 if zero == 2 else 1)
    assert state.parameters == 4 * (experts + router + vectors + split)
    assert all(leaf.path.endswith((".scale", ".bias")) for leaf in state.replicated)


def test_experts_that_fill_the_devices_are_not_called_replicated():
    config = run(zero_stage=3, mesh={"expert": 4}, model=SMALL | {"moe": {"num_experts": 8}})
    assert check(config, 4) == []
    state = state_bytes_per_device(config, layout_of(config, 4))
    assert {leaf.path for leaf in state.replicated} == {"blocks.attention_norm.scale", "blocks.mlp_norm.scale", "head.norm.scale"}
    assert state_bytes_per_device(run(mesh={"pipe": 2}), layout_of(run(mesh={"pipe": 2}), 2)).replicated[0].path == "head.norm.scale"


def test_operands_of_latent_attention():
    mla = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    latents, heads, mlp = 40 + 24 + 8, 4 * (24 + 16 + 2 * 12), 256 + 256 + 3 * 512

    def one(**changes: Any) -> float:
        return operand_bytes(run(compute_dtype="float32", **{"model": SMALL | {"mla": mla}} | changes)) / 4 / 1024

    assert one() == 256 + latents + (40 + 24) + 256 + heads + mlp
    split = (40 + 24) + 256 + heads / 2 + 256 + 256 + 3 * 512 / 2
    assert one(mesh={"tensor": 2}) == (256 + latents) / 2 + split
    assert one(mesh={"tensor": 2}, sequence_parallel=False) == 256 + latents + split
    straight = SMALL | {"mla": mla | {"q_lora_rank": None}}
    assert one(mesh={"tensor": 2}, model=straight) == (256 + latents - 40) / 2 + split - 40 + 256


def test_operands_of_experts():
    def one(**moe: Any) -> float:
        return operand_bytes(run(compute_dtype="float32", model=SMALL | {"moe": {"num_experts": 8, **moe}})) / 4 / 1024

    dense = operand_bytes(run(compute_dtype="float32")) / 4 / 1024
    # 256 each: attention's input, the inputs of its output map, gradients of query, key, value and output; then the input that router,
    # experts and what is beside them share
    attention, row = 6 * 256 + 256, 2 * 256 + 3 * 512
    assert dense == attention + row - 256
    assert one() == attention + 8 + 2.5 * row
    assert one(capacity_factor=None) == attention + 8 + 8 * row
    assert one(dispatch="ragged") == attention + 8 + 4 * row
    assert one(expert_dim=128, shared_experts=2, shared_gate=True) == attention + 9 + 2.5 * (512 + 384) + 256 + 3 * 256
    assert one(residual=True) == attention + 10 + 2.5 * row + 256 + 3 * 512
    assert one(every=2) == dense + one()
    assert buffer_rows_per_token(MoeConfig(num_experts=4, top_k=2, capacity_factor=3.0)) == 4
    assert buffer_rows_per_token(MoeConfig(num_experts=4, top_k=2, dispatch="local")) == 2

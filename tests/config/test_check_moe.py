"""What the user can get wrong about experts: one line, its ways out tried here; what is legal, and what is noted."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config.checks import check, layout_of
from jaxpar.config.depth import layers_per_stage, leading_cost_in_layers, schedule_of
from jaxpar.config.errors import ALIASES, ConfigError, all_fields
from jaxpar.config.flops import forward_flops_per_token
from jaxpar.config.layout import plan_leaf
from jaxpar.config.load import validate
from jaxpar.config.notes_moe import moe_notes
from jaxpar.config.parameters import parameter_table
from jaxpar.config.run import RunConfig
from jaxpar.config.stages import balanced_layers
from tests.config.dotted import nested

Changes = dict[str, Any]

BASE: Changes = {
    "model": {"num_layers": 4, "embed_dim": 64, "num_heads": 8, "mlp_dim": 128, "vocab_size": 264},
    "model.moe": {"num_experts": 8},
    "data": {"source": "stdlib", "seq_len": 64, "global_batch_size": 16},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 10},
}


def tree(*changes: Changes) -> dict[str, Any]:
    """A legal tree with experts, with dotted changes."""
    return nested(BASE, *changes)


def config(*changes: Changes) -> RunConfig:
    return RunConfig.model_validate(tree(*changes))


def moe(**options: Any) -> Changes:
    return {f"model.moe.{name}": value for name, value in options.items()}


# (changes, the line's beginning, ways out that the line offers as overrides, ways out in other words)
CASES: dict[str, tuple[Changes, str, list[Changes], list[Changes]]] = {
    "more choices than experts": (
        moe(top_k=9),
        "model.moe.top_k: 9 is more than model.moe.num_experts=8; at most 8 would work",
        [],
        [moe(top_k=8)],
    ),
    "one expert, two choices": (
        moe(num_experts=1),
        "model.moe.top_k: 2 is more than model.moe.num_experts=1; at most 1 would work",
        [],
        [moe(top_k=1)],
    ),
    "switch sends to one": (
        moe(router="switch"),
        "model.moe.top_k: 2, but model.moe.router=switch sends a token to 1; ",
        [moe(top_k=1), moe(router="topk")],
        [],
    ),
    "hash sends to one": (
        moe(router="hash", top_k=3),
        "model.moe.top_k: 3, but model.moe.router=hash sends a token to 1; ",
        [moe(top_k=1)],
        [],
    ),
    "base sends to one": (moe(router="base"), "model.moe.top_k: 2, but model.moe.router=base sends a token to 1; ", [moe(top_k=1)], []),
    "gshard sends to two": (
        moe(router="gshard", top_k=1),
        "model.moe.top_k: 1, but model.moe.router=gshard sends a token to 2; ",
        [moe(top_k=2), moe(router="topk")],
        [],
    ),
    "gshard sends to two of many": (
        moe(router="gshard", top_k=9),
        "model.moe.top_k: 9, but model.moe.router=gshard sends a token to 2; model.moe.top_k=2 would work",
        [],
        [moe(top_k=2)],
    ),
    "gshard needs two": (
        moe(router="gshard", num_experts=1),
        "model.moe.num_experts: 1, but model.moe.router=gshard sends a token to 2; ",
        [moe(num_experts=2), moe(router="switch", top_k=1)],
        [],
    ),
    # which layers
    "layers that are no whole blocks": (
        {"model.num_layers": 7, **moe(every=3, leading_dense=2)},
        "model.num_layers: 7 less model.moe.leading_dense=2 is not a multiple of model.moe.every=3; 5 or 8 would work, "
        "or model.moe.every of 1, 5",
        [],
        [{"model.num_layers": 5}, {"model.num_layers": 8}, moe(every=1), moe(every=5)],
    ),
    "fewer layers than a block": (
        moe(every=5),
        "model.num_layers: 4 is not a multiple of model.moe.every=5; 5 would work, or model.moe.every of 1, 2, 4",
        [],
        [{"model.num_layers": 5}, moe(every=2)],
    ),
    "no layer with experts": (
        moe(leading_dense=4, every=2),
        "model.num_layers: 4, but model.moe.leading_dense=4 leaves no layer for experts; ",
        [{"model.num_layers": 6}],
        [],
    ),
    "no whole blocks for a pipeline": (
        {"model.num_layers": 7, "mesh.pipe": 4, "num_microbatches": 4, "pipeline.layers_per_stage": (1, 1), **moe(every=2)},
        "model.num_layers: 7 is not a multiple of model.moe.every=2; 6 or 8 would work",
        [],
        [{"model.num_layers": 8, "pipeline.layers_per_stage": None}],
    ),
    # causality
    "expert choice where later tokens must not decide": (
        moe(causal_only=True, router="expert_choice"),
        "model.moe.causal_only: true, but model.moe.router=expert_choice decides with all tokens of a group, later ones too; ",
        [moe(router="topk")],
        [moe(causal_only=False)],
    ),
    "drops by gates where later tokens must not decide": (
        moe(causal_only=True, drop_policy="probability"),
        "model.moe.causal_only: true, but with model.moe.drop_policy=probability a later token can take an earlier one's place; ",
        [moe(drop_policy="position")],
        [moe(causal_only=False)],
    ),
    # groups of experts
    "groups that do not divide": (
        moe(num_groups=3),
        "model.moe.num_groups: 3 does not divide model.moe.num_experts=8; 1, 2, 4, 8 would work",
        [],
        [moe(num_groups=4)],
    ),
    "more groups than there are": (
        moe(num_groups=2, top_groups=3, router="sigmoid_bias"),
        "model.moe.top_groups: 3 is more than model.moe.num_groups=2; at most 2 would work",
        [],
        [moe(top_groups=2)],
    ),
    "too few in the groups": (
        moe(num_groups=4, top_groups=1, top_k=3),
        "model.moe.top_groups: 1 of 2 experts have fewer than model.moe.top_k=3; ",
        [moe(top_groups=2)],
        [],
    ),
    # capacity
    "expert choice without capacity": (
        moe(router="expert_choice", capacity_factor=None),
        "model.moe.capacity_factor: null, but model.moe.router=expert_choice fills every expert to its capacity; ",
        [moe(capacity_factor=1)],
        [],
    ),
    "capacity rounds to nothing": (
        moe(capacity_formula="tutel", capacity_factor=0.1),
        "model.moe.capacity_factor: 0.1 of 8 tokens an expert rounds to 0 by model.moe.capacity_formula=tutel; ",
        [moe(capacity_factor=0.125), moe(capacity_formula="megatron")],
        [],
    ),
    "capacity rounds to nothing, of a share that is no power of two": (
        {"data.seq_len": 24, **moe(capacity_formula="tutel", capacity_factor=0.3, min_capacity=4)},
        "model.moe.capacity_factor: 0.3 of 3 tokens an expert rounds to 0",
        [moe(capacity_factor=0.3334)],
        [],
    ),
    "buffers below balance": (
        moe(dispatch="ragged", ragged_buffer_factor=0.5),
        "model.moe.ragged_buffer_factor: 0.5 has less room than a balanced load needs; 1 or more would work",
        [],
        [moe(ragged_buffer_factor=1)],
    ),
    "base with fewer tokens than experts": (
        {"data.seq_len": 4, **moe(router="base", top_k=1)},
        "model.moe.routing_group_sequences: 1 x data.seq_len=4 are 4 tokens, too few for model.moe.router=base to give each of 8 experts "
        "one; ",
        [moe(routing_group_sequences=2), moe(router="switch")],
        [],
    ),
    # routing groups
    "groups that do not divide the rows": (
        {"mesh.data": 2, "mesh.expert": 2, "num_microbatches": 2, **moe(routing_group_sequences=4)},
        "model.moe.routing_group_sequences: 4 does not divide the 2 rows of a microbatch on a device "
        "(data.global_batch_size=16 / (num_microbatches=2 x batch shards 4)); 1, 2 would work, or num_microbatches of 1",
        [],
        [moe(routing_group_sequences=2), {"num_microbatches": 1}],
    ),
    "groups larger than a shard": (
        {"mesh.data": 4, **moe(routing_group_sequences=8)},
        "model.moe.routing_group_sequences: 8 does not divide the 4 rows of a microbatch on a device "
        "(data.global_batch_size=16 / (num_microbatches=1 x batch shards 4)); 1, 2, 4 would work, or batch shards that divide 2",
        [],
        [moe(routing_group_sequences=4), {"mesh.data": 2}],
    ),
    "groups that no batch has": (
        moe(routing_group_sequences=5),
        "model.moe.routing_group_sequences: 5 does not divide the 16 rows of a microbatch on a device "
        "(data.global_batch_size=16 / (num_microbatches=1 x batch shards 1)); 1, 2, 4, 8, 16 would work, "
        "or data.global_batch_size=15 or 20",
        [],
        [{"data.global_batch_size": 15}],
    ),
    # losses
    "balance where the router balances": (
        moe(router="sinkhorn", balance_coefficient=0.01),
        "model.moe.balance_coefficient: 0.01, but model.moe.router=sinkhorn balances each group by itself; ",
        [moe(balance_coefficient=0)],
        [],
    ),
    "balance where nothing learns": (
        moe(router="hash", top_k=1, balance_coefficient=0.01),
        "model.moe.balance_coefficient: 0.01, but model.moe.router=hash chooses by token ids, which no loss moves; ",
        [moe(balance_coefficient=0)],
        [],
    ),
    # layouts
    "experts that do not divide": (  # MOE-14
        {"mesh.expert": 4, **moe(num_experts=6)},
        "model.moe.num_experts: 6 does not divide over mesh.expert=4; model.moe.num_experts=4 or 8 would, or mesh.expert of 1, 2, 3",
        [],
        [moe(num_experts=4), moe(num_experts=8), {"mesh.expert": 2}],
    ),
    "width of experts": (
        {"mesh.tensor": 8, **moe(expert_dim=100, shared_experts=2)},
        "model.moe.expert_dim: 100 does not divide over mesh.tensor=8; model.moe.expert_dim=96 or 104 would, or mesh.tensor of 1, 2, 4, 5",
        [],
        [moe(expert_dim=96), {"mesh.tensor": 4}],
    ),
    "width of experts from mlp_dim": (
        {"mesh.tensor": 8, "model.mlp_dim": 100},
        "model.mlp_dim: 100 does not divide over mesh.tensor=8; ",
        [{"model.mlp_dim": 96}],
        [],
    ),
    "width of the dense layers": (
        {"mesh.tensor": 8, "model.mlp_dim": 100, **moe(expert_dim=96, residual=True)},
        "model.mlp_dim: 100 does not divide over mesh.tensor=8; ",
        [{"model.mlp_dim": 96}],
        [moe(residual=False)],
    ),
    "local dispatch of spread experts": (
        {"mesh.expert": 4, **moe(dispatch="local")},
        "model.moe.dispatch: local, but mesh.expert=4 spreads the experts over devices; ",
        [moe(dispatch="all_to_all"), {"mesh.expert": 1}],
        [],
    ),
    "whole experts on every device": (
        {"mesh.expert": 4, "rules.experts": None},
        "rules.experts: null, but mesh.expert=4, whose devices would all hold all experts; write [expert], or ",
        [{"mesh.expert": 1}],
        [{"rules.experts": ["expert"]}],
    ),
    "experts over another axis": (
        {"rules.experts": "data"},
        "rules.experts: experts cannot be split over data; write [expert] or null",
        [],
        [{"rules.experts": "expert"}, {"rules.experts": None}],
    ),
    "a split router": (
        {"rules.router": "tensor"},
        "rules.router: router cannot be split over tensor; write null",
        [],
        [{"rules.router": None}],
    ),
    "experts that ZeRO cannot shard": (
        {"mesh.data": 4, "mesh.expert": 2, "data.global_batch_size": 24, "model.embed_dim": 50, "model.num_heads": 16, "model.head_dim": 8}
        | moe(expert_dim=30),
        "zero_stage: 1 cannot shard blocks.moe.experts.gate.kernel (4 x 8 x 50 x 30) and 2 more over mesh.data=4 = 4: no free dim divides; "
        "zero_stage=0 would work, or data x context of 1, 2, 5, 10, 25, 50",
        [],
        [{"zero_stage": 0}, {"mesh.data": 2}],
    ),
    # pipelines divide blocks
    "fewer blocks than stages": (
        {"model.num_layers": 5, "mesh.pipe": 4, "num_microbatches": 4, **moe(every=2, leading_dense=1)},
        "model.num_layers: 5 makes 2 blocks to divide (model.moe.every=2, model.moe.leading_dense=1), fewer than the 4 stages of "
        "mesh.pipe=4; ",
        [{"model.num_layers": 9}, {"mesh.pipe": 2}],
        [],
    ),
    "a list that counts layers": (
        {"mesh.pipe": 2, "num_microbatches": 2, "pipeline.layers_per_stage": (2, 2), **moe(every=2)},
        "pipeline.layers_per_stage: [2, 2] is 4 blocks, but model.num_layers=4 makes 2 blocks to divide "
        "(model.moe.every=2, model.moe.leading_dense=0); [1, 1] would work",
        [],
        [{"pipeline.layers_per_stage": (1, 1)}],
    ),
    "a list that counts the leading layers": (
        {"mesh.pipe": 2, "num_microbatches": 2, "pipeline.layers_per_stage": (2, 2), **moe(leading_dense=1)},
        "pipeline.layers_per_stage: [2, 2] is 4 layers, but model.num_layers=4 makes 3 layers to divide "
        "(model.moe.every=1, model.moe.leading_dense=1); [2, 1] would work",
        [],
        [{"pipeline.layers_per_stage": (2, 1)}],
    ),
}


def written(fix: Changes) -> str:
    """Overrides as a message offers them."""
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in fix.items())


@pytest.mark.parametrize("case", CASES)
def test_one_line_whose_ways_out_work(case: str) -> None:
    changes, said, offered, in_words = CASES[case]
    found = check(config(changes), None)
    assert len(found) == 1, found
    assert found[0].startswith(said), found
    assert "\n" not in found[0]
    for fix in offered:
        assert written(fix) in found[0][len(said) :], found
    assert offered + in_words
    for fix in offered + in_words:
        assert check(config(changes, fix), None) == [], fix


IDLE: list[tuple[Changes, str]] = [
    (
        moe(capacity_factor=None, drop_policy="choice"),
        "drop_policy: choice has no effect with model.moe.capacity_factor=null, which drops no",
    ),
    (moe(capacity_factor=None, min_capacity=4), "min_capacity: 4 has no effect with model.moe.capacity_factor=null"),
    (moe(capacity_factor=None, capacity_formula="tutel"), "capacity_formula: tutel has no effect with model.moe.capacity_factor=null"),
    (moe(capacity_factor=None, renormalize_after_drop=True), "renormalize_after_drop: true has no effect with model.moe.capacity_factor"),
    (moe(capacity_factor=None, max_drop_fraction=0.1), "max_drop_fraction: 0.1 has no effect with model.moe.capacity_factor=null"),
    (
        moe(dispatch="local", ragged_buffer_factor=3.0),
        "ragged_buffer_factor: 3.0 has no effect with model.moe.dispatch=local, only with ragged",
    ),
    (moe(allow_overflow=True), "allow_overflow: true has no effect with model.moe.dispatch=all_to_all, only with ragged"),
    (moe(router="expert_choice", drop_policy="choice"), "drop_policy: choice has no effect with model.moe.router=expert_choice, whose"),
    (moe(router="gshard", softmax="after"), "softmax: after has no effect with model.moe.router=gshard, only with topk"),
    (
        moe(router="gshard", renormalize=False),
        "renormalize: false has no effect with model.moe.router=gshard, only with topk and sigmoid_bias",
    ),
    (
        moe(softmax="after", renormalize=False),
        "renormalize: false has no effect with model.moe.softmax=after, whose gates sum to 1 already",
    ),
    (moe(router="hash", top_k=1, jitter=0.01), "jitter: 0.01 has no effect with model.moe.router=hash, which chooses by token ids"),
    (moe(router="hash", top_k=1, router_z_coefficient=1e-3), "router_z_coefficient: 0.001 has no effect with model.moe.router=hash"),
    (moe(router="sinkhorn", num_groups=2), "num_groups: 2 has no effect with model.moe.router=sinkhorn, only with topk and sigmoid_bias"),
    (moe(router="sinkhorn", top_groups=2), "top_groups: 2 has no effect with model.moe.router=sinkhorn"),
    (moe(group_score="max"), "group_score: max has no effect with model.moe.num_groups=1"),
    (moe(bias_rate=0.1), "bias_rate: 0.1 has no effect with model.moe.router=topk, only with sigmoid_bias"),
    (moe(bias_centred=True), "bias_centred: true has no effect with model.moe.router=topk, only with sigmoid_bias"),
    (moe(sinkhorn_tolerance=1.0), "sinkhorn_tolerance: 1.0 has no effect with model.moe.router=topk, only with sinkhorn"),
    (moe(shared_gate=True), "shared_gate: true has no effect with model.moe.shared_experts=0"),
    (moe(balance_scope="global"), "balance_scope: global has no effect with model.moe.balance_coefficient=0"),
    (
        moe(balance_scope="global", balance_coefficient=0.01, balance_counts="first"),
        "balance_counts: first has no effect with model.moe.balance_scope=global",
    ),
    (moe(router="expert_choice", max_drop_fraction=0.1), "max_drop_fraction: 0.1 has no effect with model.moe.router=expert_choice"),
]


@pytest.mark.parametrize(("changes", "said"), IDLE, ids=lambda value: value.split(":")[0] if isinstance(value, str) else "")
def test_options_without_effect(changes: Changes, said: str) -> None:
    (found,) = check(config(changes), None)
    assert found.startswith(f"model.moe.{said}")
    key, value = found.split("; set ")[1].split("=")
    fix = {"true": True, "false": False, "null": None}.get(value, value)
    assert check(config(changes, {key: fix}), None) == []


LEGAL: list[Changes] = [
    {"mesh.expert": 4},
    {"mesh.expert": 8, "mesh.data": 2},
    {"mesh.expert": 4, "model.moe": None},  # of a dense model one more axis of the batch
    {"mesh.expert": 4, "model.moe": None, "rules.experts": None},
    {"rules.experts": None},
    {"mesh.expert": 2, "mesh.context": 2, "mesh.tensor": 2, "zero_stage": 3, "num_microbatches": 2},
    {"mesh.tensor": 8, "model.mlp_dim": 100, **moe(expert_dim=64)},  # no layer has that width
    moe(num_experts=1, top_k=1),
    moe(capacity_factor=None),
    moe(capacity_factor=None, dispatch="ragged", allow_overflow=True, max_drop_fraction=0.1),
    moe(dispatch="local", capacity_factor=100.0),
    moe(capacity_formula="tutel", capacity_factor=0.125),
    moe(router="expert_choice", dispatch="ragged"),
    moe(router="base", top_k=1, capacity_factor=None),
    moe(router="sigmoid_bias", num_groups=8, top_groups=2, balance_coefficient=1e-4, balance_scope="sequence"),
    moe(num_groups=4, top_groups=1, group_score="max", jitter=0.01),
    moe(every=4, shared_experts=2, shared_gate=True, residual=True),
    {"model.bias": True, **moe(leading_dense=3, shared_experts=1)},
    {"mesh.pipe": 2, "num_microbatches": 4, "model.num_layers": 9, **moe(every=2, leading_dense=1)},
]


@pytest.mark.parametrize("changes", LEGAL)
def test_legal(changes: Changes) -> None:
    run = config(changes)
    assert check(run, None) == []
    layout = layout_of(run, None)
    for leaf in parameter_table(run.model):
        plan = plan_leaf(layout, leaf.path, leaf.names, layout.stored_shape(leaf.names, leaf.shape))
        if "experts" in leaf.names:
            assert layout.split("experts") == plan.axes[1]
            assert "expert" not in plan.zero_axes or not plan.axes[1]


def test_experts_are_sharded_over_what_is_left_of_zero() -> None:
    run = config({"mesh.data": 2, "mesh.expert": 4, "mesh.context": 2, "zero_stage": 3})
    layout = layout_of(run, None)
    plans = {leaf.path: plan_leaf(layout, leaf.path, leaf.names, leaf.shape) for leaf in parameter_table(run.model)}
    experts = plans["blocks.moe.experts.up.kernel"]
    assert experts.spec(sharded=True) == ((), ("expert",), ("data", "context"), ())
    assert plans["blocks.moe.router.kernel"].spec(sharded=True) == ((), ("data", "expert", "context"), ())
    # 8 experts fill four devices, and there is nothing left to shard them over
    run = config({"mesh.expert": 4, "zero_stage": 3})
    assert check(run, 4) == []
    assert plan_leaf(layout_of(run, 4), experts.path, experts.names, experts.shape).zero_dim is None


def test_all_at_once() -> None:
    wrong = moe(top_k=9, num_groups=3, dispatch="local", routing_group_sequences=3, bias_rate=1.0, every=3)
    keys = [problem.split(":")[0] for problem in check(config(wrong, {"mesh.expert": 16, "data.global_batch_size": 32}), 16)]
    names = ("top_k", "num_groups", "dispatch", "routing_group_sequences", "bias_rate", "num_experts")
    assert sorted(keys) == sorted(["model.num_layers", *(f"model.moe.{name}" for name in names)])


axes = st.sampled_from([1, 2, 3, 4])


@settings(max_examples=150, deadline=None)
@given(
    mesh=st.fixed_dictionaries({"data": axes, "expert": axes, "tensor": axes}),
    num_experts=st.integers(1, 12),
    top_k=st.integers(1, 4),
    layers=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 3)),
    width=st.sampled_from([None, 24, 36, 50]),
    rows=st.tuples(st.sampled_from([12, 24, 48]), st.integers(1, 4), st.integers(1, 4)),
    local=st.booleans(),
)
def test_accepted_means_everything_divides(mesh, num_experts, top_k, layers, width, rows, local) -> None:
    (num_layers, every, leading), (batch, parts, group) = layers, rows
    sizes = {"data.global_batch_size": batch, "num_microbatches": parts, "model.num_layers": num_layers, "model.num_heads": 12}
    options = moe(num_experts=num_experts, top_k=top_k, every=every, leading_dense=leading, expert_dim=width, routing_group_sequences=group)
    odd = {"mesh": mesh, "zero_stage": 0, "data.seq_len": 48, "model.head_dim": 8, "model.mlp_dim": 60, "model.vocab_size": 264}
    run = config(sizes, odd, options, moe(dispatch="local" if local else "all_to_all"))
    shards = mesh["data"] * mesh["expert"]
    divides = (
        top_k <= num_experts
        and num_experts % mesh["expert"] == 0
        and num_layers > leading
        and (num_layers - leading) % every == 0
        and (width or 60) % mesh["tensor"] == 0
        and batch % (parts * shards) == 0
        and batch // (parts * shards) % group == 0
        and not (local and mesh["expert"] > 1)
    )
    found = check(run, None)
    assert (not found) == divides, found
    if divides:
        layout = layout_of(run, None)
        for leaf in parameter_table(run.model):
            plan_leaf(layout, leaf.path, leaf.names, leaf.shape)


# Stages.


def test_blocks_are_what_a_pipeline_divides() -> None:
    run = config({"mesh.pipe": 4, "num_microbatches": 4, "model.num_layers": 17, **moe(every=2, leading_dense=3)})
    stages = layout_of(run, 4).stages
    assert stages is not None
    assert sum(stages.layers_per_stage) == run.model.num_blocks == 7
    assert layout_of(run, 4).stored_shape(("layers", "embed"), (7, 64)) == (8, 64)


def test_leading_layers_weigh_on_the_first_stage() -> None:
    assert balanced_layers(8, 4, 0.0, 3.0) == (1, 3, 2, 2)
    assert balanced_layers(8, 4, 2.0, 1.0) == (2, 3, 2, 1)
    assert balanced_layers(9, 1, 2.0, 1.0) == (9,)
    for num_layers in range(12):
        assert balanced_layers(num_layers, 4, 1.3, 0.0) == balanced_layers(num_layers, 4, 1.3)
    depth = {"mesh.pipe": 4, "num_microbatches": 4, "model.num_layers": 12, "pipeline.layers_per_stage": "balance"}
    run = config(depth, moe(leading_dense=4))
    one = config({"model.num_layers": 1, "model.moe": None})
    dense = forward_flops_per_token(one.model, 64) - 2 * 64 * 264
    block = (forward_flops_per_token(run.model, 64) - 2 * 64 * 264 - 4 * dense) / 8
    assert leading_cost_in_layers(run) == pytest.approx(4 * dense / block)
    counts = layers_per_stage(run, schedule_of(run, 4).shape)
    assert (sum(counts), counts[0]) == (8, 1)
    even = config(depth | {"pipeline.layers_per_stage": None}, moe(leading_dense=4))
    assert layers_per_stage(even, schedule_of(even, 4).shape) == (2, 2, 2, 2)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.floats(0, 7), st.floats(0, 7))
def test_balance_of_both_ends_has_the_lowest_cost(num_virtual: int, more: int, head: float, first: float) -> None:
    num_layers = num_virtual + more

    def cost(counts: tuple[int, ...]) -> float:
        extra = [0.0] * num_virtual
        extra[0] += first
        extra[-1] += head
        return max(count + e for count, e in zip(counts, extra, strict=True))

    counts = balanced_layers(num_layers, num_virtual, head, first)
    assert (len(counts), sum(counts), min(counts) >= 1) == (num_virtual, num_layers, True)
    every = (c for c in itertools.product(range(1, num_layers + 1), repeat=num_virtual) if sum(c) == num_layers)
    assert cost(counts) == min(map(cost, every))


def test_operands_are_named_a_block() -> None:
    changes = {"mesh.pipe": 2, "num_microbatches": 4, "pipeline.schedule": "zb_h1", "remat.policy": "full"}
    (found,) = check(config(changes, moe(every=2)), None)
    assert "MiB a block and microbatch" in found
    (found,) = check(config(changes), None)
    assert "MiB a layer and microbatch" in found


# Notes and names.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (moe(router="expert_choice"), "model.moe.router=expert_choice looks at later tokens of a row: not causal"),
        (moe(router="sinkhorn"), "model.moe.router=sinkhorn weighs all tokens of a group in training"),
        (
            moe(router="sigmoid_bias", balance_coefficient=1e-2),
            "model.moe.router=sigmoid_bias with model.moe.balance_coefficient=0.01: two forces balance the experts",
        ),
        (moe(num_experts=1, top_k=1), "model.moe.num_experts=1: every token goes to the one expert"),
        (moe(), "nothing balances the experts of model.moe.router=topk: model.moe.balance_coefficient=0; 1e-2 is usual"),
        (
            moe(top_k=1, balance_coefficient=1e-2),
            "model.moe.top_k=1 with gates that sum to 1: each is 1, so the loss teaches the router nothing",
        ),
        (
            moe(capacity_factor=None, entropy_coefficient=1e-2),
            "model.moe.capacity_factor=null with model.moe.dispatch=all_to_all: buffers have room for every",
        ),
    ],
)
def test_notes(changes: Changes, said: str) -> None:
    run = config(changes)
    assert check(run, None) == []
    (note,) = moe_notes(run)
    assert note.startswith(said)
    assert "\n" not in note


def test_no_notes() -> None:
    balanced = {"model.moe.balance_coefficient": 1e-2}
    for changes in (
        balanced,
        {"model.moe": None},
        {**moe(router="switch", top_k=1), **balanced},
        {**moe(top_k=1, renormalize=False), **balanced},
    ):
        assert moe_notes(config(changes)) == []
    (note,) = moe_notes(config({**moe(capacity_factor=None), **balanced}))
    assert "4 x what top_k=2 fills" in note


def test_names_of_other_trainers_exist_here() -> None:
    paths = {path for path, _ in all_fields(RunConfig)}
    assert set(ALIASES.values()) <= paths


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.num_local_experts", "model.moe.num_experts"),
        ("model.n_routed_experts", "model.moe.num_experts"),
        ("model.moe.moe_router_topk", "model.moe.top_k"),
        ("model.num_experts_per_tok", "model.moe.top_k"),
        ("moe_aux_loss_coeff", "model.moe.balance_coefficient"),
        ("model.moe.moe_z_loss_coeff", "model.moe.router_z_coefficient"),
        ("model.n_shared_experts", "model.moe.shared_experts"),
        ("model.first_k_dense_replace", "model.moe.leading_dense"),
        ("model.moe_intermediate_size", "model.moe.expert_dim"),
        ("model.moe_ffn_hidden_size", "model.moe.expert_dim"),
        ("expert_model_parallel_size", "mesh.expert"),
        ("model.moe.moe_expert_capacity_factor", "model.moe.capacity_factor"),
        ("model.n_group", "model.moe.num_groups"),
        ("model.topk_group", "model.moe.top_groups"),
        ("model.routed_scaling_factor", "model.moe.routed_scaling"),
        ("moe_token_dispatcher_type", "model.moe.dispatch"),
        ("model.moe.capacity_facter", "model.moe.capacity_factor"),
    ],
)
def test_names_of_other_trainers(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(tree({key: 4}))
    assert error.value.problems == [f"{key}: unknown key; did you mean {meant}?"]


def test_a_name_whose_number_means_something_else() -> None:
    with pytest.raises(ConfigError) as error:
        validate(tree({"model.router_aux_loss_coef": 0.02}))
    (problem,) = error.value.problems
    assert problem.startswith("model.router_aux_loss_coef: unknown key; did you mean model.moe.balance_coefficient? (of it x")


def test_a_name_in_the_wrong_section() -> None:
    with pytest.raises(ConfigError) as error:
        validate(tree({"model.top_k": 2}))
    assert error.value.problems == ["model.top_k: unknown key; top_k belongs at model.moe.top_k"]


def test_a_section_without_its_number_of_experts() -> None:
    broken = tree()
    broken["model"]["moe"] = {"top_k": 2}
    with pytest.raises(ConfigError) as error:
        validate(broken)
    assert error.value.problems == ["model.moe.num_experts: required, not given; try 8"]

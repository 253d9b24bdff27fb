"""What the user can get wrong about latent attention: one line, its ways out tried here; what is legal."""

from typing import Any

import pytest

from jaxpar.config.checks import check, layout_of
from jaxpar.config.errors import ConfigError
from jaxpar.config.layout import plan_leaf
from jaxpar.config.load import validate
from jaxpar.config.parameters import parameter_table
from jaxpar.config.run import RunConfig
from tests.config.dotted import nested

Changes = dict[str, Any]

BASE: Changes = {
    "model": {"num_layers": 4, "embed_dim": 64, "num_heads": 8, "mlp_dim": 128, "vocab_size": 264},
    "model.mla": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "data": {"source": "stdlib", "seq_len": 64, "global_batch_size": 16},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 10},
}


def tree(*changes: Changes) -> dict[str, Any]:
    """A legal tree with latent attention, with dotted changes."""
    return nested(BASE, *changes)


def config(*changes: Changes) -> RunConfig:
    return RunConfig.model_validate(tree(*changes))


# (changes, the line's beginning, ways out that the line offers, each of which must end the complaint)
CASES: dict[str, tuple[Changes, str, list[tuple[str, Changes]]]] = {
    "shared heads of keys": (
        {"model.num_kv_heads": 2},
        "model.num_kv_heads: 2 has no effect with model.mla, whose heads all have keys and values of their own; ",
        [("set model.num_kv_heads=null", {"model.num_kv_heads": None})],
    ),
    "shared heads that do not divide": (
        {"model.num_kv_heads": 3, "mesh.tensor": 2},
        "model.num_kv_heads: 3 has no effect with model.mla",
        [("set model.num_kv_heads=null", {"model.num_kv_heads": None})],
    ),
    "one width of heads": (
        {"model.head_dim": 7},
        "model.head_dim: 7 has no effect with model.mla, which has qk_nope_head_dim, qk_rope_head_dim and v_head_dim; ",
        [("set model.head_dim=null", {"model.head_dim": None})],
    ),
    "norms of heads": (
        {"model.qk_norm": True},
        "model.qk_norm: true has no effect with model.mla, which has norms on its latents; ",
        [("set model.qk_norm=false", {"model.qk_norm": False})],
    ),
    "biases": (
        {"model.bias": True},
        "model.bias: true, but the maps of model.mla have none; ",
        [("model.bias=false would work", {"model.bias": False}), ("or model.mla=null", {"model.mla": None})],
    ),
    "learned positions": (
        {"model.positions": "learned", "model.max_positions": 64},
        "model.positions: learned, but model.mla has a rotary part in every head; ",
        [("model.positions=rope would work", {"model.positions": "rope"}), ("or model.mla=null", {"model.mla": None})],
    ),
    "an odd rotary part": (
        {"model.mla.qk_rope_head_dim": 5},
        "model.mla.qk_rope_head_dim: 5 is odd, but rotary angles turn pairs; ",
        [("4 or 6 would work", {"model.mla.qk_rope_head_dim": 4}), ("", {"model.mla.qk_rope_head_dim": 6})],
    ),
    "a rotary part of one": (
        {"model.mla.qk_rope_head_dim": 1},
        "model.mla.qk_rope_head_dim: 1 is odd, but rotary angles turn pairs; 2 would work",
        [("", {"model.mla.qk_rope_head_dim": 2})],
    ),
    "values wider than keys": (
        {"model.mla.v_head_dim": 13},
        "model.mla.v_head_dim: 13 is more than qk_nope_head_dim + qk_rope_head_dim = 12, and attention takes values as wide as keys at "
        "most; ",
        [("at most 12 would work", {"model.mla.v_head_dim": 12})],
    ),
    "a split latent": (
        {"rules.latent": "tensor"},
        "rules.latent: latent cannot be split over tensor; write null",
        [("", {"rules.latent": None})],
    ),
    "heads that do not divide": (
        {"mesh.tensor": 3, "sequence_parallel": False, "rules.mlp": None},
        "model.num_heads: 8 does not divide over mesh.tensor=3; model.num_heads=6 or 9 would",
        [("", {"model.num_heads": 6}), ("", {"model.num_heads": 9})],
    ),
    "heads for ulysses": (
        {"mesh.tensor": 2, "mesh.context": 8, "context.method": "ulysses"},
        "mesh.context: 8 does not divide the 4 heads of a tensor rank, which context.method=ulysses needs; "
        "mesh.context may be 1, 2, 4, or context.method=ring",
        [("", {"mesh.context": 4}), ("", {"context.method": "ring"})],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_whose_ways_out_work(case: str) -> None:
    changes, said, ways_out = CASES[case]
    (found,) = check(config(changes), None)
    assert found.startswith(said), found
    for words, fix in ways_out:
        assert words in found
        assert check(config(changes, fix), None) == []


LEGAL: list[Changes] = [
    {},
    {"model.mla.q_lora_rank": None},
    {"model.mla.v_head_dim": 12},
    {"model.mla.v_head_dim": 1},
    {"model.embed_dim": 68, "model.num_heads": 16},  # no width of heads comes from it
    {"model.rope_scaling": {}},
    {"model.sliding_window": 16, "model.attention_softcap": 30.0},
    {"model.attention_dropout": 0.1, "attention": "reference"},
    {"mesh.tensor": 8, "mesh.data": 2, "zero_stage": 3},
    {"mesh.tensor": 2, "rules.kv_heads": None},  # there are none of their own
    {"mesh.tensor": 2, "rules": {"heads": None, "kv_heads": None}, "sequence_parallel": False},
    {"mesh.tensor": 2, "mesh.context": 4, "context.method": "ulysses"},
    {"mesh.pipe": 2, "num_microbatches": 4, "pipeline.schedule": "zb_h1", "model.moe": {"num_experts": 4}},
    {"remat": {"policy": "selective", "save": ["latent"]}},
    {"rules.latent": None},
]


@pytest.mark.parametrize("changes", LEGAL)
def test_legal(changes: Changes) -> None:
    run = config(changes)
    assert check(run, None) == []
    layout = layout_of(run, None)
    for leaf in parameter_table(run.model):
        plan = plan_leaf(layout, leaf.path, leaf.names, layout.stored_shape(leaf.names, leaf.shape))
        if "latent" in leaf.names:
            assert plan.axes[leaf.names.index("latent")] == ()


def test_what_zero_shards() -> None:
    run = config({"mesh.data": 4, "mesh.tensor": 2, "zero_stage": 3})
    layout = layout_of(run, 8)
    plans = {leaf.path: plan_leaf(layout, leaf.path, leaf.names, leaf.shape) for leaf in parameter_table(run.model)}
    specs = {path.removeprefix("blocks.attention."): plan.spec(sharded=True)[1:] for path, plan in plans.items() if ".attention." in path}
    assert specs == {
        "q_down.kernel": (("data",), ()),
        "q_norm.scale": ((),),
        "q_up.kernel": (("data",), ("tensor",), ()),
        "kv_down.kernel": (("data",), ()),
        "kv_norm.scale": ((),),
        "kv_up.kernel": (("data",), ("tensor",), ()),
        "out.kernel": (("tensor",), ("data",), ()),
    }


def problems(changes: Changes) -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate(tree(changes))
    return error.value.problems


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.kv_lora_rank", "kv_lora_rank belongs at model.mla.kv_lora_rank"),
        ("model.qk_rope_head_dim", "qk_rope_head_dim belongs at model.mla.qk_rope_head_dim"),
        ("model.qk_pos_emb_head_dim", "did you mean model.mla.qk_rope_head_dim?"),
        ("model.qk_head_dim", "did you mean model.mla.qk_nope_head_dim?"),
        ("multi_latent_attention", "did you mean model.mla?"),
        ("model.mla.kv_lora", "did you mean model.mla.kv_lora_rank?"),
    ],
)
def test_names_of_other_trainers(key: str, said: str) -> None:
    assert problems({key: 4}) == [f"{key}: unknown key; {said}"]


def test_widths_are_required() -> None:
    assert problems({"model.mla": {"q_lora_rank": 4}}) == [
        "model.mla.kv_lora_rank: required, not given; try 512",
        "model.mla.qk_nope_head_dim: required, not given; try 128",
        "model.mla.qk_rope_head_dim: required, not given; try 64",
        "model.mla.v_head_dim: required, not given; try 128",
    ]
    assert problems({"model.mla.kv_lora_rank": 0}) == ["model.mla.kv_lora_rank: 0 is not allowed; must be greater than 0; try 1"]

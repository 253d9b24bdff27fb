"""The table of parameters and counts against the model's own tree, hand arithmetic and published numbers."""

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.config.load import read
from jaxpar.config.model import ModelConfig
from jaxpar.config.parameters import active_parameter_count, parameter_count, parameter_table
from jaxpar.models.init import is_spec
from jaxpar.models.transformer import Transformer

MET_03: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "mlp_dim": 128,
    "vocab_size": 256,
}


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


EXPERTS: list[dict[str, Any]] = [
    {},
    {"expert_dim": 48, "router": "sigmoid_bias", "shared_experts": 3, "shared_gate": True},
    {"residual": True, "leading_dense": 2, "balance_coefficient": 1e-2, "balance_scope": "global"},
    {"every": 3, "leading_dense": 1, "residual": True, "shared_experts": 1},
]


LATENT: dict[str, Any] = {
    "num_kv_heads": None,
    "head_dim": None,
    "mla": {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
}
STRAIGHT: dict[str, Any] = LATENT | {"mla": LATENT["mla"] | {"q_lora_rank": None}}


@pytest.mark.parametrize(
    "change",
    [
        *({}, LAYER_NORM | {"tied_embeddings": True}, {"qk_norm": True, "vocab_multiple": 100}, {"bias": True}),
        *({"num_layers": 7, "moe": {"num_experts": 4, **moe}} for moe in EXPERTS),
        *(LATENT, STRAIGHT | {"norm": "layernorm"}, LATENT | {"num_layers": 7, "moe": {"num_experts": 4, **EXPERTS[3]}}),
        *(LAYER_NORM | {"num_layers": 7, "moe": {"num_experts": 4, **moe}} for moe in EXPERTS),
    ],
)
def test_table_equals_the_tree_of_the_model(change):
    config = ModelConfig(**MET_03 | change)
    specs = jax.tree_util.tree_leaves_with_path(Transformer(config).params, is_leaf=is_spec)
    tree = {jax.tree_util.keystr(path, simple=True, separator="."): (spec.names, spec.shape) for path, spec in specs}
    blocks = config.num_blocks
    per_layer = {
        path: (("layers", *names), (blocks, *shape)) if path.startswith("blocks.") else (names, shape)
        for path, (names, shape) in tree.items()
    }
    assert {leaf.path: (leaf.names, leaf.shape) for leaf in parameter_table(config)} == per_layer


def with_experts(num_layers: int = 2, **moe: Any) -> ModelConfig:
    """The golden case with experts, two a token if nothing is said."""
    return ModelConfig.model_validate(MET_03 | {"num_layers": num_layers, "moe": moe})


def test_tables_of_experts_by_hand():
    moe = {"num_experts": 4, "top_k": 2, "expert_dim": 48, "every": 2, "leading_dense": 1, "shared_experts": 2, "router": "sigmoid_bias"}
    model = with_experts(7, **moe)
    table = {leaf.path: (leaf.names, leaf.shape) for leaf in parameter_table(model)}
    assert table["embed.layers.0.mlp.gate.kernel"] == (("embed", "mlp"), (64, 128))
    assert table["blocks.layers.0.mlp.gate.kernel"] == (("layers", "embed", "mlp"), (3, 64, 128))
    assert table["blocks.layers.1.moe.router.kernel"] == (("layers", "embed", "router"), (3, 64, 4))
    assert table["blocks.layers.1.moe.router.bias"] == (("layers", "router"), (3, 4))
    assert table["blocks.layers.1.moe.experts.down.kernel"] == (("layers", "experts", "mlp", "embed"), (3, 4, 48, 64))
    assert table["blocks.layers.1.moe.shared.up.kernel"] == (("layers", "embed", "mlp"), (3, 64, 96))
    assert not any("layers.2" in path or "layers.1.mlp." in path for path in table)
    attention, norms = 2 * 4096 + 2 * 2048, 2 * 64
    dense, beside = 3 * 64 * 128, 64 * 4 + 4 + 3 * 64 * 96
    ends = 2 * 256 * 64 + 64
    assert parameter_count(model) == ends + 7 * (attention + norms) + 4 * dense + 3 * (beside + 4 * 3 * 64 * 48)
    assert active_parameter_count(model) == ends + 7 * (attention + norms) + 4 * dense + 3 * (beside + 2 * 3 * 64 * 48)


def test_table_of_latent_attention_by_hand():
    model = ModelConfig(**MET_03 | LATENT)
    table = {leaf.path.removeprefix("blocks.attention."): leaf for leaf in parameter_table(model) if ".attention." in leaf.path}
    assert {name: (leaf.names[1:], leaf.shape) for name, leaf in table.items()} == {
        "q_down.kernel": (("embed", "latent"), (2, 64, 24)),
        "q_norm.scale": (("latent",), (2, 24)),
        "q_up.kernel": (("latent", "heads", "head_dim"), (2, 24, 4, 20)),
        "kv_down.kernel": (("embed", "latent"), (2, 64, 28)),
        "kv_norm.scale": (("latent",), (2, 20)),
        "kv_up.kernel": (("latent", "heads", "head_dim"), (2, 20, 4, 22)),
        "out.kernel": (("heads", "head_dim", "embed"), (2, 4, 10, 64)),
    }
    queries, others = 64 * 24 + 24 + 24 * 80, 64 * 28 + 20 + 20 * 88 + 40 * 64
    beside = 2 * 256 * 64 + 64 + 2 * (2 * 64 + 3 * 64 * 128)
    assert parameter_count(model) == beside + 2 * (queries + others)
    assert parameter_count(ModelConfig(**MET_03 | STRAIGHT)) == beside + 2 * (64 * 80 + others)


def test_what_the_last_step_counted_is_stored_and_not_published():
    plain = with_experts(num_experts=4, balance_coefficient=1e-2)
    kept = with_experts(num_experts=4, balance_coefficient=1e-2, balance_scope="global")
    assert parameter_count(kept) == parameter_count(plain)
    assert sum(leaf.size for leaf in parameter_table(kept)) == sum(leaf.size for leaf in parameter_table(plain)) + 2 * 4


def test_a_dense_model_is_all_active():
    model = ModelConfig(**MET_03)
    assert active_parameter_count(model) == parameter_count(model)


# Published counts of `configs/model`: the dense ones are in tests/test_configs.py.


def published(name: str) -> ModelConfig:
    folder = Path(__file__).parents[2] / "configs" / "model"
    return ModelConfig.model_validate(read(folder / f"{name}.yaml")["model"])


def latent_attention(embed: int, heads: int, queries: int | None) -> int:
    """Parameters with the widths that DeepSeek's models share: 512 + 64 latent, 128 + 64 and 128 a head; by hand."""
    q = embed * heads * 192 if queries is None else embed * queries + queries + queries * heads * 192
    return q + embed * (512 + 64) + 512 + 512 * heads * (128 + 128) + heads * 128 * embed


def test_deepseek_v3_by_hand_and_as_published():
    """Hugging Face counts 671,026,404,352 and has the routers' biases as buffers beside them; the report prints 671B and 37B."""
    model = published("deepseek_v3")
    attention, norms, expert = latent_attention(7168, 128, 1536), 2 * 7168, 3 * 7168 * 2048
    assert (attention, expert) == (187_107_328, 44_040_192)
    ends = 2 * 129_280 * 7168 + 7168
    dense, others = 3 * 3 * 7168 * 18_432, 58 * (7168 * 256 + expert)
    without_bias = ends + 61 * (attention + norms) + dense + others + 58 * 256 * expert
    assert without_bias == 671_026_404_352
    assert parameter_count(model) == without_bias + 58 * 256 == 671_026_419_200
    assert active_parameter_count(model) == parameter_count(model) - 58 * 248 * expert == 37_552_297_472


def deepseek_v2(*, lite: bool) -> ModelConfig:
    """Released config.json of DeepSeek-V2-Lite, whose queries have no latent, and of DeepSeek-V2."""
    sizes, experts = ((27, 2048, 16, 10_944), (64, 1408, 6)) if lite else ((60, 5120, 128, 12_288), (160, 1536, 6))
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    moe = dict(zip(("num_experts", "expert_dim", "top_k"), experts, strict=True)) | {"leading_dense": 1, "shared_experts": 2}
    fields = dict(zip(("num_layers", "embed_dim", "num_heads", "mlp_dim"), sizes, strict=True))
    mla = widths | {"q_lora_rank": None if lite else 1536}
    return ModelConfig.model_validate({**fields, "vocab_size": 102_400, "mla": mla, "moe": moe})


# Hugging Face parameter counts; active ones with embeddings, as everywhere here (the paper prints 2.4 billion and 21).
@pytest.mark.parametrize(("lite", "total", "active"), [(True, 15_706_484_224, 2.66), (False, 235_741_434_880, 21.38)])
def test_deepseek_v2(lite, total, active):
    model = deepseek_v2(lite=lite)
    assert parameter_count(model) == total
    assert round(active_parameter_count(model) / 1e9, 2) == active


@pytest.mark.parametrize(
    ("name", "total", "active_billions"),
    [  # Hugging Face parameter counts of the checkpoints; active parameters as the papers and model cards print them
        ("mixtral_8x7b", 46_702_792_704, 12.9),
        ("deepseek_moe_16b", 16_375_728_128, 2.8),
        ("qwen3_moe_30b_a3b", 30_532_122_624, 3.3),
    ],
)
def test_published_counts_of_experts(name, total, active_billions):
    assert parameter_count(published(name)) == total
    assert abs(active_parameter_count(published(name)) / 1e9 - active_billions) < 0.06


def test_active_counts_by_hand():
    """All but the experts that a token does not go to."""
    for name, layers, idle, expert in [
        ("mixtral_8x7b", 32, 6, 3 * 4096 * 14336),
        ("deepseek_moe_16b", 27, 58, 3 * 2048 * 1408),
        ("qwen3_moe_30b_a3b", 48, 120, 3 * 2048 * 768),
    ]:
        model = published(name)
        assert parameter_count(model) - active_parameter_count(model) == layers * idle * expert


def test_stand_in_for_switch_base_128():
    """The encoder-decoder has, over ours: cross-attention with its norm in 12 layers, one final norm, two tables of relative positions."""
    missing = 12 * (4 * 768 * 768 + 768) + 768 + 2 * 32 * 12
    ours = parameter_count(published("switch_base_128"))
    assert ours == 32_128 * 768 + 24 * (4 * 768 * 768 + 2 * 768) + 12 * 2 * 768 * 3072 + 12 * (128 * 2 * 768 * 3072 + 768 * 128) + 768
    assert round((ours + missing) / 1e9, 1) == 7.4
    assert round(ours / 1e9, 1) == 7.4


def test_stand_in_for_gshard():
    """Table 1 prints 600B and, of the whole family, counts that are those of the experts rounded to one digit or two."""
    ours = parameter_count(published("gshard_600b"))
    experts = 18 * 2048 * 2 * 1024 * 8192
    assert ours - experts < 0.005 * experts
    assert round(ours / 1e9, -2) == 600
    assert pytest.approx(37e9, rel=0.05) == 18 * 128 * 2 * 1024 * 8192  # MoE(128E, 36L)


def test_stand_in_for_base():
    """Lewis et al. 2021: experts of 335 million parameters, 44 billion in all on 128 GPUs."""
    model = published("base_44b")
    assert model.moe is not None
    assert 2 * model.embed_dim * model.expert_dim // 10**6 == 335
    assert round(parameter_count(model) / 1e9) == 44


def test_tiny_with_experts_computes_about_as_much_as_tiny():
    ours, dense = (active_parameter_count(published(name)) for name in ("tiny_moe", "tiny"))
    assert abs(ours / dense - 1) < 0.02

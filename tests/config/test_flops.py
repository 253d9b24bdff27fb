"""FLOPs against golden numbers and hand arithmetic."""

import math
from typing import Any

import pytest

from jaxpar.config.flops import forward_flops_per_token, leading_flops_per_token, train_flops_per_token
from jaxpar.config.model import ModelConfig
from jaxpar.config.parameters import matmul_parameters, parameter_table
from tests.config.test_parameters import LATENT, MET_03, STRAIGHT, deepseek_v2, published, with_experts


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


# MET-04
def test_flops_count_the_experts_that_a_token_goes_to():
    model = with_experts(num_experts=8)
    assert matmul_parameters(model) == 140_288
    assert train_flops_per_token(model, 128) - 3 * (638_976 // 3 - 2 * 90_112) == 6 * 140_288 == 841_728
    every = sum(leaf.size for leaf in parameter_table(model) if leaf.path.endswith(".kernel"))
    assert every == 435_200
    changes: list[dict[str, Any]] = [{"capacity_factor": 4.0}, {"capacity_factor": None}, {"router": "sigmoid_bias"}, {"dispatch": "local"}]
    for change in changes:
        assert train_flops_per_token(with_experts(num_experts=8, **change), 128) == train_flops_per_token(model, 128)


def test_flops_of_latent_attention_by_hand():
    """The weighted sum is as wide as values, 10, not as keys, 20."""
    others = 64 * 28 + 20 * 4 * 22 + 4 * 10 * 64 + 3 * 64 * 128
    for change, queries in ((LATENT, 64 * 24 + 24 * 80), (STRAIGHT, 64 * 80)):
        matrices = 2 * (queries + others) + 64 * 256
        attention = 2 * 128 // 2 * 4 * (20 + 10)
        assert forward_flops_per_token(ModelConfig(**MET_03 | change), 128) == 2 * (matrices + attention)


def test_flops_of_deepseek_as_published():
    """GFLOPs a token of training at 4096 tokens, causal (Zhao et al. 2025, arXiv 2505.09343, table 2)."""
    assert round(train_flops_per_token(deepseek_v2(lite=False), 4096) / 1e9) == 155
    assert round(train_flops_per_token(published("deepseek_v3"), 4096) / 1e9) == 250


def test_flops_of_leading_layers_by_hand():
    model = with_experts(5, num_experts=4, top_k=1, leading_dense=3)
    layer = 2 * (2 * 4096 + 2 * 2048 + 3 * 64 * 128) + 4 * 64 * 128 // 2
    assert leading_flops_per_token(model, 128) == 3 * layer
    dense = ModelConfig(**{**MET_03, "num_layers": 5})
    # an expert as wide as the dense layer: only routers are on top
    assert forward_flops_per_token(model, 128) - forward_flops_per_token(dense, 128) == 2 * 2 * 64 * 4
    assert leading_flops_per_token(dense, 128) == 0

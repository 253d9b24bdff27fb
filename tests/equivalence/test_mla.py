"""Loss and every gradient leaf with latent attention equal one device's under layouts of every axis, on packed rows with uneven padding."""

from typing import Any

import pytest

from jaxpar.config.checks import check
from tests.equivalence.harness import FLOAT32, assert_float32, assert_float64, config, num_devices

LATENT: dict[str, Any] = {
    "model": {
        "mla": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
        "init_std": 0.2,
    }
}
STRAIGHT: dict[str, Any] = {"model": {"mla": {"q_lora_rank": None}}}  # queries without a latent
# DeepSeek-V3 at a small size: a dense layer first, biased sigmoid scores, groups of experts, a shared expert.
EXPERTS: dict[str, Any] = {
    "model": {
        "num_layers": 5,
        "moe": {"num_experts": 8, "router": "sigmoid_bias", "num_groups": 4, "top_groups": 2, "routed_scaling": 2.5, "expert_dim": 32}
        | {"leading_dense": 1, "shared_experts": 1, "capacity_factor": None, "balance_coefficient": 0.01, "balance_scope": "sequence"},
    }
}

LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "data2-context2-tensor2-ring-z3": ({"mesh": {"data": 2, "context": 2, "tensor": 2}, "zero_stage": 3, "num_microbatches": 2},),
    "tensor2": ({"mesh": {"tensor": 2}},),
    "tensor2-whole_sequence": ({"mesh": {"tensor": 2}, "sequence_parallel": False},),
    "tensor4-context2-ulysses": ({"mesh": {"tensor": 4, "context": 2}, "context": {"method": "ulysses"}},),
    "context2-all_gather-whole_sequence": (
        {"mesh": {"tensor": 2, "context": 2}, "context": {"method": "all_gather"}, "sequence_parallel": False},
    ),
    "heads_whole": (
        {"mesh": {"tensor": 2, "data": 2}, "sequence_parallel": False, "rules": {"heads": None, "kv_heads": None}, "zero_stage": 1},
    ),
    "pipe2-tensor2-zb_h1": (
        {"mesh": {"pipe": 2, "tensor": 2, "data": 2}, "pipeline": {"schedule": "zb_h1"}, "num_microbatches": 4, "zero_stage": 2},
    ),
    "pipe2-context2-1f1b-selective": (
        {"mesh": {"pipe": 2, "tensor": 2, "context": 2}, "num_microbatches": 3, "data": {"global_batch_size": 12}}
        | {"remat": {"policy": "selective", "save": ["latent", "attention"]}},
    ),
    "data4-z3-full": ({"mesh": {"data": 4}, "zero_stage": 3, "remat": {"policy": "full"}},),
    "straight-tensor2-context2": (STRAIGHT, {"mesh": {"tensor": 2, "context": 2, "data": 2}, "zero_stage": 3}),
    "straight-whole_sequence": (STRAIGHT, {"mesh": {"tensor": 4}, "sequence_parallel": False}),
    "straight-pipe2-zb_v": (STRAIGHT, {"mesh": {"pipe": 2, "tensor": 2}, "pipeline": {"schedule": "zb_v"}, "num_microbatches": 4}),
    "experts-expert2-tensor2-pipe2": (
        EXPERTS,
        {"mesh": {"pipe": 2, "expert": 2, "tensor": 2}, "pipeline": {"schedule": "zb_h1"}, "num_microbatches": 4, "zero_stage": 3},
    ),
}
DEFAULT = ("data2-context2-tensor2-ring-z3",)  # the others are slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in LAYOUTS])
def test_float64_gate(name: str) -> None:
    run = config(LATENT, *LAYOUTS[name])
    assert not check(run, num_devices(run))
    assert_float64(run)


@pytest.mark.slow
def test_float32_gate() -> None:
    assert_float32(config(LATENT, {"mesh": {"data": 2, "context": 2, "tensor": 2}}, FLOAT32))

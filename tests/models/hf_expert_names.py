"""Feed-forward layers of Hugging Face models, dense or with experts -> our config section `moe:` and parameter tree."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]
Tree = dict[str, Any]


def mixtral_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """An expert is as wide as the dense layer of Mistral was."""
    return _dropless(hf["num_local_experts"], hf["num_experts_per_tok"]) | {"softmax": "after"}


def qwen3_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Hugging Face counts every so many layers from the first of all, we from the first that is not leading."""
    leading, every = len(hf.get("mlp_only_layers", ())), hf.get("decoder_sparse_step", 1)
    assert list(hf.get("mlp_only_layers", ())) == list(range(leading))
    assert leading % every == 0
    return _dropless(hf["num_experts"], hf["num_experts_per_tok"]) | {
        "expert_dim": hf["moe_intermediate_size"],
        "softmax": "before",
        "renormalize": hf["norm_topk_prob"],
        "leading_dense": leading,
        "every": every,
    }


def deepseek_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Its layer with experts."""
    return _dropless(hf["n_routed_experts"], hf["num_experts_per_tok"]) | {
        "router": "sigmoid_bias",
        "expert_dim": hf["moe_intermediate_size"],
        "shared_experts": hf["n_shared_experts"],
        "num_groups": hf["n_group"],
        "top_groups": hf["topk_group"],
        "group_score": "top2_sum",
        "renormalize": hf["norm_topk_prob"],
        "routed_scaling": hf["routed_scaling_factor"],
    }


def _dropless(num_experts: int, top_k: int) -> dict[str, Any]:
    return {"num_experts": num_experts, "top_k": top_k, "capacity_factor": None, "leading_dense": 0, "every": 1}


def moe(weights: Weights) -> Tree:
    """Router [experts, in] and, where there are any, its bias and shared experts; experts [experts, out, in], gate and up in one."""
    gate, up = np.split(weights["experts.gate_up_proj"], 2, axis=1)
    matrices = {"gate": gate, "up": up, "down": weights["experts.down_proj"]}
    out: Tree = {
        "router": {"kernel": weights["gate.weight"].T},
        "experts": {name: {"kernel": matrix.swapaxes(1, 2)} for name, matrix in matrices.items()},
    }
    if "gate.e_score_correction_bias" in weights:
        out["router"]["bias"] = weights["gate.e_score_correction_bias"]
    if "shared_experts.down_proj.weight" in weights:
        out["shared"] = mlp(weights, "shared_experts.")
    return out


def mlp(weights: Weights, prefix: str = "") -> Tree:
    return {name: {"kernel": weights[f"{prefix}{name}_proj.weight"].T} for name in ("gate", "up", "down")}

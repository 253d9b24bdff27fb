"""Golden cases with experts. DeepSeek-V3's layer stands alone: its attention is another matter."""

from typing import Any

import transformers
from hf_case import Case
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}
QWEN3 = SMALL | {"attention_bias": False, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "intermediate_size": 20}

CASES = {
    "mixtral": Case(
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        SMALL | {"num_hidden_layers": 2, "intermediate_size": 12, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": Case(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        QWEN3 | {"num_hidden_layers": 2, "head_dim": 12, "norm_topk_prob": True},
    ),
    # Dense, dense, then twice dense and experts; gates that do not sum to 1.
    "qwen3_moe_mixed": Case(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        QWEN3
        | {"num_hidden_layers": 6, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1], "tie_word_embeddings": True},
    ),
    "deepseek_v3_layer": Case(
        transformers.DeepseekV3Config,
        DeepseekV3MoE,
        {
            "hidden_size": 32,
            "moe_intermediate_size": 12,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
        layer=True,
    ),
}

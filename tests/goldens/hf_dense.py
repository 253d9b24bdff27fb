"""Golden cases of models whose layers are all dense."""

from typing import Any

import transformers
from hf_case import Case

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_bias": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Of the 8 wavelengths 6 .. 20000 of a head of 16, one is below 64 / 4 (kept), two are between (blended), five above 64 (divided).
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    "llama": Case(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        SMALL | {"rope_parameters": ROPE, "tie_word_embeddings": False},
    ),
    "llama_scaled": Case(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        SMALL | {"rope_parameters": ROPE_LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        positions=128,
    ),
    "gpt2": Case(
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {
            "vocab_size": 64,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 48,
            "n_inner": 96,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "qwen3": Case(
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        SMALL | {"head_dim": 24, "rope_parameters": ROPE | {"rope_theta": 500.0}, "tie_word_embeddings": False},
    ),
    "mistral": Case(
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        SMALL | {"sliding_window": 6, "rope_parameters": ROPE, "tie_word_embeddings": False},
    ),
}

"""Hugging Face configs and parameter names -> our config section and parameter tree, for comparing the two."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tests.models import hf_expert_names

Weights = Mapping[str, np.ndarray]
Tree = dict[str, Any]


def model_config(kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `model:` for a Hugging Face config; what it leaves out has the default of its class."""
    return _gpt2_config(hf) if kind == "gpt2" else _llama_config(kind, hf)


def parameters(kind: str, config: Mapping[str, Any], weights: Weights) -> Tree:
    """Our parameter tree, float32, layers stacked in front. config: what `model_config` gave."""
    return _gpt2_parameters(config, weights) if kind == "gpt2" else _llama_parameters(config, weights)


def _llama_config(kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Llama and its descendants Mistral (a window), Qwen3 (norms on queries and keys), Mixtral and Qwen3-MoE (experts)."""
    rope = hf["rope_parameters"]
    out = {
        "num_layers": hf["num_hidden_layers"],
        "embed_dim": hf["hidden_size"],
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf["num_key_value_heads"],
        "head_dim": hf.get("head_dim"),
        "mlp_dim": hf["intermediate_size"],
        "vocab_size": hf["vocab_size"],
        "norm": "rmsnorm",
        "norm_eps": hf.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        "activation": "swiglu",
        "positions": "rope",
        "rope_theta": rope["rope_theta"],
        "qk_norm": kind.startswith("qwen3"),
        "tied_embeddings": hf["tie_word_embeddings"],
        "sliding_window": hf.get("sliding_window"),
    }
    if rope["rope_type"] == "llama3":
        scaling = {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        out["rope_scaling"] = scaling | {"original_max_seq_len": rope["original_max_position_embeddings"]}
    if kind == "mixtral":
        out["moe"] = hf_expert_names.mixtral_config(hf)
    if kind.startswith("qwen3_moe"):
        out["moe"] = hf_expert_names.qwen3_config(hf)
    return out


def _llama_parameters(config: Mapping[str, Any], weights: Weights) -> Tree:
    c, moe = config, config.get("moe")
    first, every = (moe["leading_dense"], moe["every"]) if moe else (0, 1)
    layers = [_llama_layer(c, weights, i) for i in range(c["num_layers"])]
    blocks = [_stacked(layers[first + i :: every]) for i in range(every)]
    embed: Tree = {"tokens": {"table": weights["model.embed_tokens.weight"]}}
    if first:
        embed["layers"] = {str(i): layers[i] for i in range(first)}
    head = {"norm": {"scale": weights["model.norm.weight"]}}
    return {
        "embed": embed,
        "blocks": blocks[0] if every == 1 else {"layers": {str(i): block for i, block in enumerate(blocks)}},
        "head": head if c["tied_embeddings"] else head | {"out": {"kernel": weights["lm_head.weight"].T}},
    }


def _llama_layer(config: Mapping[str, Any], weights: Weights, index: int) -> Tree:
    """Linear stores [out, in]; a head's part of `out` is contiguous."""
    c, prefix = config, f"model.layers.{index}."
    own = {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}
    head_dim = c["head_dim"] or c["embed_dim"] // c["num_heads"]

    def scale(name: str) -> Tree:
        return {"scale": own[f"{name}.weight"]}

    def heads(name: str, num: int) -> Tree:
        return {"kernel": own[f"{name}.weight"].T.reshape(c["embed_dim"], num, head_dim)}

    attention = {
        "query": heads("self_attn.q_proj", c["num_heads"]),
        "key": heads("self_attn.k_proj", c["num_kv_heads"]),
        "value": heads("self_attn.v_proj", c["num_kv_heads"]),
        "out": {"kernel": own["self_attn.o_proj.weight"].T.reshape(c["num_heads"], head_dim, c["embed_dim"])},
    }
    if c["qk_norm"]:
        attention |= {"query_norm": scale("self_attn.q_norm"), "key_norm": scale("self_attn.k_norm")}
    layer = {"attention_norm": scale("input_layernorm"), "attention": attention, "mlp_norm": scale("post_attention_layernorm")}
    inside = {name.removeprefix("mlp."): values for name, values in own.items() if name.startswith("mlp.")}
    has_experts = "experts.down_proj" in inside
    return layer | ({"moe": hf_expert_names.moe(inside)} if has_experts else {"mlp": hf_expert_names.mlp(inside)})


def _stacked(layers: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def _gpt2_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": hf["n_layer"],
        "embed_dim": hf["n_embd"],
        "num_heads": hf["n_head"],
        "mlp_dim": hf["n_inner"],
        "vocab_size": hf["vocab_size"],
        "norm": "layernorm",
        "norm_eps": hf.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "positions": "learned",
        "max_positions": hf["n_positions"],
        "bias": True,
        "tied_embeddings": hf["tie_word_embeddings"],
    }


def _gpt2_parameters(config: Mapping[str, Any], weights: Weights) -> Tree:
    """Conv1D stores [in, out]; c_attn holds query, key and value side by side."""
    c = config
    num_layers, embed, num_heads = c["num_layers"], c["embed_dim"], c["num_heads"]

    def layers(name: str) -> np.ndarray:
        return np.stack([weights[f"transformer.h.{i}.{name}"] for i in range(num_layers)])

    def norm(name: str) -> Tree:
        return {"scale": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    def linear(name: str) -> Tree:
        return {"kernel": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    kernels, biases = np.split(layers("attn.c_attn.weight"), 3, axis=2), np.split(layers("attn.c_attn.bias"), 3, axis=1)
    attention: Tree = {
        name: {"kernel": kernel.reshape(num_layers, embed, num_heads, -1), "bias": bias.reshape(num_layers, num_heads, -1)}
        for name, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True)
    }
    out = linear("attn.c_proj")
    attention["out"] = {"kernel": out["kernel"].reshape(num_layers, num_heads, -1, embed), "bias": out["bias"]}
    return {
        "embed": {"tokens": {"table": weights["transformer.wte.weight"]}, "positions": {"table": weights["transformer.wpe.weight"]}},
        "blocks": {
            "attention_norm": norm("ln_1"),
            "attention": attention,
            "mlp_norm": norm("ln_2"),
            "mlp": {"up": linear("mlp.c_fc"), "down": linear("mlp.c_proj")},
        },
        "head": {"norm": {"scale": weights["transformer.ln_f.weight"], "bias": weights["transformer.ln_f.bias"]}},
    }

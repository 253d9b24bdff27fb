"""Makes the golden files beside it from Hugging Face `transformers`: an implementation of the same models that is not ours.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers
    hf/bin/python tests/goldens/make_hf_goldens.py            # writes hf_*.npz
    hf/bin/python tests/goldens/make_hf_goldens.py --check    # recomputes and compares with the files; exit 3 where they differ

A file holds `config` (JSON: the arguments of the Hugging Face config), `weights/<name>` (every parameter under its Hugging
Face name, float32), `tokens` [rows, positions] and `logits` [rows, positions, vocabulary] computed in float64.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import modeling_rope_utils
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

HERE = Path(__file__).parent
MODULES = (modeling_rope_utils, modeling_gpt2, modeling_llama, modeling_mistral, modeling_qwen3)
FLOAT64_AGREES = 1e-11  # of logits of order 1: the same sums on another machine
FLOAT32_AGREES = 1e-5  # the unchanged float32 model against the widened one

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

# file -> (config class, model class, config, rows, positions)
CASES: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL | {"rope_parameters": ROPE, "tie_word_embeddings": False}, 2, 32),
    "llama_scaled": (
        "LlamaConfig",
        "LlamaForCausalLM",
        SMALL | {"rope_parameters": ROPE_LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        2,
        128,
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
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
        2,
        32,
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        SMALL | {"head_dim": 24, "rope_parameters": ROPE | {"rope_theta": 500.0}, "tie_word_embeddings": False},
        2,
        32,
    ),
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        SMALL | {"sliding_window": 6, "rope_parameters": ROPE, "tie_word_embeddings": False},
        2,
        32,
    ),
}


class Wide:
    """`torch` as one module sees it, with float64 wherever it says float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """The models cast norms, softmax and rotary angles to float32 whatever their own dtype: here those casts are to float64."""
    narrow = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    for module in MODULES:
        module.torch = Wide()
    try:
        yield
    finally:
        torch.Tensor.float = narrow
        for module in MODULES:
            module.torch = torch


def weights_of(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Random values for every parameter (a tied one once): no scale is one and no bias zero, so that none can be left out unseen."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, parameter in model.named_parameters():
        values = rng.standard_normal(tuple(parameter.shape))
        std = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        mean = 1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0
        values = mean + std * values
        # Values that float16 holds: half of each float32 is zeros, and the file is half the size.
        out[name] = values.astype(np.float16).astype(np.float32)
    return out


def logits_of(
    case: str, weights: dict[str, np.ndarray] | None, tokens: np.ndarray, dtype: torch.dtype, seed: int
) -> tuple[dict, np.ndarray]:
    """(weights, logits) of one case in `dtype`; weights None: make them."""
    config_class, model_class, config, _, _ = CASES[case]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config, attn_implementation="eager"))
    weights = weights_of(model, seed) if weights is None else weights
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
        return weights, model(torch.from_numpy(tokens), use_cache=False).logits.numpy()


def make(case: str, seed: int) -> dict[str, np.ndarray]:
    """Arrays of one golden file."""
    _, _, config, rows, positions = CASES[case]
    tokens = np.random.default_rng(seed + 1000).integers(0, config["vocab_size"], (rows, positions))
    with widened():
        weights, logits = logits_of(case, None, tokens, torch.float64, seed)
    _, plain = logits_of(case, weights, tokens, torch.float32, seed)
    gap = float(np.abs(plain - logits).max())
    if gap > FLOAT32_AGREES:
        raise SystemExit(f"{case}: the float32 model and its widened form differ by {gap:.3g}: the widening changes more than rounding")
    print(f"{case}: logits of std {logits.std():.2f}; the float32 model is within {gap:.1e}")
    named = {f"weights/{name}": values for name, values in weights.items()}
    return {"config": np.array(json.dumps(config)), "tokens": tokens.astype(np.int32), "logits": logits, **named}


def differences(case: str, arrays: dict[str, np.ndarray]) -> list[str]:
    """What the committed file holds otherwise than `arrays`."""
    with np.load(HERE / f"hf_{case}.npz") as file:
        found = dict(file)
    if found.keys() != arrays.keys():
        return [f"{case}: arrays {sorted(found.keys() ^ arrays.keys())} are only on one side"]
    lines = [f"{case}: {name} differs" for name in arrays if name != "logits" and not np.array_equal(found[name], arrays[name])]
    gap = float(np.abs(found["logits"] - arrays["logits"]).max())
    return lines + ([f"{case}: logits differ by {gap:.3g}, more than {FLOAT64_AGREES}"] if gap > FLOAT64_AGREES else [])


def main() -> None:
    parser = argparse.ArgumentParser(description="Golden logits from Hugging Face transformers")
    parser.add_argument("--check", action="store_true", help="recompute and compare with the files; exit 3 where they differ")
    check = parser.parse_args().check
    wrong: list[str] = []
    for seed, case in enumerate(CASES):
        arrays = make(case, seed)
        if check:
            wrong += differences(case, arrays)
        else:
            np.savez_compressed(HERE / f"hf_{case}.npz", allow_pickle=False, **arrays)
    print(*wrong, sep="\n", end="")
    if check and not wrong:
        print(f"{len(CASES)} files equal transformers {transformers.__version__} on torch {torch.__version__}")
    sys.exit(3 if wrong else 0)


if __name__ == "__main__":
    main()

"""FLOPs from the config alone.

FLOP convention: 2 a multiply-add, matrix products only (no embedding lookup, norms, softmax, recomputation, padded
vocabulary), of experts those that a token goes to; training is 3 x the forward pass (Kaplan et al. 2020, section 2.1; PaLM, appendix
B). Attention counts scores and weighted sum, 2 products of seq_len x head_dim a head; `causal` counts the half that a causal mask keeps.
Latent attention counts as it is trained, heads made from latents: the weighted sum is v_head_dim wide, without the zeros that fill values
up to the width of keys (DeepSeek-V3: 64 beside 128).
"""

from jaxpar.config.model import ModelConfig
from jaxpar.config.parameters import active_size, layer_leaves, matmul_parameters


def forward_flops_per_token(model: ModelConfig, seq_len: int, causal: bool = True) -> int:
    """FLOPs of the forward pass a token: 2 x active matmul parameters + layers x 2 x keys x heads x (widths of a key and a value).

    keys a token sees: seq_len (causal=False, what a kernel without a mask computes), seq_len / 2 (causal), and with a
    sliding window w < seq_len, w - w^2 / (2 seq_len): the area that the mask keeps. Rows of experts' buffers that hold no token
    (capacity_factor above 1), and tokens that are dropped, do not change the count.
    """
    return 2 * matmul_parameters(model) + _attention_flops(model, model.num_layers, seq_len, causal)


def _attention_flops(model: ModelConfig, num_layers: int, seq_len: int, causal: bool) -> int:
    window = min(model.sliding_window or seq_len, seq_len)
    twice_keys_by_seq = 2 * window * seq_len - window * window if causal else 2 * seq_len * seq_len  # a whole number
    return 2 * num_layers * model.num_heads * (model.head_size + model.value_size) * twice_keys_by_seq // (2 * seq_len)


def train_flops_per_token(model: ModelConfig, seq_len: int, causal: bool = True) -> int:
    """FLOPs of a training step a token: forward, and twice as much backward. Recomputation (remat) does not count."""
    return 3 * forward_flops_per_token(model, seq_len, causal)


def head_flops_per_token(model: ModelConfig) -> int:
    """FLOPs of the output head a token, forward."""
    return 2 * model.embed_dim * model.vocab_size


def leading_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """FLOPs of the dense layers before the first block a token, forward."""
    leaves = layer_leaves(model, experts=False)
    one = sum(active_size(model, leaf) for leaf in leaves if leaf.path.endswith(".kernel"))
    return model.leading_dense * 2 * one + _attention_flops(model, model.leading_dense, seq_len, True)

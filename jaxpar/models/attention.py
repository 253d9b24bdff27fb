"""Self-attention with grouped key-value heads; the attention function itself comes from the context."""

from functools import partial

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context
from jaxpar.models.layers import Linear, Norm
from jaxpar.ops.rope import rotate


class Attention(nnx.Module):
    """Multi-head attention (arXiv 1706.03762) with shared key-value heads (GQA, arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig) -> None:
        c = config
        embed, std = {"embed": c.embed_dim}, c.init_std
        heads, kv_heads = {"heads": c.num_heads, "head_dim": c.head_size}, {"kv_heads": c.kv_heads, "head_dim": c.head_size}
        self.query = Linear(embed, heads, std=std, bias=c.bias)
        self.key = Linear(embed, kv_heads, std=std, bias=c.bias)
        self.value = Linear(embed, kv_heads, std=std, bias=c.bias)
        # Residual branches start smaller by sqrt(2 L), so that depth does not grow the stream (GPT-2 report, section 2.3).
        self.out = Linear(heads, embed, std=std / (2 * c.num_layers) ** 0.5, bias=c.bias)
        self.query_norm = Norm("rmsnorm", "head_dim", c.head_size, c.norm_eps) if c.qk_norm else None
        self.key_norm = Norm("rmsnorm", "head_dim", c.head_size, c.norm_eps) if c.qk_norm else None

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        x_bSD = ctx.enter(x_bSD, "heads")
        # Where `tensor` is a multiple of the key-value heads, a device makes the one head that its queries share.
        share = partial(ctx.select, dim="kv_heads", of="heads")
        q_bSHK, k_bSGK, v_bSGK = self.query(x_bSD), self.key(x_bSD, pick=share), self.value(x_bSD, pick=share)
        if self.query_norm is not None and self.key_norm is not None:
            q_bSHK, k_bSGK = self.query_norm(q_bSHK), self.key_norm(k_bSGK)
        if ctx.shared is not None:
            cos_bSk, sin_bSk = ctx.shared
            q_bSHK, k_bSGK = rotate(q_bSHK, cos_bSk, sin_bSk), rotate(k_bSGK, cos_bSk, sin_bSk)
        q_bSHK, k_bSGK, v_bSGK = (checkpoint_name(a, n) for a, n in zip((q_bSHK, k_bSGK, v_bSGK), ("query", "key", "value"), strict=True))
        o_bSHK = checkpoint_name(ctx.attend(q_bSHK, k_bSGK, v_bSGK), "attention")
        return self.out.add_bias(ctx.leave(self.out.product(o_bSHK), "heads"))

"""Multi-head latent attention: down to small latents at a block boundary, up to heads inside the region that `tensor` splits.

Widths: L a latent, K a head of queries and keys, of which N without position and R rotary, V a head of values.
"""

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context
from jaxpar.models.layers import Linear, Norm
from jaxpar.ops.rope import rotate


class LatentAttention(nnx.Module):
    """Latent attention of DeepSeek-V2 (arXiv 2405.04434, section 2.1) and DeepSeek-V3 (arXiv 2412.19437), as it is trained.

    Columns are in the order of DeepSeek's checkpoints (part without position before rotary part, keys before values, latent before
    rotary key), but for the rotary pairs: (i, i + K/2) as in `ops.rope`, where theirs are (2i, 2i + 1). So of a checkpoint the rotary
    columns of `q_up` and `kv_down` go even ones first, then odd ones. YaRN, for contexts longer than those of training, is left out.
    """

    def __init__(self, config: ModelConfig) -> None:
        c, mla = config, config.mla
        assert mla is not None
        self.mla = mla
        embed, std = {"embed": c.embed_dim}, c.init_std
        rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
        self.q_down = None if rank is None else Linear(embed, {"latent": rank}, std=std)
        self.q_norm = None if rank is None else Norm("rmsnorm", "latent", rank, c.norm_eps)
        queries = {"heads": c.num_heads, "head_dim": mla.qk_head_dim}
        self.q_up = Linear(embed if rank is None else {"latent": rank}, queries, std=std)
        self.kv_down = Linear(embed, {"latent": kv_rank + mla.qk_rope_head_dim}, std=std)
        self.kv_norm = Norm("rmsnorm", "latent", kv_rank, c.norm_eps)
        self.kv_up = Linear({"latent": kv_rank}, {"heads": c.num_heads, "head_dim": mla.qk_nope_head_dim + mla.v_head_dim}, std=std)
        # Residual branches start smaller, as those of plain attention.
        self.out = Linear({"heads": c.num_heads, "head_dim": mla.v_head_dim}, embed, std=std / (2 * c.num_layers) ** 0.5)

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        q_bSL, kv_bSL, k_rope_bSR = self._inside(x_bSD, ctx)
        k_nope_bSHN, v_bSHV = jnp.split(self.kv_up(kv_bSL), [self.mla.qk_nope_head_dim], axis=-1)
        q_bSHK, k_bSHK = self._with_positions(self.q_up(q_bSL), k_nope_bSHN, k_rope_bSR[:, :, None, :], ctx)
        q_bSHK, k_bSHK, v_bSHV = (checkpoint_name(a, n) for a, n in zip((q_bSHK, k_bSHK, v_bSHV), ("query", "key", "value"), strict=True))
        # Kernels and what travels over `context` (keys and values as one array) take values as wide as keys.
        padded_bSHK = jnp.pad(v_bSHV, ((0, 0), (0, 0), (0, 0), (0, self.mla.qk_head_dim - self.mla.v_head_dim)))
        o_bSHV = ctx.attend(q_bSHK, k_bSHK, padded_bSHK)[..., : self.mla.v_head_dim]
        return ctx.leave(self.out.product(checkpoint_name(o_bSHV, "attention")), "heads")

    def _inside(self, x_bSD: Array, ctx: Context) -> tuple[Array, Array, Array]:
        """What queries are made from, the latent of keys and values, the rotary key: of all tokens that this device's heads work on.

        A device makes the latents of its own tokens at the block boundary, and they enter as one array.
        """
        rank, rope = self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        kv_bSL, k_rope_bSR = jnp.split(self.kv_down(x_bSD), [rank], axis=-1)
        own = [self.kv_norm(kv_bSL), k_rope_bSR]
        if self.q_down is not None and self.q_norm is not None:
            own.append(self.q_norm(self.q_down(x_bSD)))
        entered = checkpoint_name(ctx.enter(jnp.concatenate(own, axis=-1), "heads"), "latent")
        kv_bSL, k_rope_bSR, q_bSL = jnp.split(entered, [rank, rank + rope], axis=-1)
        return ctx.enter(x_bSD, "heads") if self.q_down is None else q_bSL, kv_bSL, k_rope_bSR

    def _with_positions(self, q_bSHK: Array, k_nope_bSHN: Array, k_rope_bS1R: Array, ctx: Context) -> tuple[Array, Array]:
        """Queries and keys with their rotary parts turned."""
        cos_bSk, sin_bSk = ctx.shared
        q_nope_bSHN, q_rope_bSHR = jnp.split(q_bSHK, [self.mla.qk_nope_head_dim], axis=-1)
        k_rope_bS1R = rotate(k_rope_bS1R, cos_bSk, sin_bSk)
        k_rope_bSHR = jnp.broadcast_to(k_rope_bS1R, (*k_nope_bSHN.shape[:-1], k_rope_bS1R.shape[-1]))
        q_bSHK = jnp.concatenate([q_nope_bSHN, rotate(q_rope_bSHR, cos_bSk, sin_bSk)], axis=-1)
        return q_bSHK, jnp.concatenate([k_nope_bSHN, k_rope_bSHR], axis=-1)

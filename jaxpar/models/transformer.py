"""The decoder-only transformer: embedding, residual block, head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context
from jaxpar.core.typing import Terms
from jaxpar.models.attention import Attention
from jaxpar.models.layers import Linear, Norm, Table
from jaxpar.models.mlp import Mlp
from jaxpar.models.nnx_model import NNXModel
from jaxpar.ops import rope

SITE_EMBED, SITE_ATTENTION_OUT, SITE_MLP_OUT = 0, 2, 3  # dropout sites; 1 is attention's own, a model of yours takes any from 100
BOUNDARY = ("batch", "block_seq", "embed")


class Embedding(nnx.Module):
    """Token rows, plus rows of learned positions."""

    def __init__(self, config: ModelConfig) -> None:
        self.rate = config.dropout
        self.tokens = Table("vocab", config.padded_vocab_size, config.embed_dim, std=config.init_std, valid=config.vocab_size)
        rows = config.max_positions if config.positions == "learned" else None
        self.positions = Table("positions", rows, config.embed_dim, std=config.init_std) if rows else None

    def __call__(self, tokens_bS: Array, ctx: Context) -> Array:
        x_bSD = ctx.embed(self.tokens.table[...], tokens_bS)
        if self.positions is not None:
            x_bSD = x_bSD + self.positions.rows(ctx.at_block_boundary(ctx.positions_bS))
        return ctx.dropout(x_bSD, self.rate, SITE_EMBED, BOUNDARY)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        self.rate = config.dropout
        self.attention_norm = Norm(config.norm, "embed", config.embed_dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.norm, "embed", config.embed_dim, config.norm_eps)
        self.mlp = Mlp(config)

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        a_bSD = self.attention(self.attention_norm(x_bSD), ctx)
        x_bSD = x_bSD + ctx.dropout(a_bSD, self.rate, SITE_ATTENTION_OUT, BOUNDARY)
        m_bSD = self.mlp(self.mlp_norm(x_bSD), ctx)
        return x_bSD + ctx.dropout(m_bSD, self.rate, SITE_MLP_OUT, BOUNDARY)


class Head(nnx.Module):
    """Final norm, then logits by a map of its own or by the embedding's table."""

    def __init__(self, config: ModelConfig) -> None:
        c = config
        self.norm = Norm(c.norm, "embed", c.embed_dim, c.norm_eps)
        vocab = {"vocab": c.padded_vocab_size}
        self.out = None if c.tied_embeddings else Linear({"embed": c.embed_dim}, vocab, std=c.init_std, valid_out=(c.vocab_size,))

    def __call__(self, x_bSD: Array, targets_bS: Array, weights_bS: Array, embed: Embedding, ctx: Context) -> Terms:
        return ctx.cross_entropy(self.norm(x_bSD), self._matrix(embed), targets_bS, weights_bS)

    def logits(self, x_bSD: Array, embed: Embedding, ctx: Context) -> Array:
        return ctx.logits(self.norm(x_bSD), self._matrix(embed))

    def _matrix(self, embed: Embedding) -> Array:
        return embed.tokens.table[...].T if self.out is None else self.out.kernel[...]


class Transformer(NNXModel):
    """Llama, GPT-2 and what lies between, by config."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(embed=Embedding(config), block=Block(config), head=Head(config), num_layers=config.num_layers)
        self.config = config

    def shared(self, ctx: Context) -> tuple[Array, Array] | None:
        """Rotary cos and sin of this batch, once for all layers."""
        c = self.config
        if c.positions != "rope":
            return None
        freqs = rope.frequencies(c.head_size, c.rope_theta)
        if c.rope_scaling is not None:
            freqs = rope.scale_llama3(freqs, **c.rope_scaling.model_dump())
        return rope.angles(ctx.positions_bS, freqs, jnp.dtype(ctx.wide_dtype))

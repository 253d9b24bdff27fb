"""The decoder-only transformer: embedding, residual block, head."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.config.moe import MoeConfig
from jaxpar.core.protocols import Context, Update
from jaxpar.core.typing import Terms
from jaxpar.models.attention import Attention
from jaxpar.models.layers import Linear, Norm, Table
from jaxpar.models.mla import LatentAttention
from jaxpar.models.mlp import Mlp
from jaxpar.models.moe import Moe
from jaxpar.models.nnx_model import NNXModel
from jaxpar.models.router_terms import minimised
from jaxpar.models.router_updates import updates
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
        self.num_leading = config.leading_dense
        self.layers = nnx.Dict({str(i): Layer(config) for i in range(self.num_leading)}) if self.num_leading else None

    def __call__(self, tokens_bS: Array, ctx: Context) -> Array:
        x_bSD = ctx.embed(self.tokens.table[...], tokens_bS)
        if self.positions is not None:
            x_bSD = x_bSD + self.positions.rows(ctx.at_block_boundary(ctx.positions_bS))
        x_bSD = ctx.dropout(x_bSD, self.rate, SITE_EMBED, BOUNDARY)
        if self.layers is not None:
            for i in range(self.num_leading):  # not .items(): once rebuilt, the dict is in the order of text, "10" before "2"
                x_bSD = ctx.remat(partial(self.layers[str(i)], ctx=ctx.at(i)), x_bSD)
        return x_bSD


def make_attention(config: ModelConfig) -> Attention | LatentAttention:
    """The attention of every layer."""
    return LatentAttention(config) if config.mla else Attention(config)


class AttentionHalf(nnx.Module):
    """x + attention(norm(x)), and the norm before what follows: the part that all layers have in common."""

    def __init__(self, config: ModelConfig) -> None:
        self.rate = config.dropout
        self.attention_norm = Norm(config.norm, "embed", config.embed_dim, config.norm_eps)
        self.attention = make_attention(config)
        self.mlp_norm = Norm(config.norm, "embed", config.embed_dim, config.norm_eps)

    def attended(self, x_bSD: Array, ctx: Context) -> Array:
        a_bSD = self.attention(self.attention_norm(x_bSD), ctx)
        return x_bSD + ctx.dropout(a_bSD, self.rate, SITE_ATTENTION_OUT, BOUNDARY)


class Layer(AttentionHalf):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mlp = Mlp(config)

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        x_bSD = self.attended(x_bSD, ctx)
        m_bSD = self.mlp(self.mlp_norm(x_bSD), ctx)
        return x_bSD + ctx.dropout(m_bSD, self.rate, SITE_MLP_OUT, BOUNDARY)


class MoeLayer(AttentionHalf):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.moe = Moe(config)

    def through(self, x_bSD: Array, ctx: Context, block: Array | int) -> tuple[Array, Terms]:
        """block: which of the repeating blocks this is, for the terms."""
        x_bSD = self.attended(x_bSD, ctx)
        m_bSD, terms = self.moe(self.mlp_norm(x_bSD), ctx, block)
        return x_bSD + ctx.dropout(m_bSD, self.rate, SITE_MLP_OUT, BOUNDARY), terms


class MoeBlock(MoeLayer):
    """A block of one layer, all of which have experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.first = config.leading_dense

    def __call__(self, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        return self.through(x_bSD, ctx.at(ctx.layer + self.first), ctx.layer)


class MixedBlock(nnx.Module):
    """A block of several layers, of which the last has experts: layers of unlike kind in one repeating unit."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.moe is not None
        self.first, self.size = config.leading_dense, config.moe.every
        dense = {str(i): Layer(config) for i in range(self.size - 1)}
        self.layers = nnx.Dict({**dense, str(self.size - 1): MoeLayer(config)})

    def __call__(self, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        layer, terms = ctx.layer * self.size + self.first, {}
        for i in range(self.size):
            part = self.layers[str(i)]
            if isinstance(part, MoeLayer):
                x_bSD, terms = part.through(x_bSD, ctx.at(layer + i), ctx.layer)
            else:
                x_bSD = part(x_bSD, ctx.at(layer + i))
        return x_bSD, terms


def make_block(config: ModelConfig) -> nnx.Module:
    """What repeats."""
    if config.moe is None:
        return Layer(config)
    return MoeBlock(config) if config.moe.every == 1 else MixedBlock(config)


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


def moe_path(moe: MoeConfig) -> str:
    """Where the experts are in the tree of a block."""
    return "moe" if moe.every == 1 else f"layers.{moe.every - 1}.moe"


class Transformer(NNXModel):
    """Llama, GPT-2 and what lies between, by config."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(embed=Embedding(config), block=make_block(config), head=Head(config), num_layers=config.num_blocks)
        self.config = config

    @property
    def loss_terms(self) -> Mapping[str, float]:
        """Cross entropy, and of experts what the config gives a coefficient."""
        return {"loss": 1.0} | (minimised(self.config.moe) if self.config.moe else {})

    @property
    def updates(self) -> Mapping[str, Update]:
        moe = self.config.moe
        return {f"{moe_path(moe)}.router.{name}": update for name, update in updates(moe).items()} if moe else {}

    def shared(self, ctx: Context) -> tuple[Array, Array] | None:
        """Rotary cos and sin of this batch, once for all layers."""
        c = self.config
        if c.positions != "rope":
            return None
        freqs = rope.frequencies(c.rotary_size, c.rope_theta)
        if c.rope_scaling is not None:
            freqs = rope.scale_llama3(freqs, **c.rope_scaling.model_dump())
        return rope.angles(ctx.positions_bS, freqs, jnp.dtype(ctx.wide_dtype))

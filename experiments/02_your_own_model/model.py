"""A model that is not ours, in one file: a gated linear recurrence in place of attention, as NNX modules on named dims.

It knows no mesh axis. Parameters name their dims; `ctx.enter` and `ctx.leave` stand around each map whose dim may be split,
`ctx.whole_sequence` and `ctx.my_sequence` around what looks along the sequence; on one device all four are identities.

The mixer is the diagonal state space of minGRU (Feng et al., arXiv 2410.01201): h_t = (1 - z_t) h_{t-1} + z_t u_t, where z_t
depends on the token. A short causal convolution comes before it and a gate after it, as in Mamba (arXiv 2312.00752).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context, Initializer
from jaxpar.core.typing import Array, Terms
from jaxpar.models.nnx_model import NNXModel
from jaxpar.models.param import normal, ones, param
from jaxpar.ops.norm import rms_norm

NUM_TAPS = 4


class Rows(NamedTuple):
    """What the mixer must know of a batch, the same for all layers."""

    same_document_bSW: Array  # is the token w places back in the same document?


def uniform(low: float, high: float) -> Initializer:
    """Initial distribution of the gate's bias: channels start with time constants from 2 to 150 tokens."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, low, high)


class Mixer(nnx.Module):
    """Convolution, recurrence, gate; `heads` x `head_dim` channels, each on its own, so `tensor` may split `heads`."""

    def __init__(self, config: ModelConfig) -> None:
        c = config
        shape, names = (c.embed_dim, c.num_heads, c.head_size), ("embed", "heads", "head_dim")
        self.value, self.update, self.gate = (param(normal(c.init_std), shape, names) for _ in range(3))
        self.update_bias = param(uniform(-5.0, 0.0), shape[1:], names[1:])
        self.taps = param(normal(NUM_TAPS**-0.5), (NUM_TAPS, *shape[1:]), ("taps", *names[1:]))  # `taps` is a dim of our own
        self.out = param(normal(c.init_std / (2 * c.num_layers) ** 0.5), (*shape[1:], shape[0]), (*names[1:], names[0]))

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        x_bSD = ctx.enter(x_bSD, "heads")
        value, update, gate = (jnp.einsum("bsd,dhk->bshk", x_bSD, w[...]) for w in (self.value, self.update, self.gate))
        both = ctx.whole_sequence(jnp.concatenate([value, update + self.update_bias[...]], axis=-1))
        value, update = jnp.split(both.astype(ctx.wide_dtype), 2, axis=-1)
        value = convolve(value, self.taps[...].astype(ctx.wide_dtype), ctx.shared)
        h_bSHK = recur(value, jax.nn.sigmoid(update), ctx.shared).astype(x_bSD.dtype)
        y_bSHK = ctx.my_sequence(h_bSHK) * jax.nn.silu(gate)
        return ctx.leave(jnp.einsum("bshk,hkd->bsd", y_bSHK, self.out[...]), "heads")


def convolve(x_bSHK: Array, taps_WHK: Array, rows: Rows) -> Array:
    """Causal, each channel on its own; a tap that would reach into another document sees zero."""
    seen = rows.same_document_bSW.astype(x_bSHK.dtype)
    shifted = (jnp.pad(x_bSHK, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, : x_bSHK.shape[1]] for back in range(NUM_TAPS))
    parts = [x * seen[:, :, back, None, None] * taps_WHK[back] for back, x in enumerate(shifted)]
    return sum(parts[1:], parts[0])


def recur(u_bSHK: Array, z_bSHK: Array, rows: Rows) -> Array:
    """h_t = (1 - z_t) h_{t-1} + z_t u_t by an associative scan; the first token of a document forgets what was before."""
    keep_bSHK = (1 - z_bSHK) * rows.same_document_bSW[:, :, 1, None, None].astype(z_bSHK.dtype)

    def combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    return lax.associative_scan(combine, (keep_bSHK, z_bSHK * u_bSHK), axis=1)[1]


class Mlp(nnx.Module):
    """Squared ReLU (So et al., arXiv 2109.08668)."""

    def __init__(self, config: ModelConfig) -> None:
        c = config
        self.up = param(normal(c.init_std), (c.embed_dim, c.mlp_dim), ("embed", "mlp"))
        self.down = param(normal(c.init_std / (2 * c.num_layers) ** 0.5), (c.mlp_dim, c.embed_dim), ("mlp", "embed"))

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        h_bSF = jnp.square(jax.nn.relu(ctx.enter(x_bSD, "mlp") @ self.up[...]))
        return ctx.leave(h_bSF @ self.down[...], "mlp")


class Norm(nnx.Module):
    def __init__(self, config: ModelConfig) -> None:
        self.eps = config.norm_eps
        self.scale = param(ones, (config.embed_dim,), ("embed",))

    def __call__(self, x_bSD: Array) -> Array:
        return rms_norm(x_bSD, self.scale[...], self.eps)


class Embedding(nnx.Module):
    def __init__(self, config: ModelConfig) -> None:
        c = config
        valid = (c.vocab_size, c.embed_dim)
        self.table = param(normal(c.init_std), (c.padded_vocab_size, c.embed_dim), ("vocab", "embed"), valid=valid)

    def __call__(self, tokens_bS: Array, ctx: Context) -> Array:
        return ctx.embed(self.table[...], tokens_bS)


class Block(nnx.Module):
    def __init__(self, config: ModelConfig) -> None:
        self.mixer_norm, self.mixer = Norm(config), Mixer(config)
        self.mlp_norm, self.mlp = Norm(config), Mlp(config)

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        x_bSD = x_bSD + self.mixer(self.mixer_norm(x_bSD), ctx)
        return x_bSD + self.mlp(self.mlp_norm(x_bSD), ctx)


class Head(nnx.Module):
    """The embedding's table is used again as the output map."""

    def __init__(self, config: ModelConfig) -> None:
        self.norm = Norm(config)

    def __call__(self, x_bSD: Array, targets_bS: Array, weights_bS: Array, embed: Embedding, ctx: Context) -> Terms:
        return ctx.cross_entropy(self.norm(x_bSD), embed.table[...].T, targets_bS, weights_bS)

    def logits(self, x_bSD: Array, embed: Embedding, ctx: Context) -> Array:
        return ctx.logits(self.norm(x_bSD), embed.table[...].T)


class Recurrent(NNXModel):
    """The whole model; `jaxpar.build(config, model=Recurrent(config.model))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(embed=Embedding(config), block=Block(config), head=Head(config), num_layers=config.num_layers)

    def shared(self, ctx: Context) -> Any:
        """Document boundaries of whole rows, gathered once for all layers."""
        if ctx.segments_bS is None:  # one document a row
            segments_bS = jnp.ones_like(ctx.whole_sequence(ctx.positions_bS))
        else:
            segments_bS = ctx.whole_sequence(ctx.segments_bS)
        # Before the row's first token there is document -1, which no token is in.
        padded = jnp.pad(segments_bS, ((0, 0), (NUM_TAPS - 1, 0)), constant_values=-1)
        size, last = segments_bS.shape[1], NUM_TAPS - 1
        return Rows(jnp.stack([padded[:, last - back : last - back + size] == segments_bS for back in range(NUM_TAPS)], axis=-1))

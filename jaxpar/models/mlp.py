"""The feed-forward layer of a block."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context
from jaxpar.models.layers import Linear


class Mlp(nnx.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202) or GELU in the tanh form of GPT-2."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """width: of the hidden layer, without biases then; None: as `model` says."""
        c = config
        embed, mlp, std = {"embed": c.embed_dim}, {"mlp": width or c.mlp_dim}, c.init_std
        bias = c.bias and width is None
        self.gate = Linear(embed, mlp, std=std, bias=bias) if c.activation == "swiglu" else None
        self.up = Linear(embed, mlp, std=std, bias=bias)
        self.down = Linear(mlp, embed, std=std / (2 * c.num_layers) ** 0.5, bias=bias)

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        return self.down.add_bias(ctx.leave(self.inside(ctx.enter(x_bSD, "mlp")), "mlp"))

    def inside(self, x_bSD: Array) -> Array:
        """Between `enter` and `leave`, without the last bias: a partial sum where `mlp` is split."""
        up_bSF = self.up(x_bSD)
        h_bSF = jax.nn.gelu(up_bSF, approximate=True) if self.gate is None else jax.nn.silu(self.gate(x_bSD)) * up_bSF
        return self.down.product(checkpoint_name(h_bSF, "mlp_hidden"))

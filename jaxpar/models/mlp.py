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

    def __init__(self, config: ModelConfig) -> None:
        c = config
        embed, mlp, std = {"embed": c.embed_dim}, {"mlp": c.mlp_dim}, c.init_std
        self.gate = Linear(embed, mlp, std=std, bias=c.bias) if c.activation == "swiglu" else None
        self.up = Linear(embed, mlp, std=std, bias=c.bias)
        self.down = Linear(mlp, embed, std=std / (2 * c.num_layers) ** 0.5, bias=c.bias)

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        x_bSD = ctx.enter(x_bSD, "mlp")
        up_bSF = self.up(x_bSD)
        h_bSF = jax.nn.gelu(up_bSF, approximate=True) if self.gate is None else jax.nn.silu(self.gate(x_bSD)) * up_bSF
        h_bSF = checkpoint_name(h_bSF, "mlp_hidden")
        return self.down.add_bias(ctx.leave(self.down.product(h_bSF), "mlp"))

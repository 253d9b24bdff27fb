"""The feed-forward layer of a block with experts: routed ones, shared ones that every token passes, a dense layer beside."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context
from jaxpar.core.typing import Terms
from jaxpar.models.experts import Experts
from jaxpar.models.layers import Linear
from jaxpar.models.mlp import Mlp
from jaxpar.models.router import Router
from jaxpar.models.router_terms import router_terms


class Moe(nnx.Module):
    """Mixture of experts (Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961)."""

    def __init__(self, config: ModelConfig) -> None:
        c, moe = config, config.moe
        assert moe is not None
        self.moe, self.num_blocks = moe, c.num_blocks
        embed, std = {"embed": c.embed_dim}, c.init_std
        self.router = Router(moe, c.embed_dim, std)
        self.experts = Experts(c)
        self.shared = Mlp(c, moe.shared_experts * c.expert_dim) if moe.shared_experts else None
        self.shared_gate = Linear(embed, {"router": 1}, std=std) if moe.shared_gate else None
        self.residual = Mlp(c, c.mlp_dim) if moe.residual else None
        self.residual_mix = Linear(embed, {"router": 2}, std=std) if moe.residual else None

    def __call__(self, x_bSD: Array, ctx: Context, block: Array | int) -> tuple[Array, Terms]:
        """(output, terms [blocks, ...] that are zero but for this block's)."""
        decision = self.router(x_bSD, ctx)
        mix_bS2 = None if self.residual_mix is None else jax.nn.softmax(self._exact(self.residual_mix, x_bSD, ctx), axis=-1)
        gate_bS1 = None if self.shared_gate is None else jax.nn.sigmoid(self._exact(self.shared_gate, x_bSD, ctx))
        routing = self.router.routing(decision, ctx)
        inside_bSD = ctx.enter(x_bSD, "mlp")
        y_bSD, lost = ctx.route(inside_bSD, routing, self.experts)
        # All are partial sums over the same split hidden dim, so one `leave` serves them.
        if mix_bS2 is not None and self.residual is not None:
            mix_bS2 = ctx.enter(mix_bS2, "mlp").astype(y_bSD.dtype)
            y_bSD = y_bSD * mix_bS2[..., :1] + self.residual.inside(inside_bSD) * mix_bS2[..., 1:]
        if self.shared is not None:
            shared_bSD = self.shared.inside(inside_bSD)
            y_bSD = y_bSD + (shared_bSD if gate_bS1 is None else shared_bSD * ctx.enter(gate_bS1, "mlp").astype(y_bSD.dtype))
        return ctx.leave(y_bSD, "mlp"), router_terms(self.moe, decision, lost, ctx, block, self.num_blocks)

    @staticmethod
    def _exact(linear: Linear, x_bSD: Array, ctx: Context) -> Array:
        return jnp.einsum("bsd,de->bse", x_bSD.astype(ctx.wide_dtype), linear.kernel[...].astype(ctx.wide_dtype))

"""The routed experts of a layer: feed-forward networks stacked on a dim `experts`, applied to rows that a dispatcher has brought."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Product, Weigh
from jaxpar.models.param import normal, param


class Matrices(nnx.Module):
    """One matrix an expert."""

    def __init__(self, num_experts: int, in_dim: tuple[str, int], out_dim: tuple[str, int], std: float) -> None:
        (in_name, in_size), (out_name, out_size) = in_dim, out_dim
        self.kernel = param(normal(std), (num_experts, in_size, out_size), ("experts", in_name, out_name))


class Experts(nnx.Module):
    """SwiGLU or GELU networks, as `Mlp`. Without biases, so that a row of zeros gives zeros: an empty place adds nothing."""

    def __init__(self, config: ModelConfig) -> None:
        c = config
        assert c.moe is not None
        num, embed, mlp, std = c.moe.num_experts, ("embed", c.embed_dim), ("mlp", c.expert_dim), c.init_std
        self.gate = Matrices(num, embed, mlp, std) if c.activation == "swiglu" else None
        self.up = Matrices(num, embed, mlp, std)
        self.down = Matrices(num, mlp, embed, std / (2 * c.num_layers) ** 0.5)

    def __call__(self, rows: Array, product: Product, weigh: Weigh) -> Array:
        """rows [..., D] -> [..., D], a partial sum where `mlp` is split. product: (rows, matrices) -> rows. weigh: changes no row."""
        up = product(rows, self.up.kernel[...])
        hidden = jax.nn.gelu(up, approximate=True) if self.gate is None else jax.nn.silu(product(rows, self.gate.kernel[...])) * up
        return product(weigh(checkpoint_name(hidden, "mlp_hidden")), self.down.kernel[...])

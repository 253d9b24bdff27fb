"""Group-limited routing: a token's experts lie in its best few groups of experts (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""

import jax.numpy as jnp
from jax import lax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.pick import best


def limit_groups(scores: Array, config: MoeConfig) -> Array:
    """Scores with -inf outside the `top_groups` best of `num_groups` groups of neighbouring experts: [..., E] -> [..., E].

    A group scores as its largest (DeepSeek-V2) or the sum of its two largest (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if config.top_groups >= config.num_groups:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], config.num_groups, -1)
    largest = 1 if config.group_score == "max" else min(2, grouped.shape[-1])
    group_score = jnp.sum(lax.top_k(grouped, largest)[0], axis=-1)
    chosen = best(group_score, config.top_groups)
    is_chosen = jnp.any(chosen[..., None] == jnp.arange(config.num_groups, dtype=chosen.dtype), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)

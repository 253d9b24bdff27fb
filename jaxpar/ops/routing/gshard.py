"""Two experts a token, the second by chance in training (GShard, arXiv 2006.16668, algorithm 1)."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.pick import best, unless_padding
from jaxpar.ops.routing.rule import RoutingRule, Seen


def gshard(_config: MoeConfig) -> RoutingRule:
    """Gates g1 / (g1 + g2) and g2 / (g1 + g2), also where the second expert is left out."""

    def probabilities(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=-1)

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        expert_gTk = best(scores_gTE, 2)
        if seen.training:
            assert seen.uniform_gT is not None
            # Dispatched if 2 g2 > rnd, where g2 is divided by g1 + g2.
            kept_gT = 2 * _two(scores_gTE)[..., 1] > seen.uniform_gT.astype(scores_gTE.dtype)
            second_gT = jnp.where(kept_gT, expert_gTk[..., 1], -1)
            expert_gTk = jnp.stack([expert_gTk[..., 0], second_gT], axis=-1)
        return unless_padding(expert_gTk, seen.valid_gT)

    def gates(_logits: Array, scores: Array, expert: Array) -> Array:
        return jnp.where(expert >= 0, _two(scores), 0)

    return RoutingRule(probabilities, choose, gates, probabilities)


def _two(probabilities: Array) -> Array:
    """The two largest, divided by their sum, which is at least 1 / E: [..., E] -> [..., 2]."""
    largest = lax.top_k(probabilities, 2)[0]
    return largest / jnp.sum(largest, axis=-1, keepdims=True)

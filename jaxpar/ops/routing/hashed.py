"""The expert is a function of the token's id alone, and nothing is learned (Hash layers, Roller et al., arXiv 2106.04426)."""

import jax
import jax.numpy as jnp

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.random import fold, key_of
from jaxpar.ops.routing.rule import RoutingRule, Seen

SEED = 0  # the same table in every run and every layer


def hashed(config: MoeConfig) -> RoutingRule:
    """Threefry bits of the id, modulo the number of experts. Gate 1. Logits, where a caller has any, count in the losses only."""

    def scores(logits: Array) -> Array:
        return logits

    def choose(_scores_gTE: Array, seen: Seen) -> Array:
        words_gT = fold(key_of(SEED), seen.tokens_gT)[0]
        expert_gT = (words_gT % jnp.uint32(config.num_experts)).astype(jnp.int32)
        return jnp.where(seen.valid_gT, expert_gT, -1)[..., None]

    def gates(logits: Array, _scores: Array, expert: Array) -> Array:
        return (expert >= 0).astype(logits.dtype)

    return RoutingRule(scores, choose, gates, probabilities=lambda logits: jax.nn.softmax(logits, axis=-1))

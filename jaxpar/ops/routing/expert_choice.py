"""Each expert chooses its tokens (Zhou et al., arXiv 2202.09368). Not causal: whether a token is taken depends on later ones."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.pick import at
from jaxpar.ops.routing.rule import RoutingRule, Seen


def expert_choice(config: MoeConfig) -> RoutingRule:
    """Expert e takes the `capacity` tokens of its group with the largest probability of e, and stands at place e of their lists."""

    def probabilities(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=-1)

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        expert_E = jnp.arange(config.num_experts, dtype=jnp.int32)
        return jnp.where(_taken(scores_gTE, seen.valid_gT, seen.capacity), expert_E, -1)

    def gates(_logits: Array, scores: Array, expert: Array) -> Array:
        return at(scores, expert)

    return RoutingRule(probabilities, choose, gates, probabilities)


def _taken(probability_gTE: Array, valid_gT: Array, capacity: int) -> Array:
    """True where the expert takes the token. Padding comes after every token, and is not taken where tokens run out."""
    ranked_gTE = jnp.where(valid_gT[..., None], probability_gTE, -1)
    token_gEC = lax.top_k(jnp.swapaxes(ranked_gTE, -1, -2), min(capacity, valid_gT.shape[-1]))[1]
    g, num_experts, _ = token_gEC.shape
    group_g = jnp.arange(g)[:, None, None]
    expert_E = jnp.arange(num_experts)[:, None]
    taken_gTE = jnp.zeros(probability_gTE.shape, bool).at[group_g, token_gEC, expert_E].set(True, unique_indices=True)
    return taken_gTE & valid_gT[..., None]

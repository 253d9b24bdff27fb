"""The k experts of largest score (Shazeer et al., arXiv 1701.06538; softmax after the choice: Mixtral, arXiv 2401.04088)."""

import jax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.group_limit import limit_groups
from jaxpar.ops.routing.pick import at, best, softmax_at, unless_padding
from jaxpar.ops.routing.rule import RoutingRule, Seen


def topk(config: MoeConfig) -> RoutingRule:
    """Gates: probabilities of the chosen, as they are or divided by their sum; `softmax: after` always sums to 1."""
    all_probabilities = config.softmax == "before"

    def scores(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=-1) if all_probabilities else logits

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        return unless_padding(best(limit_groups(scores_gTE, config), config.top_k), seen.valid_gT)

    def gates(logits: Array, scores: Array, expert: Array) -> Array:
        if all_probabilities and not config.renormalize:
            return at(scores, expert)
        return softmax_at(logits, expert)

    return RoutingRule(scores, choose, gates, probabilities=lambda logits: jax.nn.softmax(logits, axis=-1))

"""One expert a token, weighted by its probability among all (Switch Transformer, arXiv 2101.03961, section 2.1)."""

import jax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.pick import at, best, unless_padding
from jaxpar.ops.routing.rule import RoutingRule, Seen


def switch(_config: MoeConfig) -> RoutingRule:
    """The gate is never renormalised: of one expert it would be 1, and the router would learn nothing."""

    def probabilities(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=-1)

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        return unless_padding(best(scores_gTE, 1), seen.valid_gT)

    def gates(_logits: Array, scores: Array, expert: Array) -> Array:
        return at(scores, expert)

    return RoutingRule(probabilities, choose, gates, probabilities)

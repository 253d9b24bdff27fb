"""Sigmoid scores and a bias on the choice alone, which balances without a loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

import jax
import jax.numpy as jnp

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.group_limit import limit_groups
from jaxpar.ops.routing.pick import at, best, unless_padding
from jaxpar.ops.routing.rule import RoutingRule, Seen

SMALL = 1e-20  # added to the sum of scores that gates are divided by, as in DeepSeek-V3's published code


def sigmoid_bias(config: MoeConfig) -> RoutingRule:
    """Gates from scores without bias, divided by their sum (`renormalize`). The bias is updated elsewhere, once per optimizer step."""

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        biased = scores_gTE if seen.bias_E is None else scores_gTE + seen.bias_E.astype(scores_gTE.dtype)
        return unless_padding(best(limit_groups(biased, config), config.top_k), seen.valid_gT)

    def gates(logits: Array, scores: Array, expert: Array) -> Array:
        return _share(logits, expert) if config.renormalize else at(scores, expert)

    return RoutingRule(scores=jax.nn.sigmoid, choose=choose, gates=gates, probabilities=_probabilities)


def _share(logits: Array, expert: Array) -> Array:
    """score / (sum of the chosen scores + SMALL), by logarithms: squares of a small sum underflow in the gradient of a quotient."""
    is_expert = expert >= 0
    log_score = at(jax.nn.log_sigmoid(logits), expert)
    log_sum = jax.nn.logsumexp(log_score, axis=-1, keepdims=True, where=is_expert)
    return jnp.where(is_expert, jnp.exp(log_score - jnp.logaddexp(log_sum, jnp.log(jnp.asarray(SMALL, logits.dtype)))), 0)


def _probabilities(logits: Array) -> Array:
    """score / (sum of all scores), as in DeepSeek-V3's balance loss (equation 18 there), by logarithms as above."""
    return jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)

"""The k best experts after Sinkhorn balancing of the group (S-BASE, Clark et al., arXiv 2202.01169; the formulae of Megatron-LM)."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.core.vma import vary_alike
from jaxpar.ops.routing.pick import at, best, unless_padding
from jaxpar.ops.routing.rule import RoutingRule, Seen

MAX_ROUNDS = 100


def sinkhorn(config: MoeConfig) -> RoutingRule:
    """Gates: sigmoid of the logit for one expert a token, else its probability among all, not renormalised."""

    def scores(logits: Array) -> Array:
        return logits

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        if seen.training:
            scores_gTE = scores_gTE + log_factors(scores_gTE, seen.valid_gT, config.sinkhorn_tolerance)[:, None, :]
        # In evaluation Megatron-LM takes the best activations. Logits have the same order and do not saturate.
        return unless_padding(best(scores_gTE, config.top_k), seen.valid_gT)

    def gates(logits: Array, _scores: Array, expert: Array) -> Array:
        return at(jax.nn.sigmoid(logits) if config.top_k == 1 else jax.nn.softmax(logits, axis=-1), expert)

    return RoutingRule(scores, choose, gates, probabilities=lambda logits: jax.nn.softmax(logits, axis=-1))


def log_factors(logits_gTE: Array, valid_gT: Array, tolerance: float) -> Array:
    """log d1 of d0 exp(logits) d1, whose rows sum to 1 / tokens and columns to 1 / E: [g, E]. d0 changes no token's order.

    By logarithms, for exp(logits) overflows. It ends, each group for itself, where d1 changes by less than the tolerance of itself
    on average (Megatron-LM: of 1, near which d1 lies), or after MAX_ROUNDS.
    """

    def one(logits_TE: Array, valid_T: Array) -> Array:
        logits_TE = logits_TE - jnp.max(logits_TE, axis=-1, keepdims=True)
        num_valid = jnp.maximum(jnp.sum(valid_T, dtype=logits_TE.dtype), 1)
        log_share = jnp.log(num_valid / logits_TE.shape[-1])

        def go_on(state: tuple[Array, Array, Array]) -> Array:
            return (state[1] > tolerance) & (state[2] < MAX_ROUNDS)

        def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            column_E, _, num_rounds = state
            row_T1 = jax.nn.logsumexp(logits_TE + column_E, axis=-1, keepdims=True)
            new_E = log_share - jax.nn.logsumexp(logits_TE - row_T1, axis=0, where=valid_T[:, None])
            new_E = jnp.where(jnp.any(valid_T), new_E, 0)
            return new_E, jnp.mean(jnp.abs(new_E - column_E)), num_rounds + 1

        column_E, error = jnp.zeros(logits_TE.shape[-1:], logits_TE.dtype), jnp.full((), jnp.inf, logits_TE.dtype)
        column_E, error, num_rounds, *_ = vary_alike(column_E, error, jnp.zeros((), jnp.int32), logits_TE, valid_T)
        return lax.while_loop(go_on, step, (column_E, error, num_rounds))[0]

    return jax.vmap(one)(logits_gTE, valid_gT)

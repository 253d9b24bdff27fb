"""As many tokens for every expert, at the largest total score (BASE layers, Lewis et al., arXiv 2103.16716): an auction.

Tokens bid for places (Bertsekas and Castanon 1989, the auction for objects that are alike): every token without a place offers its best
expert the price at which the second best is as good, and a bit more; an expert keeps its highest offers, and once it is full its price is
the lowest of them. Prices start at 0 and a place never taken costs 0, so the total at the end is within tokens x `bit` of the largest.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.core.vma import vary_alike
from jaxpar.ops.routing.capacity import places
from jaxpar.ops.routing.pick import at, best, unless_padding
from jaxpar.ops.routing.rule import RoutingRule, Seen

BITS = 50  # of the spread of scores, the least raise of an offer is one in so many (fairseq)
MAX_ROUNDS = 400  # then tokens without a place take what is free


def base(config: MoeConfig) -> RoutingRule:
    """Training: ceil(valid tokens of the group / E) places an expert. Evaluation: the best expert. Gate: sigmoid of its logit."""

    def scores(logits: Array) -> Array:
        return logits

    def choose(scores_gTE: Array, seen: Seen) -> Array:
        if seen.training and config.num_experts > 1:
            return assign(scores_gTE, seen.valid_gT)[..., None]
        return unless_padding(best(scores_gTE, 1), seen.valid_gT)

    def gates(logits: Array, _scores: Array, expert: Array) -> Array:
        return at(jax.nn.sigmoid(logits), expert)

    return RoutingRule(scores, choose, gates, probabilities=lambda logits: jax.nn.softmax(logits, axis=-1))


def assign(score_gTE: Array, valid_gT: Array) -> Array:
    """An expert for each valid token of each group, -1 for padding: [g, T, E], [g, T] -> int32 [g, T]. At least two experts."""
    g, _, num_experts = score_gTE.shape
    room_g = jnp.maximum(-(-jnp.sum(valid_gT, axis=1, dtype=jnp.int32) // num_experts), 1)
    # A constant on all scores of a token changes nothing. What is then not finite was NaN or infinite.
    loss_gTE = score_gTE - jnp.max(score_gTE, axis=-1, keepdims=True)
    loss_gTE = jnp.where(valid_gT[..., None] & jnp.isfinite(loss_gTE), loss_gTE, 0)
    spread_g = -jnp.min(loss_gTE, axis=(1, 2))
    bit_g = jnp.where(spread_g > 0, spread_g / BITS, 1)

    def go_on(state: tuple[Array, ...]) -> Array:
        expert_gT, _, _, num_rounds = state
        return jnp.any(valid_gT & (expert_gT < 0)) & (num_rounds < MAX_ROUNDS)

    def step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        expert_gT, offer_gT, price_gE, num_rounds = state
        return (*_round(expert_gT, offer_gT, price_gE, loss_gTE, valid_gT, bit_g, room_g), num_rounds + 1)

    nobody_gT = jnp.full(valid_gT.shape, -1, jnp.int32)
    start = (nobody_gT, jnp.zeros(valid_gT.shape, loss_gTE.dtype), jnp.zeros((g, num_experts), loss_gTE.dtype))
    start = vary_alike(*start, loss_gTE, valid_gT)[:3]
    expert_gT = lax.while_loop(go_on, step, (*start, jnp.zeros((), jnp.int32)))[0]
    return _fill(expert_gT, valid_gT, room_g, num_experts)


def _round(
    expert_gT: Array, offer_gT: Array, price_gE: Array, loss_gTE: Array, valid_gT: Array, bit_g: Array, room_g: Array
) -> tuple[Array, Array, Array]:
    """One round of offers: who holds a place of which expert after it, the offers that stand, and the experts' prices.

    It changes nothing in a group where nobody is without a place, so groups of one call do not see each other.
    """
    num_experts = price_gE.shape[-1]
    value_gTk, expert_gTk = lax.top_k(loss_gTE - price_gE[:, None, :], 2)
    first_gT = expert_gTk[..., 0]
    new_gT = jnp.take_along_axis(price_gE, first_gT, axis=-1) + value_gTk[..., 0] - value_gTk[..., 1] + bit_g[:, None]
    bids_gT = valid_gT & (expert_gT < 0)
    expert_gT, offer_gT = jnp.where(bids_gT, first_gT, expert_gT), jnp.where(bids_gT, new_gT, offer_gT)

    # Capacity as large as the group: ranks of all, for the room is a number that the program computes.
    rank_gT = places(expert_gT[..., None], offer_gT[..., None], num_experts, expert_gT.shape[1], "probability")[..., 0]
    last_gT = rank_gT == room_g[:, None] - 1
    group_g = jnp.arange(expert_gT.shape[0])[:, None]
    price_gE = jnp.zeros_like(price_gE).at[group_g, jnp.where(last_gT, expert_gT, num_experts)].max(offer_gT, mode="drop")
    return jnp.where(rank_gT < room_g[:, None], expert_gT, -1), offer_gT, price_gE


def _fill(expert_gT: Array, valid_gT: Array, room_g: Array, num_experts: int) -> Array:
    """Tokens still without a place take the free ones, in order of tokens and of experts."""
    waits_gT = valid_gT & (expert_gT < 0)
    held_gE = jnp.sum(expert_gT[..., None] == jnp.arange(num_experts, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    end_gE = jnp.cumsum(room_g[:, None] - held_gE, axis=1, dtype=jnp.int32)
    turn_gT = jnp.cumsum(waits_gT, axis=1, dtype=jnp.int32) - 1
    free_gT = jnp.sum(end_gE[:, None, :] <= turn_gT[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(waits_gT, free_gT, expert_gT)

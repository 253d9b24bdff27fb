"""What is measured of a router, and minimised: terms [blocks, ...] as (sum, weight), so that each block has its own mean.

Padding counts nowhere. The balance losses are functions of a whole group's means; each device adds the share of its own tokens, linear in
their probabilities, so no gradient crosses devices and every layout gives the same.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxpar.config.moe import MoeConfig
from jaxpar.core.protocols import Context
from jaxpar.core.typing import Terms
from jaxpar.models.router import Decision, in_groups
from jaxpar.ops.routing import losses
from jaxpar.ops.routing.library import make_rule

LOAD, DROPPED, OVERFLOW, ENTROPY, Z = "moe_load", "moe_dropped", "moe_overflow", "moe_entropy", "moe_z"
BALANCE, GLOBAL_BALANCE, ENTROPY_BALANCE = "moe_balance", "moe_global_balance", "moe_entropy_balance"


def minimised(moe: MoeConfig) -> dict[str, float]:
    """Coefficients of the terms that a config asks to minimise."""
    balance = GLOBAL_BALANCE if moe.keeps_load else BALANCE
    every = {balance: moe.balance_coefficient, ENTROPY_BALANCE: moe.entropy_coefficient, Z: moe.router_z_coefficient}
    return {name: coefficient for name, coefficient in every.items() if coefficient}


def router_terms(moe: MoeConfig, decision: Decision, lost: Array | None, ctx: Context, block: Array | int, num_blocks: int) -> Terms:
    """moe_load [blocks, E]: choices of each expert before any drop / (tokens x top_k). moe_dropped and, of routers that learn, moe_entropy,
    moe_z, moe_balance (1 is perfect) and what else is minimised [blocks]. lost: rows cut off by a full buffer (moe_overflow)."""
    d, exact = decision, ctx.wide_dtype
    valid_bS = d.valid_bS.astype(exact)
    tokens = jnp.sum(valid_bS)
    num_choices = tokens * moe.top_k
    chosen_bSk = d.expert_bSk >= 0
    load_E = jnp.sum(losses.counts(d.expert_bSk, moe.num_experts), axis=0)
    dropped = jnp.sum((chosen_bSk & (d.place_bSk < 0)).astype(exact))
    terms = {
        LOAD: (load_E.astype(exact), num_choices),
        DROPPED: (dropped, num_choices),
        **({} if lost is None else {OVERFLOW: (lost.astype(exact), num_choices)}),
    }
    if moe.learns:
        probability_bSE = make_rule(moe).probabilities(d.logits_bSE)
        terms |= {
            ENTROPY: (lax.stop_gradient(_masked(_entropy(probability_bSE), valid_bS)), tokens),
            Z: (_masked(losses.router_z(d.logits_bSE), valid_bS), tokens),
            **_group_terms(moe, d, ctx, probability_bSE),
        }
    return {name: (_at(block, num_blocks, total), _at(block, num_blocks, weight, like=total)) for name, (total, weight) in terms.items()}


def _group_terms(moe: MoeConfig, d: Decision, ctx: Context, probability_bSE: Array) -> Terms:
    """Over each routing group or row. moe_global_balance: with the choices of the whole batch of the step before, for those of this step
    are known only after its last microbatch."""
    exact = ctx.wide_dtype
    rows = 1 if moe.balance_scope == "sequence" else moe.routing_group_sequences
    valid_gT, expert_gTk = (in_groups(a, rows) for a in (d.valid_BS, d.expert_BSk))
    probability_gtE, valid_gt = in_groups(probability_bSE, rows), in_groups(d.valid_bS, rows)
    num_valid_g = jnp.sum(valid_gT.astype(exact), axis=-1)
    some_g1 = jnp.maximum(num_valid_g, jnp.ones_like(num_valid_g))[:, None]
    local_sum_gE = jnp.sum(jnp.where(valid_gt[..., None], lax.stop_gradient(probability_gtE), jnp.zeros((), exact)), axis=1)
    mean_gE = ctx.sum_over_rows(local_sum_gE) / some_g1
    first = moe.balance_counts == "first"
    counts_gE = (losses.first_counts if first else losses.counts)(expert_gTk, moe.num_experts).astype(exact)
    # Shares of the choices that there are: expert_choice has more than top_k a token, gshard fewer.
    fraction_gE = counts_gE / jnp.maximum(jnp.sum(counts_gE, axis=-1, keepdims=True), jnp.ones((), exact))

    def term(loss: Callable[[Array], Array]) -> tuple[Array, Array]:
        return losses.linear_share(probability_gtE, valid_gt, mean_gE, num_valid_g, loss)

    terms = {BALANCE: term(lambda p: losses.balance(fraction_gE, p))}
    if d.last_load_E is not None:
        valid_bS = d.valid_bS.astype(exact)
        per_token_bS = moe.num_experts * jnp.einsum("bse,e->bs", probability_bSE, d.last_load_E.astype(exact))
        terms[GLOBAL_BALANCE] = (_masked(per_token_bS, valid_bS), jnp.sum(valid_bS))
    return terms | ({ENTROPY_BALANCE: term(losses.entropy_balance)} if moe.entropy_coefficient else {})


def _masked(values_bS: Array, valid_bS: Array) -> Array:
    return jnp.sum(jnp.where(valid_bS > 0, values_bS, jnp.zeros_like(values_bS)))


def _entropy(probability_bSE: Array) -> Array:
    """In nats; ln E when all experts are equally likely."""
    some = probability_bSE > 0
    log = jnp.log(jnp.where(some, probability_bSE, jnp.ones_like(probability_bSE)))
    return -jnp.sum(jnp.where(some, probability_bSE * log, jnp.zeros_like(log)), axis=-1)


def _at(block: Array | int, num_blocks: int, value: Array, like: Array | None = None) -> Array:
    """[blocks, ...]: `value` in the row of the block, zeros elsewhere. like: an array that it must broadcast against, dim by dim."""
    value = value.reshape(value.shape + (1,) * ((like.ndim if like is not None else value.ndim) - value.ndim))
    mine = (jnp.arange(num_blocks, dtype=jnp.int32) == block).reshape(-1, *[1] * value.ndim)
    return jnp.where(mine, value[None], jnp.zeros((), value.dtype))

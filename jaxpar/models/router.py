"""The router of a layer: scores in float32, a choice of experts for whole groups of rows, and what is measured and minimised of it.

Decisions are made from what all devices that share a group have: a device scores its own tokens, and scores (where a rule needs them) or
choices are shared over the group, so that the same tokens are dropped under any layout (law L4). Gates and gradients stay with the
device that holds a token.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.config.moe import MoeConfig
from jaxpar.core.protocols import Context, Routing
from jaxpar.models.param import normal, param, zeros
from jaxpar.ops.routing.capacity import places
from jaxpar.ops.routing.library import make_rule
from jaxpar.ops.routing.rule import RoutingRule, Seen

SITE_JITTER, SITE_CHANCE = 4, 5  # sites of random bits


class Decision(NamedTuple):
    """logits_bSE, gate_bSk, expert_bSk, place_bSk: of this device's tokens at a block boundary. valid_bS: False for padding.

    expert_BSk, place_BSk, valid_BS: of all tokens of this device's rows, in natural order. last_load_E: choices of each expert in the
    step before, as fractions, where a loss asks for them.
    """

    logits_bSE: Array
    gate_bSk: Array
    expert_bSk: Array
    place_bSk: Array
    valid_bS: Array
    expert_BSk: Array
    place_BSk: Array
    valid_BS: Array
    capacity: int
    last_load_E: Array | None


class Router(nnx.Module):
    """Who goes where."""

    def __init__(self, moe: MoeConfig, embed_dim: int, std: float) -> None:
        self.moe = moe
        self.kernel = param(normal(std), (embed_dim, moe.num_experts), ("embed", "router")) if moe.learns else None
        self.bias = param(zeros, (moe.num_experts,), ("router",)) if moe.has_bias else None
        self.last_load = param(_even, (moe.num_experts,), ("router",)) if moe.keeps_load else None

    def __call__(self, x_bSD: Array, ctx: Context) -> Decision:
        moe, rule = self.moe, make_rule(self.moe)
        logits_bSE = self.logits(x_bSD, ctx)
        scores_bSE = rule.scores(logits_bSE)
        valid_bS = jnp.ones(x_bSD.shape[:2], bool) if ctx.segments_bS is None else ctx.at_block_boundary(ctx.segments_bS) > 0
        valid_BS = ctx.whole_rows(valid_bS)
        capacity = moe.capacity(moe.routing_group_sequences * valid_BS.shape[1])
        expert_bSk, expert_BSk = self._choose(rule, lax.stop_gradient(scores_bSE), valid_bS, valid_BS, capacity, ctx)
        gate_bSk = rule.gates(logits_bSE, scores_bSE, expert_bSk)
        place_BSk = self._places(expert_BSk, gate_bSk, capacity, ctx)
        place_bSk = ctx.my_tokens(place_BSk)
        if moe.capacity_factor is not None:
            gate_bSk = _without_dropped(gate_bSk, place_bSk >= 0, renormalize=moe.renormalize_after_drop)
        last_load_E = None if self.last_load is None else lax.stop_gradient(self.last_load[...])
        return Decision(
            logits_bSE=logits_bSE,
            gate_bSk=gate_bSk,
            expert_bSk=expert_bSk,
            place_bSk=place_bSk,
            valid_bS=valid_bS,
            expert_BSk=expert_BSk,
            place_BSk=place_BSk,
            valid_BS=valid_BS,
            capacity=capacity,
            last_load_E=last_load_E,
        )

    def logits(self, x_bSD: Array, ctx: Context) -> Array:
        """Scores before any function of them, float32 at least: in bfloat16 near ties merge. Zeros where nothing is learned."""
        x_bSD = x_bSD.astype(ctx.wide_dtype)
        if self.kernel is None:
            return jnp.zeros_like(x_bSD, shape=(*x_bSD.shape[:2], self.moe.num_experts))
        noise_bSD = ctx.uniform(SITE_JITTER, x_bSD.shape[2]) if self.moe.jitter else None
        if noise_bSD is not None:
            one, jitter = jnp.asarray(1.0, x_bSD.dtype), jnp.asarray(self.moe.jitter, x_bSD.dtype)
            x_bSD = x_bSD * (one - jitter + 2 * jitter * noise_bSD)
        return jnp.einsum("bsd,de->bse", x_bSD, self.kernel[...].astype(ctx.wide_dtype), precision=lax.Precision.HIGHEST)

    def routing(self, decision: Decision, ctx: Context) -> Routing:
        """What the dispatcher takes: of all tokens after `enter`."""
        moe, d = self.moe, decision
        expert_bSk, place_bSk = (ctx.my_sequence(a) for a in (d.expert_BSk, d.place_BSk))
        gate_bSk = ctx.enter(d.gate_bSk, "mlp")
        return Routing(expert_bSk, gate_bSk, place_bSk, d.capacity, moe.routing_group_sequences, moe.num_experts)

    def _choose(
        self, rule: RoutingRule, scores_bSE: Array, valid_bS: Array, valid_BS: Array, capacity: int, ctx: Context
    ) -> tuple[Array, Array]:
        """Experts of (this device's tokens, all tokens of its rows)."""
        bias = None if self.bias is None else lax.stop_gradient(self.bias[...].astype(scores_bSE.dtype))
        tokens_bS = ctx.at_block_boundary(ctx.tokens_bS)
        if not self.moe.needs_group:
            chance = ctx.uniform(SITE_CHANCE) if self.moe.tosses else None
            expert_bSk = rule.choose(scores_bSE, Seen(valid_bS, tokens_bS, chance, bias, ctx.training, capacity))
            return expert_bSk, ctx.whole_rows(expert_bSk)
        rows = self.moe.routing_group_sequences
        whole = (ctx.whole_rows(scores_bSE), valid_BS, ctx.whole_rows(tokens_bS))
        scores_gTE, valid_gT, tokens_gT = (in_groups(a, rows) for a in whole)
        expert_gTk = rule.choose(scores_gTE, Seen(valid_gT, tokens_gT, None, bias, ctx.training, capacity))
        expert_BSk = expert_gTk.reshape(*valid_BS.shape, -1)
        return ctx.my_tokens(expert_BSk), expert_BSk

    def _places(self, expert_BSk: Array, gate_bSk: Array, capacity: int, ctx: Context) -> Array:
        if not self.moe.needs_places:
            return jnp.where(expert_BSk >= 0, jnp.zeros_like(expert_BSk), jnp.full_like(expert_BSk, -1))
        policy = "position" if self.moe.capacity_factor is None else self.moe.drop_policy  # where none is dropped, any order will do
        rows = self.moe.routing_group_sequences
        gate_gTk = in_groups(ctx.whole_rows(lax.stop_gradient(gate_bSk)), rows) if policy == "probability" else None
        return places(in_groups(expert_BSk, rows), gate_gTk, self.moe.num_experts, capacity, policy).reshape(expert_BSk.shape)


def in_groups(a_BS: Array, rows: int) -> Array:
    """[rows of tokens, ...] -> [groups of so many rows, tokens, ...]."""
    if a_BS.shape[0] % rows:
        raise ValueError(f"model.moe.routing_group_sequences: {rows} does not divide the {a_BS.shape[0]} rows of a device's microbatch")
    return a_BS.reshape(-1, rows * a_BS.shape[1], *a_BS.shape[2:])


def _even(_key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return jnp.full(shape, 1 / shape[0], dtype)


def _without_dropped(gate_bSk: Array, kept_bSk: Array, *, renormalize: bool) -> Array:
    """Gates of what was dropped are 0; renormalize: the others then sum to what all did."""
    left_bSk = jnp.where(kept_bSk, gate_bSk, jnp.zeros_like(gate_bSk))
    if not renormalize:
        return left_bSk
    all_bS1, left_bS1 = (jnp.sum(g, axis=-1, keepdims=True) for g in (gate_bSk, left_bSk))
    return left_bSk * jnp.where(left_bS1 > 0, all_bS1 / jnp.where(left_bS1 > 0, left_bS1, jnp.ones_like(left_bS1)), left_bS1)

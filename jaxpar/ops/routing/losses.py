"""Auxiliary losses of a router, without coefficients, and the counts and shares they are made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxpar.core.typing import Array, Float, Int
from jaxpar.core.vma import vary_alike


def balance(fraction_gE: Float[Array, "g E"], mean_probability_gE: Float[Array, "g E"]) -> Float[Array, "g"]:
    """E sum f P, 1 at perfect balance (Switch, arXiv 2101.03961, section 2.2). f: share of the choices that fell on each expert."""
    return fraction_gE.shape[-1] * jnp.sum(fraction_gE * mean_probability_gE, axis=-1)


def entropy_balance(mean_probability_gE: Float[Array, "g E"]) -> Float[Array, "g"]:
    """sum P log P, -log E at perfect balance; 0 log 0 is 0, its slope too."""
    none = mean_probability_gE == 0
    return jnp.sum(jnp.where(none, 0, mean_probability_gE * jnp.log(jnp.where(none, 1, mean_probability_gE))), axis=-1)


def router_z(logits: Float[Array, "*n E"]) -> Float[Array, "*n"]:
    """logsumexp(logits)^2 of each token (ST-MoE, arXiv 2202.08906, section 3)."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1))


def counts(expert_gTk: Int[Array, "g T k"], num_experts: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "g E"]:
    """Choices that fell on each expert; -1 counts nowhere. Counted as integers, without a one-hot of T x k x E."""

    def one(expert_Tk: Array) -> Array:
        expert_N = expert_Tk.reshape(-1)
        beyond_N = jnp.where(expert_N < 0, num_experts, expert_N)
        return jnp.zeros((num_experts,), jnp.int32).at[beyond_N].add(1, mode="drop")

    return jax.vmap(one)(expert_gTk).astype(dtype)


def first_counts(expert_gTk: Int[Array, "g T k"], num_experts: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "g E"]:
    """As `counts`, of the first choices only (GShard, DeepSpeed top-2)."""
    return counts(expert_gTk[..., :1], num_experts, dtype)


def linear_share(
    probability_gtE: Float[Array, "g t E"],
    valid_gt: Array,
    mean_gE: Float[Array, "g E"],
    num_valid_g: Float[Array, "g"],
    loss: Callable[[Array], Array],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, weight) of the local tokens in sum over groups of loss(P_g), P the mean probabilities [g, E] -> [g] of whole groups.

    `loss` is replaced by its tangent at P, a sum over tokens: over all shards of the tokens the sums add up to the loss, the weights
    to the number of groups with a token, and the gradient with respect to the local probabilities is exact though P carries none.
    """
    mean_gE, num_valid_g = lax.stop_gradient((mean_gE, num_valid_g))
    part_g = jnp.sum(valid_gt, axis=1, dtype=num_valid_g.dtype) / jnp.maximum(num_valid_g, 1)
    # Alike before the slope is taken: the transpose of marking P as varying inside `loss` would be a sum over devices.
    mean_gE, probability_gtE = vary_alike(mean_gE, probability_gtE)
    value_g, pull = jax.vjp(loss, mean_gE)
    slope_gE = lax.stop_gradient(pull(jnp.ones_like(value_g))[0])
    local_sum_gE = jnp.sum(jnp.where(valid_gt[..., None], probability_gtE, 0), axis=1)
    at_mean_g = lax.stop_gradient(value_g) - jnp.sum(slope_gE * mean_gE, axis=-1)
    local_g = jnp.sum(slope_gE * local_sum_gE, axis=-1) / jnp.maximum(num_valid_g, 1) + part_g * at_mean_g
    # A group without tokens has no mean.
    return jnp.sum(jnp.where(num_valid_g > 0, local_g, 0)), jnp.sum(part_g)

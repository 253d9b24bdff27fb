"""Parameters of a router that no gradient moves: once per optimizer step, from the choices of the whole batch."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.config.moe import MoeConfig
from jaxpar.core.protocols import Update
from jaxpar.models.router_terms import LOAD


def updates(moe: MoeConfig) -> dict[str, Update]:
    """By name within the router."""
    bias = {"bias": Update(LOAD, lambda bias_E, load_E: _towards_even(moe, bias_E, load_E))} if moe.has_bias else {}
    return bias | ({"last_load": Update(LOAD, lambda _, load_E: load_E)} if moe.keeps_load else {})


def _towards_even(moe: MoeConfig, bias_E: Array, load_E: Array) -> Array:
    """bias + rate x sign(mean load - load): up where few tokens go (arXiv 2408.15664, algorithm 1); bias_centred: by a step of mean 0."""
    step_E = jnp.sign(jnp.mean(load_E) - load_E)
    if moe.bias_centred:
        step_E = step_E - jnp.mean(step_E)
    return bias_E + moe.bias_rate * step_E.astype(bias_E.dtype)

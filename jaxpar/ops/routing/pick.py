"""What all routers share: the best experts of a token, and values read at chosen experts. -1 is no expert, and reads as 0."""

import jax.numpy as jnp
from jax import lax

from jaxpar.core.typing import Array


def best(scores: Array, k: int) -> Array:
    """The k experts of largest score, largest first, ties to the lowest index: [..., E] -> int32 [..., k]."""
    # lax.top_k puts -0.0 below 0.0.
    return lax.top_k(jnp.where(scores == 0, 0, scores), k)[1]


def unless_padding(expert_gTk: Array, valid_gT: Array) -> Array:
    """No expert for padding."""
    return jnp.where(valid_gT[..., None], expert_gTk, -1)


def at(values: Array, expert: Array) -> Array:
    """Values at the chosen experts: [..., E], [..., k] -> [..., k]."""
    return jnp.where(expert >= 0, _read(values, expert), 0)


def softmax_at(logits: Array, expert: Array) -> Array:
    """Softmax over the chosen experts alone: [..., E], [..., k] -> [..., k].

    It is also what a softmax over all, divided by its sum over the chosen, comes to; but that sum can underflow.
    """
    chosen, is_expert = _read(logits, expert), expert >= 0
    most = lax.stop_gradient(jnp.max(jnp.where(is_expert, chosen, -jnp.inf), axis=-1, keepdims=True))
    weight = jnp.where(is_expert, jnp.exp(jnp.where(is_expert, chosen - most, 0)), 0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total == 0, 1, total)


def _read(values: Array, expert: Array) -> Array:
    return jnp.take_along_axis(values, jnp.maximum(expert, 0), axis=-1)

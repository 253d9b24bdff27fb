"""Rows of a table by index, for token embeddings and learned positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.core.dtypes import wide


def look_up(table_ND: Float[Array, "N D"], index: Int[Array, "*n"]) -> Float[Array, "*n D"]:
    """Rows of a table; indices beyond it give the nearest row.

    Widened first, so that the gradient of a row, a sum over every place that uses it, is one in float32 at least: in
    bfloat16 it stops growing after some 256 alike terms.
    """
    return jnp.take(table_ND.astype(wide(table_ND.dtype)), index, axis=0, mode="clip").astype(table_ND.dtype)

"""Which dtype a statistic is taken in."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def wide(dtype: DTypeLike) -> jnp.dtype:
    """float64 stays float64; everything else is summed, exponentiated and rotated in float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)

"""Normalisation over the last dim, in float32 at least: statistics, and the sums over tokens that are the gradients of scale and bias."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.core.dtypes import wide


def rms_norm(x: Float[Array, "*n D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "*n D"]:
    """x / rms(x) * scale (Zhang and Sennrich, arXiv 1910.07467)."""
    x_wide = x.astype(wide(x.dtype))
    inverse = lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True) + eps)
    return (x_wide * inverse * scale_D.astype(x_wide.dtype)).astype(x.dtype)


def layer_norm(x: Float[Array, "*n D"], scale_D: Float[Array, "D"], bias_D: Float[Array, "D"], eps: float) -> Float[Array, "*n D"]:
    """(x - mean) / std * scale + bias (Ba et al., arXiv 1607.06450)."""
    x_wide = x.astype(wide(x.dtype))
    centred = x_wide - jnp.mean(x_wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale_D.astype(x_wide.dtype) + bias_D.astype(x_wide.dtype)).astype(x.dtype)

"""Rotary position embeddings (Su et al., arXiv 2104.09864) in the half-split form of Llama checkpoints."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """float64 [K/2]: theta^(-2i/K)."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def scale_llama3(
    freqs: np.ndarray, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_seq_len: int
) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / freqs
    low, high = original_max_seq_len / low_freq_factor, original_max_seq_len / high_freq_factor
    smooth = (original_max_seq_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * freqs / factor + smooth * freqs
    return np.where(wavelength > low, freqs / factor, np.where(wavelength < high, freqs, between))


def angles(positions_bS: Int[Array, "b S"], freqs: np.ndarray, dtype: jnp.dtype) -> tuple[Float[Array, "b S k"], Float[Array, "b S k"]]:
    """cos and sin [b, S, K/2] in `dtype`: float32 at least, for bfloat16 cannot tell positions 1000 and 1001 apart."""
    phase_bSk = positions_bS.astype(dtype)[..., None] * jnp.asarray(freqs, dtype)
    return jnp.cos(phase_bSk), jnp.sin(phase_bSk)


def rotate(x_bSHK: Float[Array, "b S H K"], cos_bSk: Array, sin_bSk: Array) -> Float[Array, "b S H K"]:
    """Rotate pairs (i, i + K/2) by the angle of their position."""
    first, second = jnp.split(x_bSHK.astype(cos_bSk.dtype), 2, axis=-1)
    cos, sin = cos_bSk[:, :, None, :], sin_bSk[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_bSHK.dtype)

"""Random bits as a function of global coordinates (law L3), so that no layout, recompute or restart changes them."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, UInt

from jaxpar.core.vma import vary_alike


def _threefry(k0: Array, k1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 elementwise (Salmon et al. 2011): key words (k0, k1), counter words (x0, x1), broadcast together."""
    args = vary_alike(*jnp.broadcast_arrays(k0, k1, x0, x1))
    first, second = threefry2x32_p.bind(*args)
    return first, second


def fold(key: tuple[Array, Array], *words: Array | int) -> tuple[Array, Array]:
    """A new key from a key and integers, one Threefry call a word."""
    k0, k1 = key
    for word in words:
        zero = jnp.zeros((), jnp.uint32)
        k0, k1 = _threefry(k0, k1, jnp.asarray(word).astype(jnp.uint32), zero)
    return k0, k1


def key_of(seed: int) -> tuple[Array, Array]:
    """The root key of a run."""
    return jnp.asarray(seed & 0xFFFFFFFF, jnp.uint32), jnp.asarray(seed >> 32, jnp.uint32)


def bits(key: tuple[Array, Array], sample_b: Array, position_S: Array, *features: Array) -> UInt[Array, "..."]:
    """uint32 [b, S, *features]: one word for each (sample, position, feature...), each given by its global index.

    At most two feature dims; the first may be a query position and the second a key position or head.
    """
    k0, k1 = fold(key, sample_b.astype(jnp.uint32))
    rank = 1 + len(features)
    k0, k1 = (k.reshape(k.shape + (1,) * rank) for k in (k0, k1))
    # Each index along its own dim of [b, S, *features].
    along = [index.astype(jnp.uint32).reshape((-1,) + (1,) * (rank - 1 - i)) for i, index in enumerate((position_S, *features))]
    for feature in along[1:-1]:
        k0, k1 = _threefry(k0, k1, feature, jnp.ones((), jnp.uint32))
    last = along[-1] if features else jnp.zeros((), jnp.uint32)
    return _threefry(k0, k1, along[0], last)[0]


def keep_mask(words: Array, rate: float) -> Array:
    """True where a word says keep, with probability 1 - rate to 2^-24."""
    return (words >> jnp.uint32(8)) >= jnp.uint32(round(rate * (1 << 24)))


def uniform(words: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Numbers in [0, 1) on a grid of 2^-24, exact in float32."""
    return (words >> jnp.uint32(8)).astype(dtype) * jnp.asarray(2.0**-24, dtype)


def dropout(x: Array, words: Array, rate: float) -> Array:
    """Inverted dropout (Srivastava et al. 2014) with given bits."""
    scale = jnp.asarray(1.0 / (1.0 - rate), x.dtype)
    return jnp.where(keep_mask(words, rate), x * scale, jnp.zeros((), x.dtype))


def init_key(seed: int, path: str) -> Array:
    """Key of a parameter's initial values: a function of (seed, path) alone; layers fold their index in."""
    return jax.random.fold_in(jax.random.key(seed), stable_hash(path))


def stable_hash(text: str) -> int:
    """FNV-1a, 31 bits: `hash` differs between Python processes."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value & 0x7FFFFFFF

"""Parameters of NNX modules: declared with shape, dim names and initial distribution, never allocated by a module."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.core.protocols import Initializer, ParamSpec
from jaxpar.core.typing import Array


def param(init: Initializer, shape: tuple[int, ...], names: tuple[str, ...], *, valid: tuple[int, ...] | None = None) -> nnx.Param:
    """Declare a parameter; the trainer makes its numbers from (seed, path, layer), sharded as `names` say.

    valid: sizes without padding; values beyond them are zero.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), spec=ParamSpec(shape, names, init, valid))


def normal(std: float) -> Initializer:
    """Normal distribution."""
    return lambda key, shape, dtype: jnp.asarray(std, dtype) * jax.random.normal(key, shape, dtype)


def ones(_key: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """All ones."""
    return jnp.ones(shape, dtype)


def zeros(_key: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """All zeros."""
    return jnp.zeros(shape, dtype)

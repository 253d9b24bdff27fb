"""Initial values: a function of (seed, parameter path, layer) alone (law L3), made sharded, padding zero."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.core.protocols import Model, ParamSpec
from jaxpar.core.tree import path_name
from jaxpar.core.typing import Array, Params
from jaxpar.ops.random import init_key


def is_spec(x: object) -> bool:
    """True for a leaf of `Model.params`."""
    return isinstance(x, ParamSpec)


def param_names(model: Model) -> Params:
    """Dim names of every stored parameter; blocks have a leading `layers`."""
    return _map(model, lambda path, spec: ("layers", *spec.names) if path.startswith("blocks.") else spec.names)


def param_shapes(model: Model, dtype: jax.typing.DTypeLike, rows: Sequence[int] | None = None) -> Params:
    """Shapes of the stored tree, without numbers."""
    return jax.eval_shape(lambda: init_params(model, 0, dtype, rows))


def init_params(model: Model, seed: int, dtype: jax.typing.DTypeLike, rows: Sequence[int] | None = None) -> Params:
    """The stored tree; jit it with output shardings, and no device holds more than its shard.

    rows: the layer of each stored row of the blocks, negative where a row belongs to none (it is zero); None: layers in order.
    """
    layer_of_row = tuple(range(model.num_layers)) if rows is None else tuple(rows)

    def one(path: str, spec: ParamSpec) -> Array:
        key = init_key(seed, path)
        if not path.startswith("blocks."):
            return _leaf(spec, key, dtype)
        layers = jnp.asarray([max(layer, 0) for layer in layer_of_row], jnp.uint32)
        leaf = jax.vmap(lambda layer: _leaf(spec, jax.random.fold_in(key, layer), dtype))(layers)
        if min(layer_of_row) >= 0:
            return leaf
        used = jnp.asarray([layer >= 0 for layer in layer_of_row]).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(used, leaf, jnp.zeros((), leaf.dtype))

    return _map(model, one)


def _leaf(spec: ParamSpec, key: Array, dtype: jax.typing.DTypeLike) -> Array:
    valid = spec.valid or spec.shape
    # Drawn at the unpadded size: padding to another multiple must not change the values of real rows.
    values = spec.init(key, valid, dtype)
    return jnp.pad(values, [(0, full - part) for full, part in zip(spec.shape, valid, strict=True)])


def _map(model: Model, f) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, spec: f(path_name(path), spec), model.params, is_leaf=is_spec)

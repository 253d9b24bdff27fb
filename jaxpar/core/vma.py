"""Varying manual axes: over which mesh axes a value inside `shard_map` differs between devices.

JAX tracks them in the type (`check_vma=True`). The transpose of marking a value as varying is a sum over those axes, so
where a parameter is marked decides where, and how often, its gradient is reduced.
"""

import jax
from jax import lax

from jaxpar.core.typing import Array, PyTree


def varying(x: Array) -> frozenset[str]:
    """Mesh axes over which `x` differs; empty outside `shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark every leaf as varying over `axes` (those over which it does not yet)."""

    def one(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Mark each array as varying over all axes that any of them varies over."""
    union = tuple(sorted(frozenset().union(*(varying(x) for x in arrays))))
    return tuple(vary(x, union) for x in arrays)

"""ZeRO (Rajbhandari et al., arXiv 1910.02054): gathering stored parameters, scattering gradients.

Stage 1 shards optimizer state, so gradients leave the step reduce-scattered; stage 2 scatters each microbatch's gradient
before it is accumulated; stage 3 stores parameters sharded and gathers a layer's when it is used.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxpar.config.dims import computes_exactly
from jaxpar.config.layout import Layout, LeafPlan
from jaxpar.core.typing import Params, PyTree
from jaxpar.core.vma import vary, varying
from jaxpar.mesh.specs import is_plan

# Weights up to this size (gathered) share one collective: below it the latency of a collective costs more than copying.
# Larger ones have their own, which needs no copy.
BUNDLE_BYTES = 1 << 20

Axes = tuple[str, ...]
Dims = tuple[int, ...]


def prepare(layout: Layout, plans: PyTree, weights: Params, *, dtype: jax.typing.DTypeLike, stacked: bool) -> Params:
    """Stored parameters of a part or a layer -> what it computes with: cast, and gathered under ZeRO-3.

    stacked: plans have a leading `layers` dim that the weights, slices of a scan, have not.
    """
    plan_leaves = jax.tree.leaves(plans, is_leaf=is_plan)
    leaves, tree = jax.tree.flatten(weights)
    dims = [None if layout.zero_stage < 3 or plan.zero_dim is None else plan.zero_dim - stacked for plan in plan_leaves]
    dtypes = [leaf.dtype if computes_exactly(plan.names) else jnp.dtype(dtype) for plan, leaf in zip(plan_leaves, leaves, strict=True)]
    for members in _bundles(layout, plan_leaves, leaves, dims, dtypes):
        shards = tuple(leaves[i] for i in members)
        gathered = _gather(plan_leaves[members[0]].zero_axes, tuple(dims[i] or 0 for i in members), dtypes[members[0]], shards)
        for i, w in zip(members, cast(tuple[Array, ...], gathered), strict=True):
            leaves[i] = w
    return jax.tree.unflatten(tree, [w.astype(to) for w, to in zip(leaves, dtypes, strict=True)])


def _bundles(
    layout: Layout, plans: Sequence[LeafPlan], leaves: Sequence[Array], dims: Sequence[int | None], dtypes: Sequence[jnp.dtype]
) -> list[list[int]]:
    """Which leaves are gathered together: small ones over the same axes that vary alike, for all that is packed varies alike."""
    alone: list[list[int]] = []
    small: dict[tuple[Axes, frozenset[str], jnp.dtype], list[int]] = {}
    for i in (i for i, dim in enumerate(dims) if dim is not None):
        axes = plans[i].zero_axes
        if leaves[i].size * leaves[i].dtype.itemsize * layout.size(axes) <= BUNDLE_BYTES:
            small.setdefault((axes, varying(leaves[i]), dtypes[i]), []).append(i)
        else:
            alone.append([i])
    return alone + list(small.values())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axes: Axes, dims: Dims, dtype: jax.typing.DTypeLike, shards: tuple[Array, ...]) -> tuple[Array, ...]:
    parts = [w.astype(dtype) for w in shards]
    if len(parts) == 1 and dims[0] == 0:
        return (lax.all_gather(parts[0], axes, axis=dims[0], tiled=True),)
    packed_WN = lax.all_gather(jnp.concatenate([w.ravel() for w in parts]), axes)
    return tuple(_merge(flat.reshape(-1, *w.shape), dim) for flat, w, dim in zip(_split(packed_WN, parts), parts, dims, strict=True))


def _gather_fwd(
    axes: Axes, dims: Dims, dtype: jax.typing.DTypeLike, shards: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    # The residuals carry the stored dtype and varying axes only.
    return _gather(axes, dims, dtype, shards), tuple(w[(slice(0, 0),) * w.ndim] for w in shards)


def _gather_bwd(
    axes: Axes, dims: Dims, _dtype: jax.typing.DTypeLike, like: tuple[Array, ...], grads: tuple[Array, ...]
) -> tuple[tuple[Array, ...]]:
    # Summed in the parameter's dtype: a bfloat16 sum over many devices loses the small contributions.
    wide = [vary(g.astype(was.dtype), axes) for g, was in zip(grads, like, strict=True)]
    if len(wide) == 1 and dims[0] == 0:
        summed = [lax.psum_scatter(wide[0], axes, scatter_dimension=dims[0], tiled=True)]
    else:
        ways = math.prod(lax.axis_size(axis) for axis in axes)
        parts = [_part(g, dim, ways) for g, dim in zip(wide, dims, strict=True)]
        packed_N = lax.psum_scatter(jnp.concatenate([p.reshape(ways, -1) for p in parts], axis=1), axes)
        summed = [flat.reshape(p.shape[1:]) for flat, p in zip(_split(packed_N, [p[0] for p in parts]), parts, strict=True)]
    return (tuple(vary(g, tuple(varying(was))) for g, was in zip(summed, like, strict=True)),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _split(packed: Array, like: Sequence[Array]) -> list[Array]:
    """The last dim cut into the sizes of the arrays that were packed."""
    ends = [0]
    for w in like:
        ends.append(ends[-1] + w.size)
    return [packed[..., a:b] for a, b in itertools.pairwise(ends)]


def _merge(parts_W: Array, dim: int) -> Array:
    """[W, *shard] -> the whole, shards side by side along `dim`."""
    moved = jnp.moveaxis(parts_W, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])


def _part(whole: Array, dim: int, ways: int) -> Array:
    """The inverse of `_merge`."""
    cut = whole.reshape(*whole.shape[:dim], ways, -1, *whole.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0)


def scatter_gradient(plan: LeafPlan, g: Array, *, stacked: bool = False) -> Array:
    """A device's partial gradient -> its shard, summed over the ZeRO axes (stages 1 and 2).

    stacked: the plan has a leading `layers` dim that the gradient has not.
    """
    if plan.zero_dim is None:
        return g
    return lax.psum_scatter(vary(g, plan.zero_axes), plan.zero_axes, scatter_dimension=plan.zero_dim - stacked, tiled=True)

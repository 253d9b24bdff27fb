"""ZeRO (Rajbhandari et al., arXiv 1910.02054) as three small functions on one leaf.

Stage 1 shards optimizer state, so gradients leave the step reduce-scattered; stage 2 scatters each microbatch's gradient
before it is accumulated; stage 3 stores parameters sharded and gathers a layer's when it is used.
"""

from functools import partial

import jax
from jax import lax
from jaxtyping import Array

from jaxpar.config.layout import Layout, LeafPlan
from jaxpar.core.vma import vary, varying


def prepare(layout: Layout, plan: LeafPlan, w: Array, *, dtype: jax.typing.DTypeLike, stacked: bool) -> Array:
    """A stored parameter -> what a layer computes with: cast, and gathered under ZeRO-3.

    stacked: `plan` has a leading `layers` dim that `w`, a slice of a scan, has not.
    """
    if layout.zero_stage >= 3 and plan.zero_dim is not None:
        return _gather(layout.zero_axes, plan.zero_dim - stacked, dtype, w)
    return w.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axes: tuple[str, ...], dim: int, dtype: jax.typing.DTypeLike, w: Array) -> Array:
    return lax.all_gather(w.astype(dtype), axes, axis=dim, tiled=True)


def _gather_fwd(axes: tuple[str, ...], dim: int, dtype: jax.typing.DTypeLike, w: Array) -> tuple[Array, Array]:
    return _gather(axes, dim, dtype, w), w[(slice(0, 0),) * w.ndim]  # the residual carries the stored dtype only


def _gather_bwd(axes: tuple[str, ...], dim: int, _dtype: jax.typing.DTypeLike, like: Array, g: Array) -> tuple[Array]:
    # Summed in the parameter's dtype: a bfloat16 sum over many devices loses the small contributions.
    summed = lax.psum_scatter(vary(g.astype(like.dtype), axes), axes, scatter_dimension=dim, tiled=True)
    return (vary(summed, tuple(varying(like))),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def scatter_gradient(layout: Layout, plan: LeafPlan, g: Array) -> Array:
    """A device's partial gradient -> its shard, summed over the ZeRO axes (stages 1 and 2)."""
    if plan.zero_dim is None or not layout.zero_axes:
        return g
    return lax.psum_scatter(vary(g, layout.zero_axes), layout.zero_axes, scatter_dimension=plan.zero_dim, tiled=True)

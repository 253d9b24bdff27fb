"""Capacity buffers through one all-to-all there and one back (GShard, arXiv 2006.16668, section 3.2).

Every expert has `capacity` places for each group, and a place belongs to one token of the group wherever its device is. So the buffers of
the devices that share a group (those of `context`) hold disjoint places: a reduce-scatter over `context` joins them and leaves each
device an equal share of the places to work on, which keeps the experts' work at top_k x tokens x capacity factor for any `context`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.config.exchange import filled_places
from jaxpar.config.layout import Layout
from jaxpar.core.protocols import Experts
from jaxpar.core.vma import vary
from jaxpar.parallel.dispatch.permute import collect, rows_of, spread
from jaxpar.parallel.dispatch.routed import Routed


def all_to_all(layout: Layout, x_nD: Float[Array, "n D"], routed: Routed, experts: Experts) -> tuple[Array, None]:
    """(every token's experts' outputs, weighted and summed, a partial sum where `mlp` is split; None: no row can be cut off)."""
    expert_axes, context = layout.split("experts"), layout.context_axes
    places = filled_places(routed.num_groups, routed.capacity, layout.size(context))
    kept = routed.place_nk >= 0
    place_nk = routed.group_n[:, None] * routed.capacity + routed.place_nk
    row_nk = jnp.where(kept, routed.expert_nk * places + place_nk, jnp.full_like(place_nk, -1))
    rows = rows_of(row_nk, routed.num_experts * places)
    buffer_ECD = spread(x_nD, rows).reshape(routed.num_experts, places, -1)
    if context:
        buffer_ECD = lax.psum_scatter(vary(buffer_ECD, context), context, scatter_dimension=1, tiled=True)
    if expert_axes:  # each device sends every other the places of that one's experts
        buffer_ECD = lax.all_to_all(buffer_ECD, expert_axes, split_axis=0, concat_axis=1, tiled=True)
    out_ECD = experts(buffer_ECD, _batched)
    if expert_axes:
        out_ECD = lax.all_to_all(out_ECD, expert_axes, split_axis=1, concat_axis=0, tiled=True)
    if context:
        out_ECD = lax.all_gather(out_ECD, context, axis=1, tiled=True)
    return collect(out_ECD.reshape(-1, out_ECD.shape[-1]), routed.gate_nk, rows), None


def _batched(rows_ECD: Array, weights_EDF: Array) -> Array:
    return jnp.einsum("ecd,edf->ecf", rows_ECD, weights_EDF)

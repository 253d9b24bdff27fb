"""Capacity buffers through one all-to-all there and one back (GShard, arXiv 2006.16668, section 3.2).

Every expert has `capacity` places for each group, and a place belongs to one token of the group wherever its device is. So the buffers of
the devices that share a group (those of `context`) hold disjoint places: a reduce-scatter over `context` joins them and leaves each
device an equal share of the places to work on, which keeps the experts' work at top_k x tokens x capacity factor for any `context`.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.config.exchange import filled_places
from jaxpar.config.layout import Layout
from jaxpar.core.protocols import Experts
from jaxpar.core.vma import vary, vary_alike, varying
from jaxpar.parallel.dispatch import weigh
from jaxpar.parallel.dispatch.permute import collect, rows_of, spread
from jaxpar.parallel.dispatch.routed import Routed


def all_to_all(layout: Layout, x_nD: Float[Array, "n D"], routed: Routed, experts: Experts) -> tuple[Array, None]:
    """(every token's experts' outputs, weighted and summed, a partial sum where `mlp` is split; None: no row can be cut off)."""
    way = Way(layout.split("experts"), layout.context_axes, layout.ways("experts"), layout.size(layout.context_axes))
    places = filled_places(routed.num_groups, routed.capacity, way.shards)
    kept = routed.place_nk >= 0
    place_nk = routed.group_n[:, None] * routed.capacity + routed.place_nk
    row_nk = jnp.where(kept, routed.expert_nk * places + place_nk, jnp.full_like(place_nk, -1))
    rows = rows_of(row_nk, routed.num_experts * places)
    buffer_ECD = spread(x_nD, rows).reshape(routed.num_experts, places, -1)
    unit_EC = weigh.unit_gates(routed.gate_nk, rows).reshape(routed.num_experts, places)
    buffer_ECD, unit_EC = cast(tuple[Array, Array], _there(way, *vary_alike(buffer_ECD, unit_EC)))  # custom_vjp hides the type
    out_ECD = way.back(weigh.run(experts, buffer_ECD, _batched, weigh.weighed_by(unit_EC)))
    return collect(out_ECD.reshape(-1, out_ECD.shape[-1]), routed.gate_nk, rows), None


@dataclass(frozen=True)
class Way:
    """Between buffers of all experts, with the places of this device's tokens filled, and whole places of this device's experts."""

    expert_axes: tuple[str, ...]
    context_axes: tuple[str, ...]
    ways: int
    shards: int

    def there(self, buffer_ECD: Array) -> Array:
        if self.context_axes:
            buffer_ECD = lax.psum_scatter(vary(buffer_ECD, self.context_axes), self.context_axes, scatter_dimension=1, tiled=True)
        if self.expert_axes:  # each device sends every other the places of that one's experts
            buffer_ECD = lax.all_to_all(buffer_ECD, self.expert_axes, split_axis=0, concat_axis=1, tiled=True)
        return buffer_ECD

    def back(self, out_ECD: Array) -> Array:
        if self.expert_axes:
            out_ECD = lax.all_to_all(out_ECD, self.expert_axes, split_axis=1, concat_axis=0, tiled=True)
        if self.context_axes:
            out_ECD = lax.all_gather(out_ECD, self.context_axes, axis=1, tiled=True)
        return out_ECD


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _there(way: Way, buffer_ECD: Array, unit_EC: Array) -> tuple[Array, Array]:
    """Units are 1 everywhere and do not travel; their gradients do, with those of the rows."""
    sent_ECD = way.there(buffer_ECD)
    return sent_ECD, vary(jnp.ones(sent_ECD.shape[:2], unit_EC.dtype), tuple(varying(sent_ECD)))


def _there_fwd(way: Way, buffer_ECD: Array, unit_EC: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return cast(tuple[Array, Array], _there(way, buffer_ECD, unit_EC)), (buffer_ECD[:0], unit_EC[:0])


def _there_bwd(way: Way, like: tuple[Array, Array], d: tuple[Array, Array]) -> tuple[Array, Array]:
    """The numbers of each expert's places in rows behind them: one exchange serves both."""
    d_ECD, d_EC = d
    if way.expert_axes or way.context_axes:
        experts, _, width = d_ECD.shape
        d_epCD, d_epC = (a.reshape(experts, way.ways, -1, *a.shape[2:]) for a in (d_ECD, d_EC))
        places = d_epCD.shape[2]
        both = jnp.concatenate([d_epCD, weigh.in_rows(d_epC, width, d_ECD.dtype)], axis=2)
        got = way.back(both.reshape(experts, -1, width))
        got = got.reshape(got.shape[0], way.shards, -1, width)
        d_ECD = got[:, :, :places].reshape(got.shape[0], -1, width)
        d_EC = weigh.out_of_rows(got[:, :, places:], places, d_EC.dtype).reshape(got.shape[0], -1)
    return vary(d_ECD, tuple(varying(like[0]))), vary(d_EC, tuple(varying(like[1])))


_there.defvjp(_there_fwd, _there_bwd)


def _batched(rows_ECD: Array, weights_EDF: Array) -> Array:
    return jnp.einsum("ecd,edf->ecf", rows_ECD, weights_EDF)

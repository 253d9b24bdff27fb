"""Rows sorted by expert: no place is empty but to fill up tiles, and none is dropped but by the router."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.core.protocols import Experts
from jaxpar.core.vma import vary_alike
from jaxpar.parallel.dispatch.grouped import Tiles
from jaxpar.parallel.dispatch.permute import collect, rows_of, spread
from jaxpar.parallel.dispatch.routed import Routed
from jaxpar.parallel.dispatch.weigh import run, unit_gates, weighed_by


def through_experts(x_nD: Float[Array, "n D"], routed: Routed, experts: Experts, tiles: Tiles) -> Float[Array, "n D"]:
    """Tokens through experts that are all here."""
    row_nk, sizes_E = by_expert(routed, tiles)
    rows = rows_of(row_nk, tiles.room(routed.most_choices, routed.num_experts))
    weigh = weighed_by(unit_gates(routed.gate_nk, rows))
    return collect(run(experts, spread(x_nD, rows), tiles.product(sizes_E), weigh), routed.gate_nk, rows)


def by_expert(routed: Routed, tiles: Tiles) -> tuple[Int[Array, "n k"], Int[Array, " E"]]:
    """(row of each choice when all are sorted by expert, then by token, -1 where it was dropped; choices of each expert)."""
    n, k = routed.expert_nk.shape
    num_experts = routed.num_experts
    flat_N = jnp.where(routed.place_nk >= 0, routed.expert_nk, jnp.full_like(routed.expert_nk, num_experts)).reshape(-1)
    flat_N, index_N = vary_alike(flat_N, jnp.arange(n * k, dtype=jnp.int32))
    sorted_N, order_N = lax.sort((flat_N, index_N), num_keys=2)
    ends_E = jnp.searchsorted(sorted_N, jnp.arange(num_experts, dtype=sorted_N.dtype), side="right").astype(jnp.int32)
    sizes_E = jnp.diff(ends_E, prepend=jnp.zeros_like(ends_E[:1]))
    expert_N = jnp.minimum(sorted_N, num_experts - 1)
    row_N = jnp.where(sorted_N < num_experts, index_N + (tiles.begin(sizes_E) - ends_E + sizes_E)[expert_N], jnp.full_like(index_N, -1))
    return jnp.zeros_like(index_N).at[order_N].set(row_N, unique_indices=True).reshape(n, k), sizes_E

"""Rows sorted by expert, one product for all of them: no place is empty and none is dropped but by the router."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxpar.core.protocols import Product
from jaxpar.core.vma import vary_alike
from jaxpar.parallel.dispatch.routed import Routed


def by_expert(routed: Routed) -> tuple[Int[Array, "n k"], Int[Array, " E"]]:
    """(row of each choice when all are sorted by expert, then by token, -1 where it was dropped; choices of each expert)."""
    n, k = routed.expert_nk.shape
    num_experts = routed.num_experts
    flat_N = jnp.where(routed.place_nk >= 0, routed.expert_nk, jnp.full_like(routed.expert_nk, num_experts)).reshape(-1)
    flat_N, index_N = vary_alike(flat_N, jnp.arange(n * k, dtype=jnp.int32))
    sorted_N, order_N = lax.sort((flat_N, index_N), num_keys=2)
    row_N = jnp.zeros_like(index_N).at[order_N].set(index_N, unique_indices=True)
    ends_E = jnp.searchsorted(sorted_N, jnp.arange(num_experts, dtype=sorted_N.dtype), side="right").astype(jnp.int32)
    sizes_E = jnp.diff(ends_E, prepend=jnp.zeros_like(ends_E[:1]))
    return jnp.where(flat_N < num_experts, row_N, jnp.full_like(row_N, -1)).reshape(n, k), sizes_E


def ragged_product(sizes_E: Array) -> Product:
    """Products of sorted rows, `sizes_E` of them for each expert; rows beyond their sum give zero."""

    def product(rows_ND: Array, weights_EDF: Array) -> Array:
        rows_ND, weights_EDF, sizes = vary_alike(rows_ND, weights_EDF, sizes_E)
        return lax.ragged_dot(rows_ND, weights_EDF, sizes)

    return product

"""Products of rows sorted by expert with the matrices of their experts.

On GPUs `lax.ragged_dot` takes rows in groups of any size. XLA:CPU multiplies all rows with every expert's matrix and masks, so there each
expert's rows are filled up to whole tiles, and a loop multiplies as many tiles as there are (the idea of MegaBlocks, arXiv 2211.15841,
section 5.1, without its kernels).
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.core.dtypes import wide
from jaxpar.core.protocols import Product
from jaxpar.core.vma import vary, vary_alike, varying

SMALLEST, LARGEST = 8, 128  # rows of a tile


@dataclass(frozen=True)
class Tiles:
    """How the rows of experts lie in a buffer: each expert's begin at a multiple of `rows`; 1: side by side."""

    rows: int

    def begin(self, sizes_E: Int[Array, " E"]) -> Int[Array, " E"]:
        """First row of each expert."""
        padded_E = -(-sizes_E // self.rows) * self.rows
        return jnp.cumsum(padded_E, dtype=jnp.int32) - padded_E

    def room(self, num_rows: int, num_experts: int) -> int:
        """Rows of a buffer in which `num_rows` fit, however they fall on experts."""
        return num_rows if self.rows == 1 else (-(-num_rows // self.rows) + num_experts) * self.rows

    def product(self, sizes_E: Int[Array, " E"]) -> Product:
        """Products of rows that lie so, `sizes_E` of each expert; other rows give zero, or what nobody reads."""
        if self.rows == 1:
            return partial(_ragged, sizes_E)
        begin_E = self.begin(sizes_E)
        return partial(_tiled, self.rows, begin_E, (begin_E[-1] + sizes_E[-1] + self.rows - 1) // self.rows)


def tiles_for(num_rows: int, num_experts: int, *, native: bool) -> Tiles:
    """native: for `lax.ragged_dot`. Else tiles of about half the rows of a balanced expert: filling them up costs a quarter on average."""
    if native:
        return Tiles(1)
    half = max(num_rows // (2 * num_experts), 1)
    return Tiles(min(max(1 << (half.bit_length() - 1), SMALLEST), LARGEST))


def _ragged(sizes_E: Array, rows_ND: Array, weights_EDF: Array) -> Array:
    rows_ND, weights_EDF, sizes_E = vary_alike(rows_ND, weights_EDF, sizes_E)
    return lax.ragged_dot(rows_ND, weights_EDF, sizes_E)


def _tiled(tile: int, begin_E: Array, used: Array, rows_ND: Array, weights_EDF: Array) -> Array:
    tile_t = jnp.arange(rows_ND.shape[0] // tile, dtype=jnp.int32) * tile
    # Of experts that begin together all but the last have no rows.
    expert_t = jnp.searchsorted(begin_E, tile_t, side="right").astype(jnp.int32) - 1
    return cast(Array, _product(tile, *vary_alike(rows_ND, weights_EDF, expert_t, used)))  # custom_vjp hides the type


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    tile: int, rows_ND: Float[Array, "N D"], weights_EDF: Float[Array, "E D F"], expert_t: Int[Array, " t"], used: Int[Array, ""]
) -> Float[Array, "N F"]:
    def one(t: Array, out_NF: Array) -> Array:
        y_TF = lax.dynamic_slice_in_dim(rows_ND, t * tile, tile) @ _at(weights_EDF, expert_t[t])
        return lax.dynamic_update_slice_in_dim(out_NF, y_TF, t * tile, 0)

    empty_NF = jnp.zeros((rows_ND.shape[0], weights_EDF.shape[2]), rows_ND.dtype)
    return cast(Array, lax.fori_loop(jnp.zeros_like(used), used, one, vary(empty_NF, tuple(varying(rows_ND)))))


def _product_fwd(tile: int, rows_ND: Array, weights_EDF: Array, expert_t: Array, used: Array) -> tuple[Array, tuple[Array, ...]]:
    return _product(tile, rows_ND, weights_EDF, expert_t, used), (rows_ND, weights_EDF, expert_t, used)


def _product_bwd(tile: int, saved: tuple[Array, ...], dy_NF: Array) -> tuple[Array, Array, None, None]:
    rows_ND, weights_EDF, expert_t, used = saved
    dx_ND = cast(Array, _product(tile, dy_NF, jnp.swapaxes(weights_EDF, 1, 2), expert_t, used))

    def one(t: Array, dw_EDF: Array) -> Array:
        x_TD, dy_TF = (lax.dynamic_slice_in_dim(a, t * tile, tile) for a in (rows_ND, dy_NF))
        part_DF = jnp.matmul(x_TD.T, dy_TF, preferred_element_type=dw_EDF.dtype)
        return lax.dynamic_update_index_in_dim(dw_EDF, _at(dw_EDF, expert_t[t]) + part_DF, expert_t[t], 0)

    none_EDF = vary(jnp.zeros(weights_EDF.shape, wide(weights_EDF.dtype)), tuple(varying(weights_EDF)))
    dw_EDF = cast(Array, lax.fori_loop(jnp.zeros_like(used), used, one, none_EDF))
    return dx_ND, dw_EDF.astype(weights_EDF.dtype), None, None


_product.defvjp(_product_fwd, _product_bwd)


def _at(a: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(a, i, keepdims=False)

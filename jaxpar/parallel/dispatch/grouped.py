"""Products of rows sorted by expert with the matrices of their experts.

XLA lowers `lax.ragged_dot` on CPUs and GPUs to a product of all rows with every expert's matrix. So each expert's rows are filled up to
whole tiles, as many of which are multiplied as there are (the idea of MegaBlocks, arXiv 2211.15841, section 5.1): on GPUs by one kernel,
elsewhere by a loop, whose every turn would wait for the host there.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.core.dtypes import wide
from jaxpar.core.protocols import Product
from jaxpar.core.vma import vary, vary_alike, varying
from jaxpar.parallel.dispatch import grouped_gpu

SMALLEST, LARGEST = 8, 128  # rows of a tile


@dataclass(frozen=True)
class Tiles:
    """How the rows of experts lie in a buffer: each expert's begin at a multiple of `rows`; 1: side by side."""

    rows: int
    kernel: bool = False  # multiplied by `grouped_gpu`
    interpret: bool = False  # the kernel without a GPU, for tests

    def begin(self, sizes_E: Int[Array, " E"]) -> Int[Array, " E"]:
        """First row of each expert."""
        padded_E = -(-sizes_E // self.rows) * self.rows
        return jnp.cumsum(padded_E, dtype=jnp.int32) - padded_E

    def room(self, num_rows: int, num_experts: int) -> int:
        """Rows of a buffer in which `num_rows` fit, however they fall on experts."""
        return num_rows if self.rows == 1 else (-(-num_rows // self.rows) + num_experts) * self.rows

    def product(self, sizes_E: Int[Array, " E"]) -> Product:
        """Products of rows that lie so, `sizes_E` of each expert; other rows give zero, or what nobody reads."""
        return partial(_tiled, self, jnp.cumsum(-(-sizes_E // self.rows), dtype=jnp.int32))


def tiles_for(num_rows: int, num_experts: int, *, native: bool) -> Tiles:
    """Tiles of about half the rows of a balanced expert: filling them up costs a quarter on average. native: for the kernels of GPUs."""
    half = max(num_rows // (2 * num_experts), 1)
    return Tiles(min(max(1 << (half.bit_length() - 1), grouped_gpu.LEAST if native else SMALLEST), LARGEST), native)


def product_words(native: bool, dtype: jnp.dtype, *dims: int) -> str:
    """Which of the two multiplies rows of a dtype with matrices of these dims, and why. native: on a GPU."""
    if not native:
        return "a loop"
    why = grouped_gpu.refusal(dtype, *dims)
    return f"a loop ({why})" if why else "one GPU kernel"


def _tiled(tiles: Tiles, end_E: Array, rows_ND: Array, weights_EDF: Array) -> Array:
    edge_e = jnp.concatenate([jnp.zeros_like(end_E[:1]), end_E])
    kernel = tiles.kernel and not grouped_gpu.refusal(rows_ND.dtype, *weights_EDF.shape[1:])
    return cast(Array, _product(replace(tiles, kernel=kernel), *vary_alike(rows_ND, weights_EDF, edge_e)))  # custom_vjp hides the type


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    tiles: Tiles, rows_ND: Float[Array, "N D"], weights_EDF: Float[Array, "E D F"], edge_e: Int[Array, " e"]
) -> Float[Array, "N F"]:
    """edge_e: first tile of each expert, and the first that is nobody's."""
    if tiles.kernel:
        expert_t = _expert(tiles, rows_ND, edge_e)
        return grouped_gpu.times_weights(tiles.rows, rows_ND, weights_EDF, edge_e, expert_t, interpret=tiles.interpret)
    return _loop(tiles, rows_ND, weights_EDF, edge_e)


def _loop(tiles: Tiles, rows_ND: Array, weights_EDF: Array, edge_e: Array) -> Array:
    tile, expert_t, used = tiles.rows, _expert(tiles, rows_ND, edge_e), edge_e[-1]

    def one(t: Array, out_NF: Array) -> Array:
        y_TF = lax.dynamic_slice_in_dim(rows_ND, t * tile, tile) @ _at(weights_EDF, expert_t[t])
        return lax.dynamic_update_slice_in_dim(out_NF, y_TF, t * tile, 0)

    empty_NF = jnp.zeros((rows_ND.shape[0], weights_EDF.shape[2]), rows_ND.dtype)
    return cast(Array, lax.fori_loop(jnp.zeros_like(used), used, one, vary(empty_NF, tuple(varying(rows_ND)))))


def _product_fwd(tiles: Tiles, rows_ND: Array, weights_EDF: Array, edge_e: Array) -> tuple[Array, tuple[Array, ...]]:
    return _product(tiles, rows_ND, weights_EDF, edge_e), (rows_ND, weights_EDF, edge_e)


def _product_bwd(tiles: Tiles, saved: tuple[Array, ...], dy_NF: Array) -> tuple[Array, Array, None]:
    rows_ND, weights_EDF, edge_e = saved
    expert_t = _expert(tiles, rows_ND, edge_e)
    if tiles.kernel:
        dx_ND = grouped_gpu.times_weights(tiles.rows, dy_NF, weights_EDF, edge_e, expert_t, transposed=True, interpret=tiles.interpret)
        dw_EDF = grouped_gpu.times_rows(tiles.rows, rows_ND, dy_NF, edge_e, weights_EDF.dtype, interpret=tiles.interpret)
        return dx_ND, dw_EDF, None
    tile, used = tiles.rows, edge_e[-1]
    dx_ND = _loop(tiles, dy_NF, jnp.swapaxes(weights_EDF, 1, 2), edge_e)

    def one(t: Array, dw_EDF: Array) -> Array:
        x_TD, dy_TF = (lax.dynamic_slice_in_dim(a, t * tile, tile) for a in (rows_ND, dy_NF))
        part_DF = jnp.matmul(x_TD.T, dy_TF, preferred_element_type=dw_EDF.dtype)
        return lax.dynamic_update_index_in_dim(dw_EDF, _at(dw_EDF, expert_t[t]) + part_DF, expert_t[t], 0)

    none_EDF = vary(jnp.zeros(weights_EDF.shape, wide(weights_EDF.dtype)), tuple(varying(weights_EDF)))
    dw_EDF = cast(Array, lax.fori_loop(jnp.zeros_like(used), used, one, none_EDF))
    return dx_ND, dw_EDF.astype(weights_EDF.dtype), None


_product.defvjp(_product_fwd, _product_bwd)


def _expert(tiles: Tiles, rows_ND: Array, edge_e: Array) -> Array:
    """Whose each tile is. Of experts that begin together all but the last have no rows."""
    tile_t = jnp.arange(rows_ND.shape[0] // tiles.rows, dtype=jnp.int32)
    return jnp.searchsorted(edge_e[:-1], tile_t, side="right").astype(jnp.int32) - 1


def _at(a: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(a, i, keepdims=False)

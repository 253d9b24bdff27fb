"""The products of `grouped` as one GPU kernel each (Pallas to Triton), over rows that lie in whole tiles of one expert.

XLA:GPU has no grouped product that it compiles for all three passes (JAX 0.10.2, 0.12.0.1): it multiplies all rows with every expert's
matrix. Compiled for H100s and interpreted in tests; not run on one.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

LEAST = 16  # rows or columns that a tensor core takes
MOST, DEPTH = 128, 64  # rows and columns of a block; of what is summed at a time
TOGETHER = 8  # blocks of rows that share columns in the L2 cache


def refusal(dtype: jnp.dtype, *dims: int) -> str:
    """Why the kernels do not take matrices of these dims, in words; empty where they do."""
    if dtype.itemsize > 4:
        return f"the GPU kernel sums in float32, rows are {dtype.name}"
    odd = [str(dim) for dim in dims if dim % LEAST]
    return f"the GPU kernel takes dims that are multiples of {LEAST}, not {', '.join(odd)}" if odd else ""


def times_weights(
    tile: int,
    rows_ND: Float[Array, "N D"],
    weights_EDF: Float[Array, "E D F"],
    edge_e: Int[Array, " e"],
    expert_t: Int[Array, " t"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "N F"]:
    """edge_e: first tile of each expert, and the first that is nobody's, whose rows give zero. expert_t: whose each tile is.

    transposed: weights are [E, F, D].
    """
    (num_rows, depth), cols = rows_ND.shape, weights_EDF.shape[1 if transposed else 2]
    tiles = num_rows // tile
    bn, bk = _block(cols, MOST), _block(depth, DEPTH)

    def kernel(edge_ref: Any, expert_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        t, n = _place(pl.program_id(0), tiles, cols // bn)
        e = expert_ref[t]

        def add(k: Array, sum_TF: Array) -> Array:
            x = x_ref[pl.ds(t * tile, tile), pl.ds(k * bk, bk)]
            if transposed:
                return sum_TF + _dot(x, w_ref[e, pl.ds(n * bn, bn), pl.ds(k * bk, bk)], 1, 1)
            return sum_TF + _dot(x, w_ref[e, pl.ds(k * bk, bk), pl.ds(n * bn, bn)], 1, 0)

        steps = jnp.where(t < edge_ref[edge_e.shape[0] - 1], jnp.int32(depth // bk), jnp.int32(0))
        y_TF = lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((tile, bn), jnp.float32))
        y_ref[pl.ds(t * tile, tile), pl.ds(n * bn, bn)] = y_TF.astype(y_ref.dtype)

    call = _call(kernel, (tiles * (cols // bn),), 4, _like(rows_ND, (num_rows, cols), rows_ND.dtype), interpret)
    return cast(Array, call(edge_e, expert_t, rows_ND, weights_EDF))


def times_rows(
    tile: int,
    rows_ND: Float[Array, "N D"],
    dy_NF: Float[Array, "N F"],
    edge_e: Int[Array, " e"],
    dtype: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "E D F"]:
    """Each expert's rows, transposed, times its rows of `dy_NF`. Rows that fill up a tile must be zero in one of them."""
    (_, depth), cols, experts = rows_ND.shape, dy_NF.shape[1], edge_e.shape[0] - 1
    bd, bf, bk = _block(depth, MOST), _block(cols, MOST), min(tile, DEPTH)

    def kernel(edge_ref: Any, x_ref: Any, dy_ref: Any, dw_ref: Any) -> None:
        e = pl.program_id(1)
        d, f = _place(pl.program_id(0), depth // bd, cols // bf)

        def add(k: Array, sum_DF: Array) -> Array:
            return sum_DF + _dot(x_ref[pl.ds(k * bk, bk), pl.ds(d * bd, bd)], dy_ref[pl.ds(k * bk, bk), pl.ds(f * bf, bf)], 0, 0)

        of = tile // bk
        dw_DF = lax.fori_loop(edge_ref[e] * of, edge_ref[e + 1] * of, add, jnp.zeros((bd, bf), jnp.float32))
        dw_ref[e, pl.ds(d * bd, bd), pl.ds(f * bf, bf)] = dw_DF.astype(dw_ref.dtype)

    call = _call(kernel, ((depth // bd) * (cols // bf), experts), 3, _like(rows_ND, (experts, depth, cols), dtype), interpret)
    return cast(Array, call(edge_e, rows_ND, dy_NF))


def _call(kernel: Any, grid: tuple[int, ...], num_inputs: int, out: jax.ShapeDtypeStruct, interpret: bool) -> Any:
    from jax.experimental.pallas import triton  # deprecated since JAX 0.11: imported where it is used

    whole = pl.BlockSpec(memory_space=pl.ANY)
    params = None if interpret else triton.CompilerParams(num_warps=8, num_stages=3)
    specs = {"in_specs": [whole] * num_inputs, "out_specs": whole}
    return pl.pallas_call(kernel, out, grid=grid, compiler_params=params, interpret=interpret, **specs)


def _like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _block(size: int, most: int) -> int:
    """The largest power of two that divides `size`, `most` at most."""
    return min(size & -size, most)


def _place(at: Array, rows: int, cols: int) -> tuple[Array, Array]:
    """(row, column) of a block, so that blocks of about the same time share operands in the cache."""
    group, within = lax.div(at, jnp.int32(TOGETHER * cols)), lax.rem(at, jnp.int32(TOGETHER * cols))
    height = jnp.minimum(rows - group * TOGETHER, TOGETHER)
    return group * TOGETHER + lax.rem(within, height), lax.div(within, height)


def _dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    return lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32)

"""Rows of tokens -> rows of expert buffers and back: gathers both ways, so that no gradient is a scatter with colliding rows.

Each token goes to at most k rows and each row holds at most one token, so the transpose of one gather is another gather followed by a
sum over k. XLA's own transpose, a scatter-add, is slower and on GPUs not deterministic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.core.dtypes import wide
from jaxpar.core.vma import vary, vary_alike, varying

UNROLLED = 8  # choices a token summed one after the other in straight code; more (expert_choice) in a loop


class Rows(NamedTuple):
    """Which row of a buffer holds which choice. row_nk: of each choice, -1 if none. choice_R: token x k + j of each row, -1 if empty."""

    row_nk: Int[Array, "n k"]
    choice_R: Int[Array, " R"]


def rows_of(row_nk: Int[Array, "n k"], num_rows: int) -> Rows:
    """Both directions, from the row of each choice (no two alike)."""
    flat_N = row_nk.reshape(-1)
    index_N = jnp.arange(flat_N.shape[0], dtype=jnp.int32)
    empty_R = jnp.full((num_rows + 1,), -1, jnp.int32)  # the last takes what has no row
    empty_R, target_N, index_N = vary_alike(empty_R, jnp.where(flat_N < 0, jnp.full_like(flat_N, num_rows), flat_N), index_N)
    return Rows(row_nk, empty_R.at[target_N].set(index_N)[:num_rows])


@jax.custom_vjp
def spread(x_nD: Float[Array, "n D"], rows: Rows) -> Float[Array, "R D"]:
    """The rows of a buffer: the token of each, zero where there is none."""
    return _of_tokens(x_nD, rows)


def _spread_fwd(x_nD: Array, rows: Rows) -> tuple[Array, tuple[Array, Rows]]:
    return spread(x_nD, rows), (x_nD[:0], rows)


def _spread_bwd(saved: tuple[Array, Rows], dy_RD: Array) -> tuple[Array, None]:
    like, rows = saved
    dx_nD = _sum_over_choices(dy_RD, rows.row_nk, None).astype(like.dtype)
    return vary(dx_nD, tuple(varying(like))), None


spread.defvjp(_spread_fwd, _spread_bwd)


@jax.custom_vjp
def collect(y_RD: Float[Array, "R D"], gate_nk: Float[Array, "n k"], rows: Rows) -> Float[Array, "n D"]:
    """For each token the sum of its rows times their gates; summed in float32 at least. Gates are constants here: they learn where the
    experts are (`parallel.dispatch.weigh`), so that no row is kept for the backward pass."""
    return _sum_over_choices(y_RD, rows.row_nk, gate_nk).astype(y_RD.dtype)


def _collect_fwd(y_RD: Array, gate_nk: Array, rows: Rows) -> tuple[Array, tuple[Array, Array, Rows]]:
    return collect(y_RD, gate_nk, rows), (y_RD[:0], gate_nk, rows)


def _collect_bwd(saved: tuple[Array, Array, Rows], dy_nD: Array) -> tuple[Array, Array, None]:
    like, gate_nk, rows = saved
    exact = wide(like.dtype)
    dy_RD = _of_tokens(dy_nD, rows).astype(exact) * taken(gate_nk.reshape(-1, 1), rows.choice_R).astype(exact)
    return vary(dy_RD.astype(like.dtype), tuple(varying(like))), jnp.zeros_like(gate_nk), None


collect.defvjp(_collect_fwd, _collect_bwd)


def _of_tokens(x_nD: Array, rows: Rows) -> Array:
    k = rows.row_nk.shape[1]
    return taken(x_nD, jnp.where(rows.choice_R < 0, rows.choice_R, rows.choice_R // k))


def taken(x: Array, index: Array) -> Array:
    """Rows of x; zeros where the index is negative."""
    x, index = vary_alike(x, index)
    found = jnp.take(x, jnp.maximum(index, 0), axis=0, mode="clip")
    return jnp.where((index >= 0).reshape(-1, *[1] * (x.ndim - 1)), found, jnp.zeros((), x.dtype))


def _sum_over_choices(y_RD: Array, row_nk: Array, gate_nk: Array | None) -> Array:
    """[n, D]: rows of each token added up, times gates where there are any."""
    exact = wide(y_RD.dtype)

    def one(row_n: Array, gate_n: Array | None) -> Array:
        part_nD = taken(y_RD, row_n).astype(exact)
        return part_nD if gate_n is None else part_nD * gate_n.astype(exact)[:, None]

    k = row_nk.shape[1]
    if k <= UNROLLED:
        total = one(row_nk[:, 0], None if gate_nk is None else gate_nk[:, 0])
        for j in range(1, k):
            total = total + one(row_nk[:, j], None if gate_nk is None else gate_nk[:, j])
        return total
    columns = (row_nk.T, None if gate_nk is None else gate_nk.T)
    start = jnp.zeros_like(one(*jax.tree.map(lambda a: a[0], columns)))
    total, _ = jax.lax.scan(lambda acc, column: (acc + one(*column), None), start, columns)
    return total

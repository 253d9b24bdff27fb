"""Gradients of gates without the experts' outputs: taken where the experts are, from what enters their last map.

An output y = h W counts g times. Its gate's gradient is <dy, y> = <dy W^T, h> = <g dy W^T, h> / g, and g dy W^T is what comes back at h
anyway. So no output has to be kept for the backward pass, nor be computed and exchanged once more under remat: one number a row
travels back instead. Where g = 0 the gradient is taken as 0: gates are made of scores that have slope 0 there.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.config.exchange import NUMBER_COLUMNS, rows_of_numbers
from jaxpar.core.dtypes import wide
from jaxpar.core.protocols import Experts, Product, Weigh
from jaxpar.core.vma import vary, vary_alike, varying
from jaxpar.parallel.dispatch.permute import Rows, taken


def weighed_by(unit: Float[Array, "*r"]) -> Weigh:
    """What experts apply to the rows before their last map, for `unit` to get its gradient."""
    return lambda h: cast(Array, _weigh(*vary_alike(h, unit)))  # custom_vjp hides the type


def run(experts: Experts, rows: Array, product: Product, weigh: Weigh) -> Array:
    """experts(rows, product, weigh), which must have applied `weigh` once."""
    calls = 0

    def counted(h: Array) -> Array:
        nonlocal calls
        calls += 1
        return weigh(h)

    out = experts(rows, product, counted)
    if calls != 1:
        raise ValueError(f"experts: `weigh` applied {calls} times; apply it once, to the rows that enter the last map: gates learn from it")
    return out


@jax.custom_vjp
def unit_gates(gate_nk: Float[Array, "n k"], rows: Rows) -> Float[Array, " R"]:
    """1 for each row; what comes back for a row is its gate's gradient times its gate."""
    return vary(jnp.ones(rows.choice_R.shape, gate_nk.dtype), tuple(varying(gate_nk)))


def _unit_gates_fwd(gate_nk: Array, rows: Rows) -> tuple[Array, tuple[Array, Array]]:
    return unit_gates(gate_nk, rows), (gate_nk, rows.row_nk)


def _unit_gates_bwd(saved: tuple[Array, Array], d_R: Array) -> tuple[Array, None]:
    gate_nk, row_nk = saved
    times_gate_nk = taken(d_R[:, None], row_nk.reshape(-1)).reshape(gate_nk.shape)
    some_nk = gate_nk != 0
    dgate_nk = jnp.where(some_nk, times_gate_nk / jnp.where(some_nk, gate_nk, jnp.ones_like(gate_nk)), jnp.zeros_like(gate_nk))
    return vary(dgate_nk.astype(gate_nk.dtype), tuple(varying(gate_nk))), None


unit_gates.defvjp(_unit_gates_fwd, _unit_gates_bwd)


@jax.custom_vjp
def _weigh(h: Float[Array, "*r F"], unit: Float[Array, "*r"]) -> Float[Array, "*r F"]:
    del unit
    return h


def _weigh_fwd(h: Array, unit: Array) -> tuple[Array, tuple[Array, Array]]:
    return h, (h, unit[:0])


def _weigh_bwd(saved: tuple[Array, Array], dh: Array) -> tuple[Array, Array]:
    h, like = saved
    exact = wide(h.dtype)
    return dh, jnp.sum(dh.astype(exact) * h.astype(exact), axis=-1).astype(like.dtype)


_weigh.defvjp(_weigh_fwd, _weigh_bwd)


def in_rows(numbers: Float[Array, "*p C"], width: int, dtype: jnp.dtype) -> Float[Array, "*p R width"]:
    """Numbers of full precision in rows of a dtype, to travel behind others."""
    flat = jnp.concatenate(_parts(numbers, dtype), axis=-1)
    num_rows = rows_of_numbers(numbers.shape[-1], width, dtype.itemsize)
    return _filled(flat, num_rows * width).reshape(*numbers.shape[:-1], num_rows, width)


def out_of_rows(rows: Float[Array, "*p R width"], count: int, dtype: jnp.dtype) -> Float[Array, "*p C"]:
    """The inverse of `in_rows`."""
    flat = rows.reshape(*rows.shape[:-2], -1).astype(dtype)
    return flat[..., :count] + flat[..., count : 2 * count] if rows.dtype.itemsize < dtype.itemsize else flat[..., :count]


def in_columns(numbers_N: Float[Array, " N"], dtype: jnp.dtype) -> Float[Array, "N c"]:
    """One number a row in columns beside others."""
    return _filled(jnp.stack(_parts(numbers_N, dtype), axis=-1), NUMBER_COLUMNS)


def out_of_columns(columns_Nc: Float[Array, "N c"], dtype: jnp.dtype) -> Float[Array, " N"]:
    """The inverse of `in_columns`."""
    wide_Nc = columns_Nc.astype(dtype)
    return wide_Nc[:, 0] + wide_Nc[:, 1]


def _parts(numbers: Array, dtype: jnp.dtype) -> list[Array]:
    """In a narrower dtype each number is two: what it rounds to, and what that leaves."""
    first = numbers.astype(dtype)
    return [first, (numbers - first.astype(numbers.dtype)).astype(dtype)] if dtype.itemsize < numbers.dtype.itemsize else [first]


def _filled(a: Array, size: int) -> Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])])

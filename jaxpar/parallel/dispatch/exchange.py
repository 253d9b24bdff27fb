"""Rows to the devices that want them, in runs of any length: `lax.ragged_all_to_all`, or what gives the same bits where XLA has none.

XLA:CPU does not implement the collective; there each run travels in a buffer as long as the longest possible one. The index maths is the
same, and the tests hold it to NumPy.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.core.vma import vary, vary_alike, varying
from jaxpar.parallel.dispatch.weigh import in_columns, out_of_columns


class Runs(NamedTuple):
    """Runs of rows between this device and its peers, of p peers. from_p, size_p: what it sends each. at_p: where each begins on the
    receiver. got_from_p, got_size_p, got_at_p: the same of what it receives: where it begins on the sender, its length, where it lies here.
    """

    from_p: Int[Array, " p"]
    size_p: Int[Array, " p"]
    at_p: Int[Array, " p"]
    got_from_p: Int[Array, " p"]
    got_size_p: Int[Array, " p"]
    got_at_p: Int[Array, " p"]

    @property
    def back(self) -> "Runs":
        """The same rows on their way back."""
        return Runs(self.got_at_p, self.got_size_p, self.got_from_p, self.at_p, self.size_p, self.from_p)


def runs_of(wanted_pp: Int[Array, "p p"], me: Array | int, room: int) -> Runs:
    """Runs where device i has wanted[i, j] rows for j, side by side in the order of j, and a device has `room` for what it receives, in
    the order of senders. What does not fit any more is cut off: of the last senders, their last rows."""
    from_pp = jnp.cumsum(wanted_pp, axis=1, dtype=jnp.int32) - wanted_pp
    at_pp = jnp.minimum(jnp.cumsum(wanted_pp, axis=0, dtype=jnp.int32) - wanted_pp, room)
    size_pp = jnp.minimum(wanted_pp, room - at_pp)

    def row(table_pp: Array) -> Array:
        return lax.dynamic_index_in_dim(table_pp, me, axis=0, keepdims=False)

    def column(table_pp: Array) -> Array:
        return lax.dynamic_index_in_dim(table_pp, me, axis=1, keepdims=False)

    return Runs(row(from_pp), row(size_pp), row(at_pp), column(from_pp), column(size_pp), column(at_pp))


@dataclass(frozen=True)
class Exchange:
    """axes: of the devices that exchange. native: by the collective that XLA:CPU lacks."""

    axes: tuple[str, ...]
    native: bool

    def __call__(self, rows_ND: Float[Array, "N D"], runs: Runs, num_rows: int) -> Float[Array, "R D"]:
        """What this device receives, `num_rows` long; rows that nobody sends are zero."""
        return _exchange(self, num_rows, rows_ND, runs)

    def with_units(
        self, rows_ND: Float[Array, "N D"], unit_N: Float[Array, " N"], runs: Runs, num_rows: int
    ) -> tuple[Float[Array, "R D"], Float[Array, " R"]]:
        """The same, and a 1 for each: units do not travel, but their gradients come back beside those of the rows."""
        return cast(tuple[Array, Array], _with_units(self, num_rows, *vary_alike(rows_ND, unit_N), runs))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(exchange: Exchange, num_rows: int, rows_ND: Array, runs: Runs) -> Array:
    return (_native if exchange.native else _padded)(exchange.axes, num_rows, rows_ND, runs)


def _exchange_fwd(exchange: Exchange, num_rows: int, rows_ND: Array, runs: Runs) -> tuple[Array, tuple[Array, Runs]]:
    return _exchange(exchange, num_rows, rows_ND, runs), (rows_ND[:, :0], runs)


def _exchange_bwd(exchange: Exchange, _num_rows: int, saved: tuple[Array, Runs], dy_RD: Array) -> tuple[Array, None]:
    like, runs = saved
    back = cast(Array, _exchange(exchange, like.shape[0], dy_RD, runs.back))  # custom_vjp hides the type
    return vary(back.astype(like.dtype), tuple(varying(like))), None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_units(exchange: Exchange, num_rows: int, rows_ND: Array, unit_N: Array, runs: Runs) -> tuple[Array, Array]:
    got_RD = exchange(rows_ND, runs, num_rows)
    return got_RD, vary(jnp.ones(num_rows, unit_N.dtype), tuple(varying(got_RD)))


def _with_units_fwd(exchange: Exchange, num_rows: int, rows_ND: Array, unit_N: Array, runs: Runs) -> tuple[Any, tuple[Array, Array, Runs]]:
    return _with_units(exchange, num_rows, rows_ND, unit_N, runs), (rows_ND[:, :0], unit_N[:0], runs)


def _with_units_bwd(
    exchange: Exchange, _num_rows: int, saved: tuple[Array, Array, Runs], d: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    (like_N0, like_0, runs), (d_RD, d_R) = saved, d
    both = jnp.concatenate(vary_alike(d_RD, in_columns(d_R, d_RD.dtype)), axis=1)
    back = exchange(both, runs.back, like_N0.shape[0])
    d_ND, d_N = back[:, : d_RD.shape[1]], out_of_columns(back[:, d_RD.shape[1] :], like_0.dtype)
    return vary(d_ND, tuple(varying(like_N0))), vary(d_N, tuple(varying(like_0))), None


_with_units.defvjp(_with_units_fwd, _with_units_bwd)


def _native(axes: tuple[str, ...], num_rows: int, rows_ND: Array, runs: Runs) -> Array:
    empty_RD = jnp.zeros((num_rows, rows_ND.shape[1]), rows_ND.dtype)
    rows_ND, empty_RD, *numbers = vary_alike(rows_ND, empty_RD, runs.from_p, runs.size_p, runs.at_p, runs.got_size_p)
    return lax.ragged_all_to_all(rows_ND, empty_RD, *numbers, axis_name=axes)


def _padded(axes: tuple[str, ...], num_rows: int, rows_ND: Array, runs: Runs) -> Array:
    """Each run at the beginning of a buffer of its own; received, the runs are pushed together."""
    longest = min(rows_ND.shape[0], num_rows)
    offset_W = jnp.arange(longest, dtype=jnp.int32)
    index_pW = runs.from_p[:, None] + offset_W
    sent_pWD = _where_rows(offset_W < runs.size_p[:, None], rows_ND, index_pW)
    got_pWD = lax.all_to_all(sent_pWD, axes, split_axis=0, concat_axis=0, tiled=True)
    row_R = jnp.arange(num_rows, dtype=jnp.int32)
    peer_R = jnp.clip(jnp.searchsorted(runs.got_at_p, row_R, side="right").astype(jnp.int32) - 1, 0)
    within_R = row_R - runs.got_at_p[peer_R]
    # A run of no rows begins where the next one does; the search finds the last of them, which has the rows.
    flat_R = peer_R * longest + within_R
    return _where_rows(within_R < runs.got_size_p[peer_R], got_pWD.reshape(-1, rows_ND.shape[1]), flat_R)


def _where_rows(here: Array, rows_ND: Array, index: Array) -> Array:
    here, rows_ND, index = vary_alike(here, rows_ND, index)
    return jnp.where(here[..., None], jnp.take(rows_ND, index, axis=0, mode="clip"), jnp.zeros((), rows_ND.dtype))

"""Dropless: rows sorted by expert, sent in runs of the length that they have, one product for all (MegaBlocks, arXiv 2211.15841).

A device has room for `buffer_factor` x the rows that it would get if all were balanced (None: for all that can come); rows beyond are cut
off and counted.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.config.layout import Layout
from jaxpar.core.protocols import Experts
from jaxpar.parallel.dispatch.exchange import Exchange, Runs, runs_of
from jaxpar.parallel.dispatch.grouped import Tiles, tiles_for
from jaxpar.parallel.dispatch.permute import collect, rows_of, spread
from jaxpar.parallel.dispatch.routed import Routed
from jaxpar.parallel.dispatch.sorted import by_expert, through_experts
from jaxpar.parallel.dispatch.weigh import run, unit_gates, weighed_by


@dataclass(frozen=True)
class Ragged:
    """A dispatcher. native: by `lax.ragged_all_to_all` and the kernels of `grouped_gpu`, which CPUs lack."""

    buffer_factor: float | None
    native: bool

    def __call__(self, layout: Layout, x_nD: Float[Array, "n D"], routed: Routed, experts: Experts) -> tuple[Array, Array]:
        """(every token's experts' outputs, weighted and summed, a partial sum where `mlp` is split; rows of this device cut off)."""
        axes = layout.split("experts")
        ways = layout.size(axes)
        most = routed.most_choices
        tiles = tiles_for(most, routed.num_experts // ways, native=self.native)
        if not axes:
            return through_experts(x_nD, routed, experts, tiles), jnp.zeros((), jnp.int32)
        row_nk, sizes_E = by_expert(routed, Tiles(1))
        rows = rows_of(row_nk, most)
        room = self.room(routed, ways, layout.size(layout.context_axes))
        sizes_pE = lax.all_gather(sizes_E, axes)
        runs = runs_of(jnp.sum(sizes_pE.reshape(ways, ways, -1), axis=2, dtype=jnp.int32), lax.axis_index(axes), room)
        exchange = Exchange(axes, self.native)
        got_RD, unit_R = exchange.with_units(spread(x_nD, rows), unit_gates(routed.gate_nk, rows), runs, room)
        order_R, mine_E = by_local_expert(runs, sizes_pE, lax.axis_index(axes), room, tiles)
        arranged = rows_of(order_R[:, None], tiles.room(room, mine_E.shape[0]))
        weigh = weighed_by(spread(unit_R[:, None], arranged)[:, 0])
        y_RD = run(experts, spread(got_RD, arranged), tiles.product(mine_E), weigh)
        y_RD = collect(y_RD, jnp.ones_like(order_R[:, None], y_RD.dtype), arranged)
        y_ND = exchange(y_RD, runs.back, most)
        return collect(y_ND, routed.gate_nk, rows), jnp.sum(sizes_E, dtype=jnp.int32) - jnp.sum(runs.size_p, dtype=jnp.int32)

    def room(self, routed: Routed, ways: int, shards: int) -> int:
        """Rows that a device can receive from the `ways` that hold experts; shards: devices that share its groups."""
        all_rows = ways * routed.most_choices
        return all_rows if self.buffer_factor is None else min(math.ceil(self.buffer_factor * routed.balanced_choices(shards)), all_rows)


def by_local_expert(
    runs: Runs, sizes_pE: Int[Array, "p E"], me: Array | int, room: int, tiles: Tiles
) -> tuple[Int[Array, " R"], Int[Array, " e"]]:
    """(for each received row its place when all are sorted by expert, -1 where nothing came; rows of each of this device's experts).

    Rows come sorted by (sender, expert); within a sender the last are missing where they were cut off.
    """
    ways = sizes_pE.shape[0]
    wanted_pe = lax.dynamic_index_in_dim(sizes_pE.reshape(ways, ways, -1), me, axis=1, keepdims=False)
    ends_pe = jnp.minimum(jnp.cumsum(wanted_pe, axis=1, dtype=jnp.int32), runs.got_size_p[:, None])
    sizes_pe = jnp.diff(ends_pe, axis=1, prepend=jnp.zeros_like(ends_pe[:, :1]))
    total_e = jnp.sum(sizes_pe, axis=0, dtype=jnp.int32)
    target_pe = tiles.begin(total_e) + jnp.cumsum(sizes_pe, axis=0, dtype=jnp.int32) - sizes_pe  # where the rows of (sender, expert) go
    begin_pe = runs.got_at_p[:, None] + ends_pe - sizes_pe  # where they are
    row_R = jnp.arange(room, dtype=jnp.int32)
    found_R = jnp.clip(jnp.searchsorted(begin_pe.reshape(-1), row_R, side="right").astype(jnp.int32) - 1, 0)
    place_R = target_pe.reshape(-1)[found_R] + row_R - begin_pe.reshape(-1)[found_R]
    came_R = row_R < begin_pe.reshape(-1)[found_R] + sizes_pe.reshape(-1)[found_R]
    return jnp.where(came_R, place_R, jnp.full_like(place_R, -1)), total_e

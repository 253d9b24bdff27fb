"""Layers in natural order, as checkpoints hold them (law L5), and in the rows of a pipeline's stages, as a run does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config.layout import Layout
from jaxpar.config.stages import Stages
from jaxpar.core.typing import Array
from jaxpar.optim.specs import owner_names
from jaxpar.step.placement import Placement
from jaxpar.step.state import TrainState


@dataclass(frozen=True)
class NaturalOrder:
    """Between the state of a run and that of a checkpoint. The identity where no stage holds its layers out of order."""

    placement: Placement

    @property
    def is_stored(self) -> bool:
        """True where both are the same."""
        stages = self.placement.layout.stages
        return stages is None or stages.layer_of_row == tuple(range(stages.num_rows))

    @cached_property
    def state(self) -> TrainState:
        """The abstract state in natural order, with shardings."""
        if self.is_stored:
            return self.placement.state
        stages, layout = self._stages, self.placement.layout

        def one(leaf: Any, stacked: bool) -> Any:
            if not stacked:
                return leaf
            shape = (len(stages.row_of_layer), *leaf.shape[1:])
            spec = natural_spec(layout, shape, leaf.sharding.spec)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.placement.mesh, spec))

        return jax.tree.map(one, self.placement.state, self._stacked)

    def from_run(self, state: TrainState) -> TrainState:
        """A run's state -> in natural order. One leaf after the other, so that one leaf at most is there whole."""
        return state if self.is_stored else self._reorder(state, self.state, self._stages.row_of_layer)

    def to_run(self, state: TrainState) -> TrainState:
        """A state in natural order -> in the rows of the stages; rows of no layer are zero."""
        return state if self.is_stored else self._reorder(state, self.placement.state, self._stages.layer_of_row)

    def _reorder(self, state: TrainState, like: TrainState, rows: Sequence[int]) -> TrainState:
        def one(leaf: Array, to: Any, stacked: bool) -> Array:
            return _taker(tuple(rows), to.sharding)(leaf) if stacked else leaf

        return jax.tree.map(one, state, like, self._stacked)

    @property
    def _stages(self) -> Stages:
        assert self.placement.layout.stages is not None
        return self.placement.layout.stages

    @cached_property
    def _stacked(self) -> TrainState:
        """For each leaf of the state, whether it has a row for each stored layer.

        A rule that is mapped over layers (Adafactor) has what belongs to no parameter, its counter, once a layer too.
        """
        state, rows = self.placement.state, self._stages.num_rows
        owners = owner_names(state.opt_state, self.placement.shapes)

        def has_rows(owner: str, leaf: Any) -> bool:
            return (not owner or owner.startswith("blocks.")) and leaf.ndim > 0 and leaf.shape[0] == rows

        params = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "blocks", state.params)
        return TrainState(params, jax.tree.map(has_rows, owners, state.opt_state), False)


def natural_spec(layout: Layout, shape: tuple[int, ...], spec: P) -> P:
    """How an array of all layers in order is sharded: as it is stored, or, where layers do not divide over `pipe`, along another dim."""
    pipe = layout.sizes["pipe"]
    if shape[0] % pipe == 0:
        return spec
    entries: list[Any] = [None, *spec[1:], *[None] * (len(shape) - max(len(spec), 1))]
    for i in range(1, len(shape)):
        if entries[i] is None and shape[i] % pipe == 0:
            entries[i] = "pipe"
            break
    return P(*entries)


@cache
def _taker(rows: tuple[int, ...], sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(partial(_rows_of, rows=rows), out_shardings=sharding)


def _rows_of(leaf: Array, rows: tuple[int, ...]) -> Array:
    """Rows of a leaf in another order, bit for bit; zeros where the row is negative."""
    # A row that comes from another device is a sum with zeros, which would make +0 of -0 and of denormal numbers: never of integers.
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    bits = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}") if floating else leaf
    taken = jnp.take(bits, jnp.asarray([max(row, 0) for row in rows]), axis=0)
    used = jnp.asarray([row >= 0 for row in rows]).reshape(-1, *[1] * (leaf.ndim - 1))
    taken = taken if min(rows) >= 0 else jnp.where(used, taken, jnp.zeros((), taken.dtype))
    return lax.bitcast_convert_type(taken, leaf.dtype) if floating else taken

"""What a device of a pipeline works with in every action: its layers, the two ends of the model, the rows of a microbatch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.config.stages import Stages
from jaxpar.core.typing import Array, Params, PyTree
from jaxpar.core.vma import vary
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.parallel.pipeline.control import get
from jaxpar.parallel.pipeline.layer import Known
from jaxpar.parallel.pipeline.loop import Mail, Tick
from jaxpar.parallel.pipeline.program import AXIS, Type


@dataclass(frozen=True)
class Stage:
    """blocks: this device's stored layers [rows, ...]. embed, head: whole, in the dtype of the computation."""

    forward: Forward
    stages: Stages
    blocks: Params
    embed: Params
    head: Params
    batch: Batch  # [M, b, S], this device's rows of each microbatch
    key: tuple[Array, Array] | None

    def is_first(self, here: Tick) -> Array:
        """Whether the action is of the first virtual stage, which begins with the embedding."""
        return self._number(self._virtual_PC, here) == 0

    def is_last(self, here: Tick) -> Array:
        """Whether it is of the last one, which ends with the head."""
        return self._number(self._virtual_PC, here) == self.stages.shape.num_virtual - 1

    def num_layers(self, here: Tick) -> Array | int:
        """Layers of the action's chunk."""
        counts = np.asarray(self.stages.layers_per_stage)[self._virtual_PC]
        return self.stages.rows_per_chunk if self.stages.even else self._number(counts, here)

    def weights(self, here: Tick, i: Array) -> Params:
        """Stored weights of layer i of the chunk."""
        return jax.tree.map(lambda leaf: get(leaf, self.row(here, i)), self.blocks)

    def row(self, here: Tick, i: Array) -> Array:
        """Where layer i of the chunk lies among this device's stored rows."""
        return here.chunk * self.stages.rows_per_chunk + i

    def known(self, here: Tick) -> Known:
        """What is at hand of a microbatch, for the first layer of the chunk; `Known.at` gives the others."""
        rows = {name: lax.dynamic_index_in_dim(x, here.microbatch, keepdims=False) for name, x in self.batch.items()}
        first_PC = np.asarray([self.stages.first_layer(v) for v in range(self.stages.shape.num_virtual)])[self._virtual_PC]
        shared = self.forward.context(rows, self.key).shared
        return Known(rows, shared, self.key, self._number(first_PC, here))

    def input(self, here: Tick, mail: Mail, slot: Array, known: Known) -> Array:
        """Activations that the chunk begins with: of the tokens, or the message in `slot`."""
        return lax.cond(self.is_first(here), lambda: self.embedded(self.embed, known), lambda: mail.read(slot))

    def embedded(self, embed: Params, known: Known) -> Array:
        """Tokens of a microbatch -> activations at a block boundary."""
        ctx = self.forward.context(known.rows, known.key, known.shared)
        return vary(self.forward.model.embed(embed, known.rows["tokens"], ctx), (AXIS,))

    @cached_property
    def boundary(self) -> Type:
        """Type of the activations between layers, and of their cotangents: what stages send each other."""
        return type_of(self.embedded, self.embed, self.known_type)

    @cached_property
    def known_type(self) -> Any:
        return type_of(lambda here: self.known(here), tick_type())

    @cached_property
    def _virtual_PC(self) -> np.ndarray:
        shape = self.stages.shape
        return np.asarray([[shape.virtual(s, c) for c in range(shape.num_chunks)] for s in range(shape.num_stages)])

    def _number(self, table_PC: np.ndarray, here: Tick) -> Array:
        return get(jnp.asarray(table_PC, jnp.int32), lax.axis_index(AXIS), here.chunk)


def make_stage(forward: Forward, params: Params, batch: Batch, key: tuple[Array, Array] | None) -> Stage:
    """params: stored, marked as varying over the tokens' axes. Embedding and head are gathered here, once for all actions."""
    assert forward.layout.stages is not None
    embed, head = (vary(forward.prepare(part, params[part]), (AXIS,)) for part in ("embed", "head"))
    return Stage(forward, forward.layout.stages, params["blocks"], embed, head, batch, key)


def block_weights(stage: Stage) -> Params:
    """Types of one layer's stored weights."""
    return type_of(lambda: jax.tree.map(lambda leaf: leaf[0], stage.blocks))


def type_of(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Types of what a function returns, which may use traced values from outside."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


def tick_type() -> Tick:
    """Types of a stage's row of the table."""
    scalar = type_of(lambda: lax.axis_index(AXIS))
    return Tick(*[scalar] * len(Tick._fields))

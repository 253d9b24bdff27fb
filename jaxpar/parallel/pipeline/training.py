"""The actions of a training schedule on one stage: F, B, I and W.

F goes through the layers of a chunk, after the embedding on the first virtual stage. B, or I and later W, goes back; on the last
virtual stage it begins with the head, which turns the output that its F kept into the loss and a cotangent, so no logits wait. Under I
and W their gradients do: `head` slots of [tokens, V / tensor], on every device (p of them in zb_h1, 2p - 1 in zb_h2, 1 in zb_v).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.core.typing import Array, Params, Terms
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.pipeline.control import buffer, put, run_if, zeros
from jaxpar.parallel.pipeline.ends import Ends, Gradients
from jaxpar.parallel.pipeline.layer import Known, Layer, trace_layer
from jaxpar.parallel.pipeline.loop import Mail, Perform, Tick
from jaxpar.parallel.pipeline.passes import (
    Chunk,
    Held,
    Stash,
    add_terms,
    backward_pass,
    forward_pass,
    input_pass,
    stored_gradient,
    weight_pass,
)
from jaxpar.parallel.pipeline.program import AXIS, varying_of
from jaxpar.parallel.pipeline.split import Split
from jaxpar.parallel.pipeline.stage import Stage, block_weights, type_of
from jaxpar.parallel.terms import cotangent
from jaxpar.schedule.actions import Kind
from jaxpar.schedule.ticks import TickTable


class State(NamedTuple):
    """What the actions of a stage change. Gradients are lists of leaves, in the dtype of the parameters."""

    stash: list[Array]  # [slots, layers of a chunk, ...]
    deferred: list[Array]  # [slots, layers of a chunk, ...]
    head_deferred: list[Array]  # [slots, tokens of a microbatch, ...]
    blocks: list[Array]  # gradients of the stored layers
    ends: list[Array]  # gradients of embedding and head
    sums: Terms


Head = Callable[[Chunk, Array, State], tuple[Array, State]]  # (output of the last layer, state) -> (its cotangent, state)


@dataclass(frozen=True)
class Training:
    """The actions of one stage."""

    stage: Stage
    table: TickTable
    ends: Ends

    @property
    def by_kind(self) -> dict[Kind, Perform[State]]:
        return {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}

    def start(self, params: Params) -> State:
        """Empty buffers; gradients and sums of zero."""
        rows, slots = self.stage.stages.rows_per_chunk, self.table.num_slots
        splits = "I" in self.table.kinds
        layer_types = jax.tree.leaves(self.layer.backward.out_types[0])
        stored_types = [type_of(lambda g, i=i: stored_gradient(self.stage, i, g), leaf) for i, leaf in enumerate(layer_types)]
        ends = zip(self.ends.gradient_types, jax.tree.leaves((params["embed"], params["head"])), strict=True)
        return State(
            stash=[buffer(leaf, max(slots["stash"], 1), rows) for leaf in self.layer.stashed],
            deferred=[buffer(leaf, slots["deferred"], rows) for leaf in self.layer_split.kept_types] if splits else [],
            head_deferred=[buffer(leaf, slots["head"]) for leaf in self.ends.head_split.kept_types] if splits else [],
            blocks=[zeros(leaf, rows * self.stage.stages.shape.num_chunks) for leaf in stored_types],
            # In the parameters' dtype: sums over microbatches are not rounded to that of the computation.
            ends=[vary(jnp.zeros(leaf.shape, stored.dtype), tuple(varying_of(leaf))) for leaf, stored in ends],
            sums=self._no_terms(),
        )

    def forward(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        chunk = self._chunk(here)
        x_bSD = self.stage.input(here, mail, here.reads, chunk.known)
        stash = None if self.recomputes else self._stash(here, state)
        x_bSD, buffers, sums = forward_pass(chunk, x_bSD, stash, state.sums)
        return x_bSD, state._replace(stash=buffers if stash else state.stash, sums=sums)

    def backward(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        chunk = self._chunk(here)
        dx_bSD, state = self._begin_backward(chunk, mail, state, self._head)
        dx_bSD, blocks = backward_pass(chunk, dx_bSD, self._dsums, self._stash(here, state), state.blocks)
        return dx_bSD, self._end_backward(chunk, dx_bSD, state._replace(blocks=blocks))

    def input_gradient(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        chunk = self._chunk(here)
        dx_bSD, state = self._begin_backward(chunk, mail, state, self._head_first)
        held = Held(state.deferred, state.blocks)
        dx_bSD, held = input_pass(chunk, self.layer_split, dx_bSD, self._dsums, self._stash(here, state), held)
        return dx_bSD, self._end_backward(chunk, dx_bSD, state._replace(deferred=held.deferred, blocks=held.grads))

    def weight_gradient(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        chunk = self._chunk(here)
        blocks = weight_pass(chunk, self.layer_split, self._stash(here, state), Held(state.deferred, state.blocks))

        def head(chunk: Chunk, state: State) -> State:
            return state._replace(ends=_plus(state.ends, self.ends.head_second(chunk.known, state.head_deferred, chunk.here.head)))

        return mail.out, run_if(self.stage.is_last(here), head, chunk, state._replace(blocks=blocks))

    @property
    def recomputes(self) -> bool:
        """`stash: inputs`: the stash is one slot, filled again by B or I itself."""
        return self.table.num_slots["stash"] == 0

    @cached_property
    def layer(self) -> Layer:
        """One layer, traced once."""
        return trace_layer(self.stage.forward, block_weights(self.stage), self.stage.known_type, self.stage.boundary)

    @cached_property
    def layer_split(self) -> Split:
        """Its backward pass as I and W."""
        return self.layer.split(stash_stays=not self.recomputes)

    def _chunk(self, here: Tick) -> Chunk:
        return Chunk(self.stage, self.layer, here, self.stage.known(here))

    def _stash(self, here: Tick, state: State) -> Stash:
        return Stash(state.stash, 0 if self.recomputes else here.stash)

    def _begin_backward(self, chunk: Chunk, mail: Mail, state: State, head: Head) -> tuple[Array, State]:
        """The cotangent that arrived, or the head's; where F has kept nothing, its pass again, into the one slot of the stash."""
        here = chunk.here
        dx_bSD, state = run_if(self.stage.is_last(here), lambda chunk, c: head(chunk, *c), chunk, (mail.read(here.reads), state))
        if not self.recomputes:
            return dx_bSD, state
        x_bSD = self.stage.input(here, mail, here.inputs, chunk.known)
        _, buffers, _ = forward_pass(chunk, x_bSD, self._stash(here, state), state.sums)
        return dx_bSD, state._replace(stash=buffers)

    def _end_backward(self, chunk: Chunk, dx_bSD: Array, state: State) -> State:
        def embed(given: tuple[Known, Array], state: State) -> State:
            return state._replace(ends=_plus(state.ends, self.ends.embed_gradient(*given)))

        return run_if(self.stage.is_first(chunk.here), embed, (chunk.known, dx_bSD), state)

    def _head(self, chunk: Chunk, y_bSD: Array, state: State) -> tuple[Array, State]:
        terms, dy_bSD, grads = self.ends.head(chunk.known, y_bSD)
        return dy_bSD, state._replace(ends=_plus(state.ends, grads), sums=add_terms(state.sums, terms))

    def _head_first(self, chunk: Chunk, y_bSD: Array, state: State) -> tuple[Array, State]:
        terms, dy_bSD, grads, kept = self.ends.head_first(chunk.known, y_bSD)
        deferred = put(state.head_deferred, kept, chunk.here.head)
        return dy_bSD, state._replace(head_deferred=deferred, ends=_plus(state.ends, grads), sums=add_terms(state.sums, terms))

    @property
    def _dsums(self) -> dict[str, Array]:
        """Cotangents of a layer's terms; made in each action, for they are traced values."""
        types, scale = self.layer.forward.out_types[1], self.ends.scale
        return {name: cotangent(scale.get(name, jnp.zeros((), t.dtype)), t) for name, t in types.items()}

    def _no_terms(self) -> Terms:
        _, sums, counts, _ = self.layer.forward.out_types
        layers = {name: (zeros(sums[name]), zeros(counts[name])) for name in sums}
        head = jax.tree.map(zeros, self.ends.term_types)
        self.stage.forward.check_names(layers, head)
        return vary(layers | head, (AXIS,))


def _plus(sums: list[Array], values: Gradients) -> list[Array]:
    out = list(sums)
    for i, value in values.items():
        out[i] = out[i] + vary(value.astype(out[i].dtype), tuple(varying(out[i])))
    return out

"""The actions of a training schedule on one stage: F, B, I and W.

F goes through the layers of a chunk, after the embedding on the first virtual stage. B, or I and later W, goes back; on the last
virtual stage it begins with the head, which turns the output that its F kept into the loss and a cotangent, so no logits wait anywhere.
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
from jaxpar.parallel.pipeline.passes import Held, Stash, add_terms, backward_pass, forward_pass, input_pass, stored_gradient, weight_pass
from jaxpar.parallel.pipeline.program import AXIS, varying_of
from jaxpar.parallel.pipeline.split import Split
from jaxpar.parallel.pipeline.stage import Stage, block_weights, type_of
from jaxpar.schedule.actions import Kind
from jaxpar.schedule.ticks import TickTable


class State(NamedTuple):
    """What the actions of a stage change. Gradients are lists of leaves, in the dtype of the parameters."""

    stash: list[Array]  # [slots, layers of a chunk, ...]
    deferred: list[Array]  # [slots, layers of a chunk, ...]
    head_deferred: list[Array]  # [slots, ...]
    blocks: list[Array]  # gradients of the stored layers
    ends: list[Array]  # gradients of embedding and head
    sums: Terms


Head = Callable[[Tick, Known, Array, State], tuple[Array, State]]  # (output of the last layer, state) -> (its cotangent, state)


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
        known = self.stage.known(here)
        x = self.stage.input(here, mail, here.reads, known)
        stash = None if self.recomputes else Stash(state.stash, here.stash)
        x, buffers, sums = forward_pass(self.stage, self.layer, here, known, x, stash, state.sums)
        return x, state._replace(stash=buffers if stash else state.stash, sums=sums)

    def backward(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        known, dx, state, stash = self._begin_backward(here, mail, state, self._head)
        dx, blocks = backward_pass(self.stage, self.layer, here, known, dx, self._dsums, stash, state.blocks)
        return dx, self._end_backward(here, known, dx, state._replace(blocks=blocks))

    def input_gradient(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        known, dx, state, stash = self._begin_backward(here, mail, state, self._head_first)
        held = Held(state.deferred, state.blocks)
        dx, held = input_pass(self.stage, self.layer, self.layer_split, here, known, dx, self._dsums, stash, held)
        return dx, self._end_backward(here, known, dx, state._replace(deferred=held.deferred, blocks=held.grads))

    def weight_gradient(self, here: Tick, mail: Mail, state: State) -> tuple[Array, State]:
        known = self.stage.known(here)
        stash = Stash(state.stash, 0 if self.recomputes else here.stash)
        held = weight_pass(self.stage, self.layer, self.layer_split, here, known, stash, Held(state.deferred, state.blocks))
        state = state._replace(blocks=held.grads)

        def head(state: State) -> State:
            return state._replace(ends=_plus(state.ends, self.ends.head_second(known, state.head_deferred, here.head)))

        return mail.out, run_if(self.stage.is_last(here), head, state)

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

    def _begin_backward(self, here: Tick, mail: Mail, state: State, head: Head) -> tuple[Known, Array, State, Stash]:
        """The cotangent that arrived, or the head's; the residuals, or the forward pass again."""
        known = self.stage.known(here)
        dx, state = run_if(self.stage.is_last(here), lambda c: head(here, known, *c), (mail.read(here.reads), state))
        if not self.recomputes:
            return known, dx, state, Stash(state.stash, here.stash)
        x = self.stage.input(here, mail, here.inputs, known)
        _, buffers, _ = forward_pass(self.stage, self.layer, here, known, x, Stash(state.stash, 0), state.sums)
        return known, dx, state._replace(stash=buffers), Stash(buffers, 0)

    def _end_backward(self, here: Tick, known: Known, dx: Array, state: State) -> State:
        def embed(state: State) -> State:
            return state._replace(ends=_plus(state.ends, self.ends.embed_gradient(known, dx)))

        return run_if(self.stage.is_first(here), embed, state)

    def _head(self, _here: Tick, known: Known, y: Array, state: State) -> tuple[Array, State]:
        terms, dy, grads = self.ends.head(known, y)
        return dy, state._replace(ends=_plus(state.ends, grads), sums=add_terms(state.sums, terms))

    def _head_first(self, here: Tick, known: Known, y: Array, state: State) -> tuple[Array, State]:
        terms, dy, grads, kept = self.ends.head_first(known, y)
        deferred = put(state.head_deferred, kept, here.head)
        return dy, state._replace(head_deferred=deferred, ends=_plus(state.ends, grads), sums=add_terms(state.sums, terms))

    @cached_property
    def _dsums(self) -> dict[str, Array]:
        """Cotangents of a layer's terms."""
        types, scale = self.layer.forward.out_types[1], self.ends.scale
        scaled = {name: scale.get(name, jnp.zeros((), t.dtype)).astype(t.dtype) for name, t in types.items()}
        return {name: vary(scaled[name], tuple(varying_of(t))) for name, t in types.items()}

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

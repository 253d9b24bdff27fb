"""Through the layers of a chunk, forwards and backwards: loops over its rows of weights, gradients and stash."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.core.typing import Array, Params, Terms
from jaxpar.mesh.specs import is_plan
from jaxpar.parallel.pipeline.control import add, get, loop, put
from jaxpar.parallel.pipeline.layer import Known, Layer
from jaxpar.parallel.pipeline.loop import Tick
from jaxpar.parallel.pipeline.split import Split
from jaxpar.parallel.pipeline.stage import Stage
from jaxpar.parallel.zero import scatter_gradient

Buffers = list[Array]


@dataclass(frozen=True)
class Chunk:
    """One action's layers: those of chunk `here.chunk`, for microbatch `here.microbatch`."""

    stage: Stage
    layer: Layer
    here: Tick
    known: Known

    @property
    def num_layers(self) -> Array | int:
        return self.stage.num_layers(self.here)

    def at(self, i: Array) -> tuple[Params, Known]:
        """(stored weights of layer i of the chunk, what is known at it)."""
        return self.stage.weights(self.here, i), self.known.at(self.known.layer + i)

    def residuals(self, stash: "Stash", i: Array) -> list[Array]:
        """Residuals of layer i, stashed or made again."""
        return self.layer.residuals(*self.at(i), [get(buffer, stash.slot, i) for buffer in stash.buffers])


jax.tree_util.register_dataclass(Chunk, data_fields=["here", "known"], meta_fields=["stage", "layer"])


class Stash(NamedTuple):
    """buffers: [slots, layers of a chunk, ...], one for each residual that is kept. slot: that of the action's microbatch."""

    buffers: Buffers
    slot: Array | int


class Held(NamedTuple):
    """What I and W change: operands that wait [slots, layers of a chunk, ...]; gradients of the stored weights [rows, ...]."""

    deferred: Buffers
    grads: Buffers


def forward_pass(chunk: Chunk, x_bSD: Array, stash: Stash | None, sums: Terms) -> tuple[Array, Buffers, Terms]:
    """(x after the chunk, stash, sums of terms); stash None: residuals are not kept."""

    def one(i: Array, carry: tuple[Array, Buffers, Terms]) -> tuple[Array, Buffers, Terms]:
        x_bSD, buffers, sums = carry
        x_bSD, terms, kept = chunk.layer.run(*chunk.at(i), x_bSD)
        return x_bSD, put(buffers, kept, stash.slot, i) if stash else buffers, add_terms(sums, terms)

    return loop(chunk.num_layers, one, (x_bSD, stash.buffers if stash else [], sums))


def backward_pass(chunk: Chunk, dx_bSD: Array, dsums: dict[str, Array], stash: Stash, grads: Buffers) -> tuple[Array, Buffers]:
    """(gradient of the chunk's input, gradients of its weights added up). dsums: those of the layers' terms."""

    def one(j: Array, carry: tuple[Array, Buffers]) -> tuple[Array, Buffers]:
        dx_bSD, grads = carry
        i = chunk.num_layers - 1 - j
        dweights, dx_bSD = chunk.layer.backward(chunk.residuals(stash, i), dx_bSD, dsums)
        return dx_bSD, add_gradients(chunk, grads, dict(enumerate(jax.tree.leaves(dweights))), i)

    return loop(chunk.num_layers, one, (dx_bSD, grads))


def input_pass(chunk: Chunk, parts: Split, dx_bSD: Array, dsums: dict[str, Array], stash: Stash, held: Held) -> tuple[Array, Held]:
    """I: as `backward_pass`, but products that only weights wait for are left, with their operands, in `held.deferred`."""
    num_weights = len(held.grads)

    def one(j: Array, carry: tuple[Array, Held]) -> tuple[Array, Held]:
        dx_bSD, held = carry
        i = chunk.num_layers - 1 - j
        outs, kept = parts.run_first([*chunk.residuals(stash, i), dx_bSD, *jax.tree.leaves(dsums)])
        early = {leaf: value for leaf, value in outs.items() if leaf < num_weights}
        grads = add_gradients(chunk, held.grads, early, i)
        return outs[num_weights], Held(put(held.deferred, kept, chunk.here.deferred, i), grads)

    return loop(chunk.num_layers, one, (dx_bSD, held))


def weight_pass(chunk: Chunk, parts: Split, stash: Stash, held: Held) -> Buffers:
    """W: what I has left, added to the gradients."""

    def one(i: Array, grads: Buffers) -> Buffers:
        residuals = chunk.residuals(stash, i)
        operands = [get(buffer, chunk.here.deferred, i) for buffer in held.deferred]
        return add_gradients(chunk, grads, parts.run_second({n: residuals[n] for n in parts.given}, operands), i)

    return loop(chunk.num_layers, one, held.grads)


def add_gradients(chunk: Chunk, grads: Buffers, values: dict[int, Array], i: Array) -> Buffers:
    """Gradients of layer i of the chunk, by leaf, added to its row."""
    out, row = list(grads), chunk.stage.row(chunk.here, i)
    for leaf, value in values.items():
        out[leaf] = add(out[leaf], stored_gradient(chunk.stage, leaf, value), row)
    return out


def stored_gradient(stage: Stage, leaf: int, value: Array) -> Array:
    """As it is added up: ZeRO 2 scatters each microbatch's."""
    if stage.forward.layout.zero_stage != 2:
        return value
    plans = jax.tree.leaves(stage.forward.plans["blocks"], is_leaf=is_plan)
    return scatter_gradient(plans[leaf], value, stacked=True)


def add_terms(sums: Terms, terms: Terms) -> Terms:
    """Both sums and weights, of the terms that are there."""
    return sums | {name: (sums[name][0] + jnp.asarray(total), sums[name][1] + jnp.asarray(w)) for name, (total, w) in terms.items()}

"""Through the layers of a chunk, forwards and backwards: loops over its rows of weights, gradients and stash."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.core.typing import Array, Terms
from jaxpar.mesh.specs import is_plan
from jaxpar.parallel.pipeline.control import add, get, loop, put
from jaxpar.parallel.pipeline.layer import Known, Layer
from jaxpar.parallel.pipeline.loop import Tick
from jaxpar.parallel.pipeline.split import Split
from jaxpar.parallel.pipeline.stage import Stage
from jaxpar.parallel.zero import scatter_gradient

Buffers = list[Array]


class Stash(NamedTuple):
    """buffers: [slots, layers of a chunk, ...], one for each residual that is kept. slot: that of the action's microbatch."""

    buffers: Buffers
    slot: Array | int


class Held(NamedTuple):
    """What I and W change: operands that wait [slots, layers of a chunk, ...]; gradients of the stored weights [rows, ...]."""

    deferred: Buffers
    grads: Buffers


def forward_pass(
    stage: Stage, layer: Layer, here: Tick, known: Known, x: Array, stash: Stash | None, sums: Terms
) -> tuple[Array, Buffers, Terms]:
    """(x after the chunk, stash, sums of terms); stash None: residuals are not kept."""

    def one(i: Array, carry: tuple[Array, Buffers, Terms]) -> tuple[Array, Buffers, Terms]:
        x, buffers, sums = carry
        x, terms, kept = layer.run(stage.weights(here, i), known.at(known.layer + i), x)
        return x, put(buffers, kept, stash.slot, i) if stash else buffers, add_terms(sums, terms)

    return loop(stage.num_layers(here), one, (x, stash.buffers if stash else [], sums))


def backward_pass(
    stage: Stage, layer: Layer, here: Tick, known: Known, dx: Array, dsums: dict[str, Array], stash: Stash, grads: Buffers
) -> tuple[Array, Buffers]:
    """(gradient of the chunk's input, gradients of its weights added up)."""
    count = stage.num_layers(here)

    def one(j: Array, carry: tuple[Array, Buffers]) -> tuple[Array, Buffers]:
        dx, grads = carry
        i = count - 1 - j
        dweights, dx = layer.backward(residuals_of(stage, layer, here, known, stash, i), dx, dsums)
        return dx, add_gradients(stage, grads, dict(enumerate(jax.tree.leaves(dweights))), stage.row(here, i))

    return loop(count, one, (dx, grads))


def input_pass(
    stage: Stage, layer: Layer, parts: Split, here: Tick, known: Known, dx: Array, dsums: dict[str, Array], stash: Stash, held: Held
) -> tuple[Array, Held]:
    """I: as `backward_pass`, but products that only weights wait for are left, with their operands, in `held.deferred`."""
    count, num_weights = stage.num_layers(here), len(held.grads)

    def one(j: Array, carry: tuple[Array, Held]) -> tuple[Array, Held]:
        dx, held = carry
        i = count - 1 - j
        outs, kept = parts.run_first([*residuals_of(stage, layer, here, known, stash, i), dx, *jax.tree.leaves(dsums)])
        early = {position: value for position, value in outs.items() if position < num_weights}
        grads = add_gradients(stage, held.grads, early, stage.row(here, i))
        return outs[num_weights], Held(put(held.deferred, kept, here.deferred, i), grads)

    return loop(count, one, (dx, held))


def weight_pass(stage: Stage, layer: Layer, parts: Split, here: Tick, known: Known, stash: Stash, held: Held) -> Held:
    """W: what I has left."""

    def one(i: Array, grads: Buffers) -> Buffers:
        residuals = residuals_of(stage, layer, here, known, stash, i)
        late = parts.run_second({n: residuals[n] for n in parts.given}, [get(d, here.deferred, i) for d in held.deferred])
        return add_gradients(stage, grads, late, stage.row(here, i))

    return held._replace(grads=loop(stage.num_layers(here), one, held.grads))


def residuals_of(stage: Stage, layer: Layer, here: Tick, known: Known, stash: Stash, i: Array) -> list[Array]:
    """Residuals of layer i of the chunk."""
    return layer.residuals(stage.weights(here, i), known.at(known.layer + i), [get(s, stash.slot, i) for s in stash.buffers])


def add_gradients(stage: Stage, grads: Buffers, values: dict[int, Array], row: Array) -> Buffers:
    """One layer's gradients, by leaf, added to its row."""
    out = list(grads)
    for i, value in values.items():
        out[i] = add(out[i], stored_gradient(stage, i, value), row)
    return out


def stored_gradient(stage: Stage, leaf: int, value: Array) -> Array:
    """As it is added up: ZeRO 2 scatters each microbatch's."""
    layout = stage.forward.layout
    if layout.zero_stage != 2:
        return value
    plans = jax.tree.leaves(stage.forward.plans["blocks"], is_leaf=is_plan)
    return scatter_gradient(plans[leaf], value, stacked=True)


def add_terms(sums: Terms, terms: Terms) -> Terms:
    """Both sums and weights, of the terms that are there."""
    return sums | {name: (sums[name][0] + jnp.asarray(total), sums[name][1] + jnp.asarray(w)) for name, (total, w) in terms.items()}

"""Forward passes only, on the stages of a pipeline: for evaluation and for sampling."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.core.typing import Array, Params, PyTree, Terms
from jaxpar.core.vma import vary
from jaxpar.parallel.forward import Batch, Forward, alike
from jaxpar.parallel.pipeline.control import loop, run_if, zeros
from jaxpar.parallel.pipeline.layer import Known, trace_block
from jaxpar.parallel.pipeline.loop import Mail, Tick, empty_mail, run_ticks
from jaxpar.parallel.pipeline.program import AXIS, trace
from jaxpar.parallel.pipeline.stage import Stage, block_weights, make_stage
from jaxpar.parallel.terms import global_totals
from jaxpar.schedule.evaluation import forward_schedule
from jaxpar.schedule.lower import lower

T = TypeVar("T")


def pipeline_sums(forward: Forward, params: Params, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
    """As `executor.sum_terms`."""

    def finish(stage: Stage, known: Known, y: Array) -> Terms:
        ctx = forward.context(known.rows, None, known.shared)
        return alike(forward.model.head(stage.head, stage.embed, y, known.rows["targets"], known.rows["weights"], ctx))

    head, blocks = _run(forward, params, batch, finish)
    forward.check_names(blocks, head)
    return global_totals(forward.layout, blocks | head)


def pipeline_logits(forward: Forward, params: Params, batch: Batch) -> Array:
    """As `Forward.logits`: [b, S, V/tensor], on every stage."""

    def finish(stage: Stage, known: Known, y: Array) -> Array:
        return forward.model.logits(stage.head, stage.embed, y, forward.context(known.rows, None, known.shared))

    logits, _ = _run(forward, params, {name: x[None] for name, x in batch.items()}, finish)
    return lax.psum(logits, AXIS)


def _run(forward: Forward, params: Params, batch: Batch, finish: Callable[[Stage, Known, Array], T]) -> tuple[T, Terms]:
    """(sum over microbatches of what `finish` makes of the last layer's output, sums of the blocks' terms of this stage's layers)."""
    stage = make_stage(forward, vary(params, forward.layout.token_axes), batch, None)
    table = lower(forward_schedule(replace(stage.stages.shape, num_microbatches=batch["tokens"].shape[0])))
    block = trace_block(forward, block_weights(stage), stage.known_type, stage.boundary)
    last = trace(
        lambda stage_ends, known, y: finish(replace(stage, **stage_ends), known, y), _ends(stage), stage.known_type, stage.boundary
    )

    def action(here: Tick, mail: Mail, state: tuple[T, Terms]) -> tuple[Array, tuple[T, Terms]]:
        known, (done, terms) = stage.known(here), state

        def layer(i: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            x, terms = carry
            x, sums, counts = block(stage.weights(here, i), known.at(known.layer + i), x)
            return x, jax.tree.map(jnp.add, terms, {name: (sums[name], counts[name]) for name in sums})

        x, terms = loop(stage.num_layers(here), layer, (stage.input(here, mail, here.reads, known), terms))

        def finished(given: tuple[Known, Array], done: T) -> T:
            return jax.tree.map(jnp.add, done, vary(last(_ends(stage), *given), (AXIS,)))

        done = run_if(stage.is_last(here), finished, (known, x), done)
        return x, (done, terms)

    _, sums, counts = block.out_types
    terms = vary({name: (zeros(sums[name]), zeros(counts[name])) for name in sums}, (AXIS,))
    state = (vary(jax.tree.map(zeros, last.out_types), (AXIS,)), terms)
    return run_ticks(table, {"F": action}, empty_mail(table, stage.boundary), state)


def _ends(stage: Stage) -> dict[str, Params]:
    return {"embed": stage.embed, "head": stage.head}

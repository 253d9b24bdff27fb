"""Loss and gradients over the microbatches of a step, inside the one `shard_map`; on a pipeline, see `pipeline.gradients`.

What happens to the gradient of one matrix, from the token losses to the optimizer:
- `vary` marks it as different on every device before the loop, so JAX's transposes leave each device its own partial sum;
- ZeRO 0: partial sums of all microbatches are added in the loop; after it `reduce_gradients` all-reduces them, once;
- ZeRO 1: the same, but after the loop `scatter_gradient` reduce-scatters them over the ZeRO axes first;
- ZeRO 2: `scatter_gradient` stands in the loop, so only shards are added up;
- ZeRO 3: the matrix is a shard already; the transpose of its gather (`zero._gather_bwd`) reduce-scatters, layer by layer.
What is left to sum (`replica`; `tensor` for what it does not split) is read from the gradient's type, in `reduce_gradients`.

Law L1: the loss is a sum over all valid tokens of the global batch divided by their number, which is known before the
backward pass; every term of the loss carries its own (sum, weight).
"""

import jax

from jaxpar.core.typing import Array, Params
from jaxpar.core.vma import vary
from jaxpar.mesh.specs import is_plan
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.parallel.pipeline.evaluate import pipeline_logits, pipeline_sums
from jaxpar.parallel.pipeline.gradients import pipeline_gradients
from jaxpar.parallel.reduce import reduce_gradients
from jaxpar.parallel.terms import Key, cotangents, global_means, global_totals, over_microbatches, total_weights
from jaxpar.parallel.zero import scatter_gradient


def loss_and_gradients(forward: Forward, params: Params, batch: Batch, key: Key | None) -> tuple[dict[str, Array], Params]:
    """Means of every term over the global batch, and gradients of the minimised sum, reduced over all devices.

    batch: [M, b, S], this device's rows of each microbatch. Gradients come out as `mesh.specs.sharded_specs` lays them out.
    """
    if forward.ticks is not None:
        return pipeline_gradients(forward, forward.ticks, params, batch, key)
    layout = forward.layout
    # Marked once, before the loop: the transpose of this mark is the reduction over data, and must not stand in the loop.
    params = vary(params, layout.token_axes)
    weights = total_weights(forward, params, batch, key)

    def minimised(params: Params, rows: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
        sums = {name: total for name, (total, _) in forward.terms(params, rows, key).items()}
        return {name: sums[name] for name in forward.model.loss_terms}, sums

    def gradients(rows: Batch) -> tuple[Params, dict[str, Array]]:
        totals, pullback, sums = jax.vjp(lambda p: minimised(p, rows), params, has_aux=True)
        scale = {name: coefficient / weights[name] for name, coefficient in forward.model.loss_terms.items()}
        (grads,) = pullback(cotangents(totals, scale))
        if layout.zero_stage == 2:
            grads = jax.tree.map(lambda plan, g: scatter_gradient(plan, g), forward.plans, grads, is_leaf=is_plan)
        return grads, sums

    grads, sums = over_microbatches(gradients, batch)
    return global_means(layout, sums, weights), reduce_gradients(layout, forward.plans, grads)


def sum_terms(forward: Forward, params: Params, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
    """Evaluation: sums and weights of every term over the global batch [M, b, S]; no dropout."""
    if forward.ticks is not None:
        return pipeline_sums(forward, params, batch)
    totals = over_microbatches(lambda rows: forward.terms(params, rows, None), batch)
    return global_totals(forward.layout, totals)


def logits(forward: Forward, params: Params, batch: Batch) -> Array:
    """This device's columns of the logits [b, S, V/tensor] of one microbatch, on every stage."""
    return forward.logits(params, batch) if forward.ticks is None else pipeline_logits(forward, params, batch)

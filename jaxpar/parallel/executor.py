"""Loss and gradients over the microbatches of a step, inside the one `shard_map`: the schedule of a single stage.

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

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from jaxpar.config.layout import Layout
from jaxpar.core.typing import Array, Params
from jaxpar.core.vma import vary, varying
from jaxpar.mesh.specs import is_plan
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.parallel.reduce import reduce_gradients
from jaxpar.parallel.zero import scatter_gradient

Key = tuple[Array, Array]
T = TypeVar("T")


def loss_and_gradients(forward: Forward, params: Params, batch: Batch, key: Key | None) -> tuple[dict[str, Array], Params]:
    """Means of every term over the global batch, and gradients of the minimised sum, reduced over all devices.

    batch: [M, b, S], this device's rows of each microbatch. Gradients come out as `mesh.specs.sharded_specs` lays them out.
    """
    layout = forward.layout
    # Marked once, before the loop: the transpose of this mark is the reduction over data, and must not stand in the loop.
    params = vary(params, layout.token_axes)
    weights = total_weights(forward, params, batch, key)

    def minimised(params: Params, rows: Batch) -> tuple[Array, dict[str, Array]]:
        sums = {name: total for name, (total, _) in forward.terms(params, rows, key).items()}
        parts = [coefficient * sums[name] / weights[name] for name, coefficient in forward.model.loss_terms.items()]
        return sum(parts[1:], parts[0]), sums

    def gradients(rows: Batch) -> tuple[Params, dict[str, Array]]:
        loss, pullback, sums = jax.vjp(lambda p: minimised(p, rows), params, has_aux=True)
        (grads,) = pullback(vary(jnp.ones_like(loss), tuple(varying(loss))))
        if layout.zero_stage == 2:
            grads = jax.tree.map(lambda plan, g: scatter_gradient(layout, plan, g), forward.plans, grads, is_leaf=is_plan)
        return grads, sums

    grads, sums = over_microbatches(gradients, batch)
    return global_means(layout, sums, weights), reduce_gradients(layout, forward.plans, grads)


def sum_terms(forward: Forward, params: Params, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
    """Evaluation: sums and weights of every term over the global batch [M, b, S]; no dropout."""
    totals = over_microbatches(lambda rows: forward.terms(params, rows, None), batch)
    summed = {name: (global_sum(forward.layout, s), global_sum(forward.layout, w)) for name, (s, w) in totals.items()}
    return {name: s for name, (s, _) in summed.items()}, {name: w for name, (_, w) in summed.items()}


def over_microbatches(f: Callable[[Batch], T], batch: Batch) -> T:
    """Sum of f over the leading dim; one scan, so the program does not grow with microbatches."""
    first = {name: x[0] for name, x in batch.items()}
    if batch["tokens"].shape[0] == 1:
        return f(first)
    shapes = jax.eval_shape(f, first)
    start = jax.tree.map(lambda a: vary(jnp.zeros(a.shape, a.dtype), tuple(a.manual_axis_type.varying)), shapes)
    total, _ = lax.scan(lambda acc, rows: (jax.tree.map(jnp.add, acc, f(rows)), None), start, dict(batch))
    return total


def total_weights(forward: Forward, params: Params, batch: Batch, key: Key | None) -> dict[str, Array]:
    """Weight of every term over the global batch, at least one unit where nothing counts (then the sum is 0 too).

    Weights depend on the batch alone: all that leads to the sums is removed from the traced program, and a weight that
    still needs a parameter is an error that names the term.
    """

    def weights_of(params: Params, batch: Batch) -> dict[str, Array]:
        return over_microbatches(lambda rows: {name: w for name, (_, w) in forward.terms(params, rows, key).items()}, batch)

    closed, shapes = jax.make_jaxpr(weights_of, return_shape=True)(params, dict(batch))
    num_params = len(jax.tree.leaves(params))
    for name, position in zip(sorted(shapes), range(len(shapes)), strict=True):
        only = [i == position for i in range(len(shapes))]
        if any(partial_eval.dce_jaxpr(closed.jaxpr, only)[1][:num_params]):
            raise ValueError(f"term {name!r}: its weight depends on parameters; a weight must be known before the backward pass")
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(shapes))
    inputs = [x for x, u in zip(jax.tree.leaves((params, dict(batch))), used, strict=True) if u]
    local = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, closed.consts))(*inputs)
    totals = {name: global_sum(forward.layout, w) for name, w in zip(sorted(shapes), local, strict=True)}
    return {name: jnp.where(w > 0, w, jnp.ones_like(w)) for name, w in totals.items()}


def global_sum(layout: Layout, x: Array) -> Array:
    """Sum over every axis that splits tokens; a value that is alike on all `tensor` ranks counts once."""
    axes = tuple(axis for axis in layout.sizes if axis in varying(x))
    return lax.psum(x, axes) if axes else x


def global_means(layout: Layout, sums: dict[str, Array], weights: dict[str, Array]) -> dict[str, Array]:
    """Sum / weight of each term over the global batch."""
    return {name: global_sum(layout, total) / weights[name] for name, total in sums.items()}

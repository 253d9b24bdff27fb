"""Sums over microbatches and devices: a term of the loss is one sum over the global batch, divided by one weight (law L1)."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from jaxpar.config.layout import Layout
from jaxpar.core.typing import Array, Params, Terms
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.forward import Batch, Forward

Key = tuple[Array, Array]
T = TypeVar("T")


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


def global_totals(layout: Layout, terms: Terms) -> tuple[dict[str, Array], dict[str, Array]]:
    """(sums, weights) of each term over the global batch."""
    return {name: global_sum(layout, s) for name, (s, _) in terms.items()}, {name: global_sum(layout, w) for name, (_, w) in terms.items()}


def global_means(layout: Layout, sums: dict[str, Array], weights: dict[str, Array]) -> dict[str, Array]:
    """Sum / weight of each term over the global batch."""
    return {name: global_sum(layout, total) / weights[name] for name, total in sums.items()}


def cotangents(totals: dict[str, Array], scale: dict[str, Array]) -> dict[str, Array]:
    """What each minimised sum is multiplied with in the loss, of the sum's type.

    Sums are not added up before: one that is alike on all `tensor` ranks, added to one that differs between them, would be marked as
    varying, and the transpose of that mark counts it once a rank.
    """
    return {name: cotangent(scale[name], jax.typeof(total)) for name, total in totals.items()}


def cotangent(scale: Array, like: Any) -> Array:
    """`scale` as a cotangent of a sum of type `like`, which may be an array of sums (one a layer, say)."""
    return vary(jnp.broadcast_to(scale.astype(like.dtype), like.shape), tuple(like.manual_axis_type.varying))

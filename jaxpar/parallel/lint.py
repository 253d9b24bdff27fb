"""A forgotten reduction, named by its dim: found from the types of a model's three parts before anything is compiled.

Without sequence parallelism no value at a block boundary may differ between the devices that split a parameter's dims, and
no term of the loss may: JAX tracks that in the type (varying manual axes). With it the same omission can pass unseen,
because tokens differ over `tensor` anyway. So the parts are traced with `sequence_parallel` off, whatever the run has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.config.layout import Layout, plan_leaf
from jaxpar.core.typing import Array, Params, PyTree, Terms
from jaxpar.core.vma import vary, varying
from jaxpar.mesh.specs import batch_spec, is_plan, param_specs
from jaxpar.parallel.ctx import SpmdContext
from jaxpar.parallel.forward import Batch, Forward

AbstractBatch = Mapping[str, jax.ShapeDtypeStruct]  # [M, rows, S]
TOGETHER = {"heads": ("kv_heads",)}  # attention pairs them head by head: one is never split alone


class ReductionError(ValueError):
    """A model whose values are partial sums where the trainer needs sums."""


def check_reductions(forward: Forward, mesh: Mesh, batch: AbstractBatch) -> None:
    """Raises ReductionError that names every dim of the model that is split and not summed over.

    Costs one abstract trace of embedding, block and head where nothing is wrong.
    """
    dims = split_dims(forward)
    if not dims:
        return
    cause = None
    try:
        if not _findings(forward, mesh, batch, dims):
            return
    except TypeError as error:
        cause = error
        _findings(forward, mesh, batch, ())  # a mistake that has nothing to do with splitting shows itself here
    groups = [(dim, *TOGETHER.get(dim, ())) for dim in dims if not any(dim in others for others in TOGETHER.values())]
    lines = [line for group in groups for line in _explain(forward, mesh, batch, group)]
    text = "\n".join(lines) if lines else f"model: partial sums over dims {', '.join(dims)}, though over no one of them alone"
    raise ReductionError(text) from cause


def split_dims(forward: Forward) -> tuple[str, ...]:
    """Dims of parameters that the mesh splits, so that a sum over one is a sum over devices. Experts are not: a token meets whole ones."""
    layout, plans = forward.layout, jax.tree.leaves(forward.plans, is_leaf=is_plan)
    names = dict.fromkeys(name for plan in plans for name in plan.names if name != "layers")
    return tuple(name for name in names if set(layout.split(name)) - set(layout.batch_axes))


def _explain(forward: Forward, mesh: Mesh, batch: AbstractBatch, dims: tuple[str, ...]) -> list[str]:
    try:
        return _findings(forward, mesh, batch, dims)
    except TypeError as error:  # the partial sum met a loop of the model's own
        reason = str(error).splitlines()[0]
        return [f"model: {_unsummed(forward.layout, dims[0])} ctx.leave(y, {dims[0]!r}) is missing inside a loop of the model ({reason})"]


def _unsummed(layout: Layout, dim: str) -> str:
    return f"dim {dim!r} is split over mesh axis {', '.join(map(repr, layout.split(dim)))} and nothing sums over it:"


@dataclass(frozen=True)
class _Recorder(SpmdContext):
    """The context of the step, noting which dims are entered and left."""

    calls: dict[str, list[str]] = field(default_factory=lambda: {"enter": [], "leave": []})

    def enter(self, x_bSD: Array, dim: str) -> Array:
        self.calls["enter"].append(dim)
        return super().enter(x_bSD, dim)

    def leave(self, y_bSD: Array, dim: str) -> Array:
        self.calls["leave"].append(dim)
        return super().leave(y_bSD, dim)

    @classmethod
    def of(cls, ctx: SpmdContext) -> "_Recorder":
        return cls(**{f.name: getattr(ctx, f.name) for f in fields(SpmdContext)})


def _findings(forward: Forward, mesh: Mesh, batch: AbstractBatch, dims: tuple[str, ...]) -> list[str]:
    """What is wrong when only `dims` of the parameters are split; each line names the first of them."""
    forward = _splitting_only(forward, dims)
    layout = forward.layout
    params = jax.tree.map(lambda plan: jax.ShapeDtypeStruct(plan.shape, forward.compute_dtype), forward.plans, is_leaf=is_plan)
    specs = batch_spec(layout)
    lines: list[str] = []

    def trace(params: Params, batch: Batch) -> Array:
        params = vary(params, layout.token_axes)
        params = params | {"blocks": jax.tree.map(lambda w: w[0], params["blocks"])}
        lines.extend(_lines_of_parts(forward, params, {name: x[0] for name, x in batch.items()}, dims))
        return jnp.zeros(())

    in_specs = (param_specs(layout, forward.plans), {name: specs[name] for name in batch})
    jax.eval_shape(jax.shard_map(trace, mesh=mesh, in_specs=in_specs, out_specs=P()), params, dict(batch))
    return lines


def _splitting_only(forward: Forward, dims: tuple[str, ...]) -> Forward:
    """The same run without sequence parallelism and ZeRO, and with no dim of a parameter split but these."""
    layout = forward.layout
    whole = {dim: () for dim in split_dims(forward) if dim not in dims}
    layout = replace(layout, rules={**layout.rules, **whole}, sequence_parallel=False, zero_stage=0)
    plans: PyTree = jax.tree.map(lambda p: plan_leaf(layout, p.path, p.names, p.shape), forward.plans, is_leaf=is_plan)
    return replace(forward, layout=layout, plans=plans)


def _lines_of_parts(forward: Forward, params: Params, batch: Batch, dims: tuple[str, ...]) -> list[str]:
    layout, model = forward.layout, forward.model
    axes = frozenset(axis for dim in dims for axis in layout.split(dim))
    dim = dims[0] if dims else ""
    unsummed = _unsummed(layout, dim) if dims else ""
    ctx = _Recorder.of(forward.context(batch, None))
    lines = []

    x_bSD = model.embed(params["embed"], batch["tokens"], ctx)
    if varying(x_bSD) & axes:
        lines.append(f"embed: {unsummed} look rows up with ctx.embed, or ctx.leave(x, {dim!r}) after the map that contracts it")
        return lines  # what follows would only repeat it
    recorder = _Recorder.of(ctx)
    y_bSD, terms = model.block(params["blocks"], x_bSD, recorder.at(0))
    if varying(y_bSD) & axes:
        lines.append(f"block: {unsummed} ctx.leave(y, {dim!r}) is missing after the map that contracts it")
    lines += _terms(terms, axes, f"block: {unsummed}", dim) + _not_entered(recorder, dims, "block")
    recorder = _Recorder.of(ctx)
    terms = model.head(params["head"], params["embed"], x_bSD, batch["targets"], batch["weights"], recorder)
    return lines + _terms(terms, axes, f"head: {unsummed}", dim) + _not_entered(recorder, dims, "head")


def _terms(terms: Terms, axes: frozenset[str], unsummed: str, dim: str) -> list[str]:
    partial = [name for name, pair in terms.items() if any(varying(x) & axes for x in pair)]
    advice = f"ctx.cross_entropy sums over it, ctx.leave(y, {dim!r}) after any other map that contracts it"
    return [f"{unsummed} term {name!r} is a partial sum; {advice}" for name in partial]


def _not_entered(ctx: _Recorder, dims: tuple[str, ...], part: str) -> list[str]:
    missing = [dim for dim in dict.fromkeys(ctx.calls["leave"]) if dim in dims and dim not in ctx.calls["enter"]]
    reason = "under sequence_parallel a device has its own tokens only, and would add up those of others"
    return [f"{part}: ctx.leave(y, {dim!r}) without ctx.enter(x, {dim!r}) before the map that produces it: {reason}" for dim in missing]

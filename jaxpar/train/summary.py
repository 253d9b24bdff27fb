"""What is about to run, for people, before the first step."""

import math

import jax
import jax.numpy as jnp

from jaxpar.build import Parts
from jaxpar.config.axes import AXES
from jaxpar.config.depth import schedule_of
from jaxpar.config.exchange import exchange_bytes
from jaxpar.config.notes_moe import moe_notes
from jaxpar.core.tree import named_leaves
from jaxpar.core.typing import PyTree
from jaxpar.core.words import size
from jaxpar.mesh.specs import is_plan
from jaxpar.models.init import param_names
from jaxpar.optim.build import describe_decay
from jaxpar.parallel.dispatch.grouped import product_words
from jaxpar.parallel.dispatch.local import Local
from jaxpar.parallel.dispatch.ragged import Ragged
from jaxpar.schedule.simulate import simulate
from jaxpar.train.flops import flops_per_token

Facts = list[tuple[str, str]]


def facts_of(parts: Parts) -> Facts:
    """(what, its value in words) of everything that decides speed, memory or meaning."""
    c, flops = parts.config, flops_per_token(parts)
    state = parts.placement.state
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    data = c.data
    dtypes = f"compute {c.compute_dtype}, parameters {c.param_dtype}"
    facts = [
        ("mesh", mesh_words(parts)),
        ("parameters", f"{count:,} stored ({dtypes})"),
        ("bytes a device", f"parameters {size(device_bytes(state.params))}, optimizer {size(device_bytes(state.opt_state))}"),
        ("attention", parts.attention),
        ("FLOPs a token", f"{flops[0] / 1e6:,.1f} M, {flops[1]}"),
        ("optimizer", f"{c.optimizer.name}, lr {c.optimizer.lr:g} {c.optimizer.schedule}"),
        *(tuple(line.split(": ", 1)) for line in describe_decay(param_names(parts.model)).splitlines()),
        ("batch", f"{data.global_batch_size} x {data.seq_len} tokens a step, microbatches: {c.num_microbatches}"),
        ("data", parts.train_data.describe()),
    ]
    facts[1:1] = [("pipeline", pipeline_words(parts))] if parts.layout.stages is not None else []
    facts += [("experts", experts_words(parts))] if c.model.moe else []
    facts += [("note", note) for note in moe_notes(c)]
    if data.has_eval:  # opened before the first step: a held-out set that is empty must not end a run that has trained
        facts.append(("held out", parts.eval_data.describe().splitlines()[0]))
    if whole := not_sharded(parts):
        facts.append((f"ZeRO-{c.zero_stage} keeps whole", ", ".join(whole)))
    return [(str(what), str(words)) for what, words in facts]


def mesh_words(parts: Parts) -> str:
    """Axes in their order, outer to inner, and what they are made of."""
    axes = " x ".join(f"{axis} {parts.layout.sizes[axis]}" for axis in AXES if parts.layout.sizes[axis] > 1) or "one device"
    device = parts.mesh.devices.flat[0]
    return f"{axes}, on {parts.mesh.size} x {device.device_kind}, ZeRO-{parts.config.zero_stage}"


def pipeline_words(parts: Parts) -> str:
    """The schedule, the layers of each virtual stage, and what the schedule costs if F, I and W take the same time."""
    stages = parts.layout.stages
    assert stages is not None
    timeline = simulate(schedule_of(parts.config, stages.shape.num_stages))
    layers = " ".join(map(str, stages.layers_per_stage))
    bubble = f"idle {100 * timeline.bubble_of_makespan:.1f} % of the makespan if F = I = W"
    held = f"{max(timeline.peak_in_flight):g} microbatches in flight at most"
    every = parts.config.model.moe.every if parts.config.model.moe else 1
    fills = len(stages.layers_per_stage) * every + parts.config.model.leading_dense
    empty = f" ({stages.empty} of them without; model.num_layers={fills} fills them)" if stages.empty else ""
    schedule = f"{timeline.schedule.name}, {parts.config.num_microbatches} microbatches"
    what = "layers" if every == 1 else f"blocks of {every} layers"
    return f"{schedule} through stages of {layers} {what}{empty}: {bubble}, {held}"


def experts_words(parts: Parts) -> str:
    """Who routes, how tokens travel, and what that costs."""
    moe, c = parts.config.model.moe, parts.config
    assert moe is not None
    room = "no token dropped" if moe.capacity_factor is None else f"places for {moe.capacity_factor:g} x the tokens of a balanced expert"
    way = moe.dispatch
    if isinstance(dispatch := parts.forward.dispatch, Ragged):
        way = f"ragged ({'ragged_all_to_all' if dispatch.native else 'padded exchange: this platform has no ragged_all_to_all'})"
    if isinstance(dispatch, Ragged | Local):
        dims = c.model.embed_dim, c.model.expert_dim // parts.layout.ways("mlp")
        way += f", products of tiles by {product_words(dispatch.native, jnp.dtype(c.compute_dtype), *dims)}"
    sent = exchange_bytes(c, parts.layout)
    over = f" over expert {parts.layout.ways('experts')}, {size(sent)} sent by a device in a step" if sent else ""
    return f"{moe.num_experts}, {moe.top_k} a token by {moe.router}, {room}, groups of {moe.routing_group_sequences} rows; {way}{over}"


def device_bytes(tree: PyTree) -> int:
    """Bytes of the largest shard of every leaf: what one device holds."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def not_sharded(parts: Parts) -> list[str]:
    """Parameters that ZeRO should shard and cannot: no free dim divides."""
    if not parts.config.zero_stage or not parts.layout.zero_axes:
        return []
    return [path for path, plan in named_leaves(parts.placement.plans, is_leaf=is_plan).items() if plan.zero_dim is None]

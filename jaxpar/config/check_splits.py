"""Sizes against the axes that split them: each part of a dim must be a whole number, or it is an error that says which sizes work."""

import difflib
import math
from collections.abc import Iterator, Mapping

from jaxpar.config.axes import AXES, BATCH_AXES, DIMS, MESH_KEYS
from jaxpar.config.layout import Layout, LayoutError, plan_leaf
from jaxpar.config.model import ModelConfig
from jaxpar.config.parameters import Leaf, parameter_table
from jaxpar.config.problem import Problem, divisors, near_multiples
from jaxpar.config.run import RunConfig

SHOWN = 16  # sizes listed in a message

# What a dim may be split over. Dims not named here (of the user's own) are treated as `mlp`.
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "router": (),
    "embed": (),  # activations keep these whole; ZeRO shards stored parameters on top of the rules
    "head_dim": (),
    "latent": (),
    "positions": (),
    "batch": BATCH_AXES,
    "seq": ("context",),
}
MUST = {"batch": BATCH_AXES, "seq": ("context",), "layers": ("pipe",)}  # left out, devices would compute the same twice


def rule_problems(rules: Mapping[str, str | tuple[str, ...] | None]) -> Iterator[Problem]:
    """`rules:` unknown axes, an axis spent twice, a split that the maths does not allow."""
    split: dict[str, tuple[str, ...]] = {}
    for dim, value in rules.items():
        key = f"rules.{dim}"
        axes = split[dim] = () if value is None else (value,) if isinstance(value, str) else tuple(value)
        near = difflib.get_close_matches(dim, DIMS, 1, 0.79)
        if dim not in DIMS and near:
            yield Problem((key,), f"{key}: unknown dim, nearly the name of {near[0]!r}; write rules.{near[0]}, or a name less like it")
            continue
        for axis in axes:
            if axis not in AXES:
                closest = difflib.get_close_matches(axis, AXES, 1)
                hint = f"did you mean {closest[0]}?" if closest else f"axes are {', '.join(AXES)}"
                yield Problem((key,), f"{key}: unknown mesh axis {axis!r}; {hint}")
            elif axes.count(axis) > 1:
                yield Problem((key,), f"{key}: mesh axis {axis} is used twice; write [{', '.join(dict.fromkeys(axes))}]")
                break
            elif axis not in ALLOWED.get(dim, ("tensor",)):
                yield Problem((key,), f"{key}: {dim} cannot be split over {axis}; {_allowed(dim, axis)}")
        lacking = [axis for axis in MUST.get(dim, ()) if axis not in axes]
        if lacking:
            yield Problem(
                (key,), f"{key}: lacks {', '.join(lacking)}, whose devices would all compute the same; write [{', '.join(MUST[dim])}]"
            )
    if not split.get("heads", ("tensor",)) and split.get("kv_heads", ("tensor",)):
        text = "rules.kv_heads: split over tensor while heads are whole; set rules.kv_heads=null as well"
        yield Problem(("rules.heads", "rules.kv_heads"), text)


def _allowed(dim: str, axis: str) -> str:
    axes = ALLOWED.get(dim, ("tensor",))
    works = f"[{', '.join(axes)}] or null" if axes and dim not in MUST else f"[{', '.join(axes)}]" if axes else "null"
    zero = (
        " (zero_stage: 3 shards parameters over data, expert and context)"
        if axis in ("data", "expert", "context") and dim not in MUST
        else ""
    )
    return f"write {works}{zero}"


def split_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Every dim of the model and of a batch against the axes of `layout`."""
    yield from _dim_problems(config, layout)
    yield from _whole_problems(config, layout)
    yield from _sequence_problems(config, layout)
    yield from _batch_problems(config, layout)
    yield from _zero_problems(config, layout)


def _dim_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    model = config.model
    dims = [
        ("heads", "model.num_heads", model.num_heads),
        ("kv_heads", "model.num_kv_heads" if model.num_kv_heads else "model.num_heads", model.kv_heads),
        *(("mlp", key, size) for key, size in _hidden_widths(model).items()),
        *([("experts", "model.moe.num_experts", model.moe.num_experts)] if model.moe else []),
        ("vocab", "model.vocab_size", model.padded_vocab_size),
    ]
    for dim, key, size in dims:
        ways, axes = layout.ways(dim), layout.split(dim)
        if size % ways == 0 or (dim == "kv_heads" and not model.num_kv_heads):
            continue
        named = " x ".join(f"mesh.{axis}={layout.sizes[axis]}" for axis in axes)
        fitting = [n for n in range(1, max(ways, 2 * size if dim == "kv_heads" else 1) + 1) if _fits(dim, size, n)][:SHOWN]
        works = f"{key}={near_multiples(size, ways)} would, or mesh.{axes[-1]} of {', '.join(map(str, fitting))}"
        if dim == "vocab":
            multiple = math.lcm(model.vocab_multiple, ways)
            padded = -(-model.vocab_size // multiple) * multiple
            works = f"model.vocab_multiple={multiple} pads it to {padded}, or mesh.{axes[-1]} of {', '.join(map(str, fitting))}"
        if dim == "kv_heads":
            works = f"mesh.{axes[-1]} may be {', '.join(map(str, fitting))} (a divisor, or a multiple that repeats them)"
        size_text = f"{model.vocab_size} (stored as {size})" if dim == "vocab" else str(size)
        keys = (key, "model.vocab_multiple") if dim == "vocab" else (key,)
        yield Problem((*keys, *MESH_KEYS), f"{key}: {size_text} does not divide over {named}; {works}")


def _hidden_widths(model: ModelConfig) -> dict[str, int]:
    """Keys that feed-forward layers have their widths from. Shared experts: a multiple of expert_dim, so what divides one divides them."""
    moe, dense = model.moe, {"model.mlp_dim": model.mlp_dim}
    if moe is None or moe.expert_dim is None:
        return dense
    has_dense = moe.leading_dense > 0 or moe.every > 1 or moe.residual
    return (dense if has_dense else {}) | {"model.moe.expert_dim": moe.expert_dim}


def _whole_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """`rules:` that leave a dim whole where something else counts on its split."""
    tensor, kv_heads = layout.sizes["tensor"], config.model.kv_heads
    for dim in ("heads", "mlp", "vocab"):
        if config.sequence_parallel and tensor > 1 and not layout.split(dim):
            text = f"rules.{dim}: null, but sequence_parallel splits the sequence over mesh.tensor={tensor} and needs {dim} split with it"
            yield Problem((f"rules.{dim}", "sequence_parallel", *MESH_KEYS), f"{text}; write [tensor], or sequence_parallel=false")
    if config.model.moe and (expert := layout.sizes["expert"]) > 1 and not layout.split("experts"):
        text = f"rules.experts: null, but mesh.expert={expert}, whose devices would all hold all experts"
        yield Problem(("rules.experts", *MESH_KEYS), f"{text}; write [expert], or mesh.expert=1")
    ways = layout.ways("heads")
    if ways > 1 and config.model.mla is None and not layout.split("kv_heads") and ways % kv_heads:
        text = f"rules.kv_heads: null, but model.num_kv_heads={kv_heads}, kept whole, would have to divide mesh.tensor={ways}"
        yield Problem(("rules.kv_heads", "model.num_kv_heads", *MESH_KEYS), f"{text}; leave rules.kv_heads out")


def _fits(dim: str, size: int, ways: int) -> bool:
    return size % ways == 0 or (dim == "kv_heads" and ways % size == 0)


def _sequence_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Ring: 2 x context chunks (a zig-zag of two a device). Sequence parallel: each context part again over tensor."""
    context, tensor, seq_len = layout.ways("seq"), layout.sizes["tensor"], config.data.seq_len
    reasons, multiple = [], context
    if context > 1 and config.context.method == "ring":
        reasons.append(f"ring attention: 2 x mesh.context={context}")
        multiple = math.lcm(multiple, 2 * context)
    elif context > 1:
        reasons.append(f"mesh.context={context}")
    if config.sequence_parallel and tensor > 1:
        reasons.append(f"sequence_parallel: context {context} x mesh.tensor={tensor}")
        multiple = math.lcm(multiple, context * tensor)
    keys = ("data.seq_len", "context.method", "sequence_parallel", *MESH_KEYS)
    if seq_len % multiple:
        near = near_multiples(seq_len, multiple)
        yield Problem(keys, f"data.seq_len: {seq_len} is not a multiple of {multiple} ({'; '.join(reasons)}); {near} would work")
    if context > 1 and config.context.method == "ulysses":
        yield from _ulysses_problems(config.model, layout, context)


def _ulysses_problems(model: ModelConfig, layout: Layout, context: int) -> Iterator[Problem]:
    """Every rank of `context` gets whole query heads, and whole key-value heads of which each may be repeated."""
    ways = layout.ways("heads")
    if model.num_heads % ways or model.kv_heads % layout.ways("kv_heads"):
        return  # reported by their dims
    heads = model.num_heads // ways
    kv_heads = model.kv_heads // ways if layout.split("kv_heads") == layout.split("heads") else 1
    legal = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if context in legal:
        return
    works = f"mesh.context may be {', '.join(map(str, legal))}, or context.method=ring"
    keys = ("context.method", "model.num_heads", "model.num_kv_heads", *MESH_KEYS)
    text = f"mesh.context: {context} does not divide the {heads} heads of a tensor rank, which context.method=ulysses needs"
    if heads % context == 0:
        fault = f"neither divides nor is a multiple of the {kv_heads} key-value heads of a tensor rank"
        text = f"mesh.context: {context} {fault}, as context.method=ulysses needs"
    yield Problem(keys, f"{text}; {works}")


def _batch_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    rows, parts, shards = config.data.global_batch_size, config.num_microbatches, layout.ways("batch")
    if rows % (parts * shards) == 0:
        return
    axes = " x ".join(f"mesh.{axis}={layout.sizes[axis]}" for axis in layout.batch_axes) or "1"
    works = f"data.global_batch_size={near_multiples(rows, parts * shards)} would work"
    if rows % shards == 0:
        works += f", or num_microbatches of {', '.join(map(str, divisors(rows // shards)[:SHOWN]))}"
    text = f"data.global_batch_size: {rows} is not a multiple of num_microbatches={parts} x batch shards {shards} ({axes})"
    yield Problem(("data.global_batch_size", "num_microbatches", *MESH_KEYS), f"{text}; {works}")


def _zero_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """A matrix that ZeRO cannot shard would be replicated in silence; norms and biases may be."""
    model = config.model
    if config.zero_stage == 0 or not layout.zero_axes or (model.positions == "learned" and model.max_positions is None):
        return
    stuck: list[tuple[Leaf, tuple[str, ...]]] = []
    for leaf in parameter_table(model):
        try:
            plan = plan_leaf(layout, leaf.path, leaf.names, layout.stored_shape(leaf.names, leaf.shape))
        except LayoutError:
            continue  # reported by its dim
        over = layout.free_zero_axes(plan.axes)
        if plan.zero_dim is None and over and leaf.path.endswith((".kernel", ".table")):
            stuck.append((leaf, over))
    if stuck:
        leaf, over = stuck[0]
        shape = " x ".join(map(str, leaf.shape))
        axes = " x ".join(f"mesh.{axis}={layout.sizes[axis]}" for axis in over)
        more = f" and {len(stuck) - 1} more" if len(stuck) > 1 else ""
        legal = ", ".join(map(str, divisors(model.embed_dim)[:SHOWN]))
        text = f"zero_stage: {config.zero_stage} cannot shard {leaf.path} ({shape}){more} over {axes} = {layout.size(over)}"
        keys = ("zero_stage", "model.embed_dim", "model.num_heads", "model.head_dim", "model.mlp_dim", "model.mla", "model.moe", *MESH_KEYS)
        product = "data x expert x context" if "expert" in over else "data x context"
        works = f"zero_stage=0 would work, or {product} of {legal} (they divide model.embed_dim={model.embed_dim})"
        yield Problem(keys, f"{text}: no free dim divides; {works}")

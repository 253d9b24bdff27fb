"""Plans of parameters -> PartitionSpecs and shardings, for each of the places where a parameter's numbers live."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config.layout import Layout, LayoutError, LeafPlan, plan_leaf
from jaxpar.core.tree import path_name
from jaxpar.core.typing import PyTree

PER_TOKEN = ("tokens", "targets", "weights", "positions", "segments")  # arrays of a batch with a sequence; "samples" has rows only


def is_names(x: object) -> bool:
    """True for a leaf of a tree of dim names."""
    return isinstance(x, tuple) and all(isinstance(name, str) for name in x)


def is_plan(x: object) -> bool:
    """True for a leaf of a tree of plans."""
    return isinstance(x, LeafPlan)


def plan_tree(layout: Layout, names: PyTree, shapes: PyTree) -> PyTree:
    """A LeafPlan for every parameter; all that does not fit is reported together.

    names: tree of tuples of dim names. shapes: the same tree of arrays or ShapeDtypeStructs.
    """
    problems: list[str] = []

    def one(path: tuple, leaf_names: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> LeafPlan | None:
        try:
            return plan_leaf(layout, path_name(path), leaf_names, tuple(leaf.shape))
        except LayoutError as error:
            problems.append(str(error))
            return None

    plans = jax.tree_util.tree_map_with_path(one, names, shapes, is_leaf=is_names)
    if problems:
        raise LayoutError("\n".join(problems))
    return plans


def to_spec(axes: tuple[tuple[str, ...], ...]) -> P:
    """Axes of each dim -> PartitionSpec, without trailing Nones."""
    entries = [spec_entry(dim_axes) for dim_axes in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def spec_entry(axes: tuple[str, ...]) -> tuple[str, ...] | str | None:
    """Axes of one dim in the form that PartitionSpec prints best."""
    return axes if len(axes) > 1 else (axes[0] if axes else None)


def param_specs(layout: Layout, plans: PyTree) -> PyTree:
    """How parameters are stored: ZeRO-3 shards them."""
    return jax.tree.map(lambda plan: to_spec(plan.spec(sharded=layout.zero_stage >= 3)), plans, is_leaf=is_plan)


def sharded_specs(layout: Layout, plans: PyTree) -> PyTree:
    """How optimizer state is stored and gradients leave the step: sharded from ZeRO-1 on."""
    return jax.tree.map(lambda plan: to_spec(plan.spec(sharded=layout.zero_stage >= 1)), plans, is_leaf=is_plan)


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """PartitionSpecs -> NamedShardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def batch_spec(layout: Layout, *, microbatched: bool = True) -> dict[str, P]:
    """Specs of a batch: [M, rows, S] (or [rows, S]); rows over the batch axes, the sequence over `context`."""
    lead = (None,) if microbatched else ()
    rows, seq = spec_entry(layout.batch_axes), spec_entry(layout.context_axes)
    return {name: P(*lead, rows, seq) for name in PER_TOKEN} | {"samples": P(*lead, rows)}

"""The reduction of gradients at the end of a step, derived from types: no table of who reduces what.

A gradient is a partial sum over every axis that it still varies over and that its own spec does not use.
"""

import jax
from jax import lax

from jaxpar.config.layout import Layout, LeafPlan
from jaxpar.core.typing import Array, PyTree
from jaxpar.core.vma import varying
from jaxpar.mesh.specs import is_plan
from jaxpar.parallel.zero import scatter_gradient


def reduce_gradients(layout: Layout, plans: PyTree, grads: PyTree) -> PyTree:
    """Partial sums of every leaf -> gradients laid out as `mesh.specs.sharded_specs` says."""
    if layout.zero_stage == 1:
        grads = jax.tree.map(lambda plan, g: scatter_gradient(plan, g), plans, grads, is_leaf=is_plan)
    plan_leaves = jax.tree.leaves(plans, is_leaf=is_plan)
    leaves, tree = jax.tree.flatten(grads)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (plan, g) in enumerate(zip(plan_leaves, leaves, strict=True)):
        groups.setdefault(_partial_over(layout, plan, g), []).append(i)
    for axes, members in groups.items():
        if axes:
            for i, summed in zip(members, lax.psum([leaves[i] for i in members], axes), strict=True):
                leaves[i] = summed
    return jax.tree.unflatten(tree, leaves)


def _partial_over(layout: Layout, plan: LeafPlan, g: Array) -> tuple[str, ...]:
    kept = {axis for dim_axes in plan.spec(sharded=layout.zero_stage >= 1) for axis in dim_axes}
    return tuple(axis for axis in layout.sizes if axis in varying(g) and axis not in kept)

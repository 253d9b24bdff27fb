"""What a layer keeps for its backward pass: by name, nothing, or everything but prepared weights."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpar.config.layout import Layout, LeafPlan
from jaxpar.config.train import RematConfig
from jaxpar.core.typing import PyTree
from jaxpar.mesh.specs import is_plan

Policy = Callable[..., Any]


def remat_policy(remat: RematConfig, layout: Layout, block_plans: PyTree) -> Policy:
    """The `jax.checkpoint` policy of a layer."""
    if remat.policy == "none":
        return keep_all_but_weights(layout, block_plans)
    return jax.checkpoint_policies.save_only_these_names(*(remat.save if remat.policy == "selective" else ()))


def keep_all_but_weights(layout: Layout, block_plans: PyTree) -> Policy:
    """Keep every residual except a layer's gathered (ZeRO-3) or cast weights, which are made again from the stored ones.

    Kept, those of all layers would be there at once, and ZeRO-3 would save nothing. They are told by what makes them: `zero`'s
    gather (a function with its own backward rule) or a cast, of arrays that all have the shape of a stored weight.
    """
    stored = {_local_shape(layout, plan) for plan in jax.tree.leaves(block_plans, is_leaf=is_plan)}

    def policy(primitive: Any, *avals: Any, **_: Any) -> bool:
        prepares = primitive.name in ("custom_vjp_call", "convert_element_type")
        return not (prepares and all(aval.shape in stored for aval in avals))

    return policy


def _local_shape(layout: Layout, plan: LeafPlan) -> tuple[int, ...]:
    """A device's part of one layer's stored weight."""
    spec = plan.spec(sharded=layout.zero_stage >= 3)
    return tuple(size // layout.size(axes) for size, axes in zip(plan.shape, spec, strict=True))[1:]

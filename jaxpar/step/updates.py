"""Parameters that a rule of the model moves once per optimizer step, in place of a gradient (`Model.updates`)."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxpar.config.stages import Stages
from jaxpar.core.protocols import Update
from jaxpar.core.tree import path_name
from jaxpar.core.typing import Array, Params

Rules = Callable[[Params, Params, Mapping[str, Array], Array], Params]


def apply_rules(updates: Mapping[str, Update], stages: Stages | None) -> Rules:
    """(parameters before the step, after the optimizer, means of the terms, whether the step counts) -> parameters.

    stages: in which rows the layers lie, on a pipeline. KeyError where a rule names no parameter.
    """

    def rules(before: Params, after: Params, means: Mapping[str, Array], ok: Array) -> Params:
        left = dict(updates)

        def one(path: tuple, old: Array, new: Array) -> Array:
            update = left.pop(path_name(path), None)
            if update is None:
                return new
            moved = jax.vmap(update.rule)(old, _by_row(means[update.of], stages)).astype(old.dtype)
            return jnp.where(ok, moved, old)

        blocks = jax.tree_util.tree_map_with_path(one, before["blocks"], after["blocks"])
        if left:
            raise KeyError(f"model: updates of parameters that a block has not: {', '.join(left)}")
        return {**after, "blocks": blocks}

    return rules


def _by_row(of_layer: Array, stages: Stages | None) -> Array:
    """[layers, ...] -> [stored rows, ...]; rows that belong to no layer get those of the first, which nothing reads."""
    return of_layer if stages is None else of_layer[jnp.asarray([max(layer, 0) for layer in stages.layer_of_row])]

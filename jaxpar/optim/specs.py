"""Where optimizer state lives: moments like their parameter, counters and factors everywhere."""

from typing import Any

import jax

from jaxpar.core.tree import path_name
from jaxpar.core.typing import PyTree

SMALL = 65_536  # elements that may be replicated however small their parameter is


def state_specs(opt_state: PyTree, params: PyTree, param_specs: PyTree, replicated: Any) -> PyTree:
    """The tree of `opt_state` with a spec for each leaf.

    A state leaf belongs to the parameter whose key path ends its own; with the parameter's shape too it takes the parameter's spec,
    else (step counters, Adafactor's rows and columns) `replicated`. `opt_state` and `params` may be abstract; `param_specs` has the
    tree of `params` and may hold anything (partition specs, shardings, tuples). Raises ValueError where a leaf that would be
    replicated is as large as its parameter.
    """
    paths_and_params, treedef = jax.tree_util.tree_flatten_with_path(params)
    specs = treedef.flatten_up_to(param_specs)
    known = {path_name(path): (param, spec) for (path, param), spec in zip(paths_and_params, specs, strict=True)}

    def one(path: tuple[Any, ...], leaf: Any, owner: str) -> Any:
        if not owner:
            return replicated
        param, spec = known[owner]
        if leaf.shape == param.shape:
            return spec
        if leaf.size >= max(SMALL, param.size):
            raise ValueError(
                f"optimizer state {path_name(path)} of shape {leaf.shape} would be replicated, "
                f"yet it is as large as its parameter {owner} of shape {param.shape}"
            )
        return replicated

    return jax.tree_util.tree_map_with_path(one, opt_state, owner_names(opt_state, params))


def owner_names(opt_state: PyTree, params: PyTree) -> PyTree:
    """For each leaf of the state the name of the parameter whose key path ends its own, or ""."""
    known = {path: path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    lengths = sorted({len(path) for path in known}, reverse=True)

    def one(path: tuple[Any, ...], _: Any) -> str:
        return next((known[path[len(path) - n :]] for n in lengths if path[len(path) - n :] in known), "")

    return jax.tree_util.tree_map_with_path(one, opt_state)

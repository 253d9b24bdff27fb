"""Pytrees by name: every leaf has one readable path ("blocks.attention.query.kernel"), used in plans, logs and checkpoints."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.core.typing import PyTree


class LeafType(NamedTuple):
    """What a leaf is, without its values."""

    shape: tuple[int, ...]
    dtype: str  # numpy's name: float32, bfloat16, int32 ...

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jax.numpy.dtype(self.dtype).itemsize


def leaf_type(leaf: Any) -> LeafType:
    """Shape and dtype of an array or a `jax.ShapeDtypeStruct`."""
    return LeafType(tuple(leaf.shape), np.dtype(leaf.dtype).name)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util` as dotted text."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Path -> leaf, in the order of the tree. Two leaves of one path ({"a.b": .} beside {"a": {"b": .}}) are an error."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        name = path_name(path)
        if name in named:
            raise ValueError(f"two leaves are both called {name!r}: a key must not contain '.' where it makes paths equal")
        named[name] = leaf
    return named


def leaf_types(tree: PyTree) -> dict[str, LeafType]:
    """Path -> shape and dtype of every leaf."""
    return {name: leaf_type(leaf) for name, leaf in named_leaves(tree).items()}


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all leaves at their global shapes."""
    return sum(leaf_type(leaf).num_bytes for leaf in jax.tree.leaves(tree))


def tree_differences(
    found: Mapping[str, LeafType], wanted: Mapping[str, LeafType], *, found_in: str = "found", wanted_in: str = "wanted"
) -> list[str]:
    """One line for each leaf that only one side has, or whose shape or dtype differs; empty: the trees agree."""
    lines = []
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            lines.append(f"{name}: missing in the {found_in}; the {wanted_in} has {wanted[name]}")
        elif name not in wanted:
            lines.append(f"{name}: unknown to the {wanted_in}; the {found_in} has {found[name]}")
        elif found[name] != wanted[name]:
            keys = [key for key in ("shape", "dtype") if getattr(found[name], key) != getattr(wanted[name], key)]
            what = " and ".join(keys) + (" differ" if len(keys) > 1 else " differs")
            lines.append(f"{name}: {what}: {found_in} {found[name]}, {wanted_in} {wanted[name]}")
    return lines

"""What a parameter is, told from the names of its dims: a matrix, a stack of matrices, or something that is neither.

Rank tells nothing: leaves are stacked over layers and experts, and one side of a matrix may be two dims (heads, head_dim).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpar.core.typing import PyTree
from jaxpar.mesh.specs import is_names

# Leading dims that only stack copies of a parameter.
STACK_DIMS = ("layers", "experts")
# A dim that is the second half of one space together with the dim before it.
_JOINS = {"head_dim": ("heads", "kv_heads")}
# Rows that are looked up or scored one by one: orthogonalising across them has no meaning.
TABLE_DIMS = ("vocab", "positions")


class MatrixDims(NamedTuple):
    """Positions of the dims that stack, and of those on each side of the matrix."""

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def dim_spaces(names: tuple[str, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """(stacking dims, spaces): ("layers", "embed", "heads", "head_dim") -> ((0,), [(1,), (2, 3)])."""
    start = 0
    while start < len(names) and names[start] in STACK_DIMS:
        start += 1
    spaces: list[tuple[int, ...]] = []
    for i in range(start, len(names)):
        if i > start and names[i - 1] in _JOINS.get(names[i], ()):
            spaces[-1] = (*spaces[-1], i)
        else:
            spaces.append((i,))
    return tuple(range(start)), spaces


def decays(names: tuple[str, ...]) -> bool:
    """Weight decay applies to maps between spaces, tables included; never to norm scales, biases or other vectors."""
    return len(dim_spaces(names)[1]) >= 2


def matrix_dims(names: tuple[str, ...]) -> MatrixDims | None:
    """The matrix that a parameter stacks, or None for vectors, tables of tokens or positions, and anything of three spaces."""
    stack, spaces = dim_spaces(names)
    if len(spaces) != 2 or any(name in TABLE_DIMS for name in names):
        return None
    return MatrixDims(stack, *spaces)


def stacked(names: tuple[str, ...]) -> bool:
    """True where the leaf stacks layers."""
    return bool(names) and names[0] == "layers"


def map_names(function: Callable[[tuple[str, ...]], Any], names: PyTree) -> PyTree:
    """`jax.tree.map` over a tree of dim names."""
    return jax.tree.map(function, names, is_leaf=is_names)

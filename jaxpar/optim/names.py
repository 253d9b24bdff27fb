"""What a parameter is, told from the names of its dims: a matrix, a stack of matrices, or something that is neither."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpar.config.dims import dim_spaces
from jaxpar.core.typing import PyTree
from jaxpar.mesh.specs import is_names

# Rows that are looked up or scored one by one: orthogonalising across them has no meaning.
TABLE_DIMS = ("vocab", "positions")


class MatrixDims(NamedTuple):
    """Positions of the dims that stack, and of those on each side of the matrix."""

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


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

"""Muon for matrices, Adam for the rest, under one learning rate."""

import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxpar.core.typing import PyTree
from jaxpar.mesh.specs import is_names
from jaxpar.optim.names import map_names, matrix_dims

DEFAULT_MOMENTUM = 0.95
# RMS that AdamW's updates have in practice (Liu et al. 2025, section 2.2): one learning rate then serves both rules.
UPDATE_RMS = 0.2


def _scale_to_rms(names: PyTree) -> optax.GradientTransformation:
    """An orthogonal [m, n] matrix has RMS 1 / sqrt(max(m, n)): multiply by 0.2 sqrt(max(m, n)) (Liu et al. 2025, eq. 4)."""

    def scale(leaf_names: tuple[str, ...], update: jax.Array | optax.MaskedNode) -> jax.Array | optax.MaskedNode:
        dims = matrix_dims(leaf_names)
        if dims is None or isinstance(update, optax.MaskedNode):
            return update
        sides = [math.prod(update.shape[i] for i in side) for side in (dims.rows, dims.columns)]
        return update * jnp.asarray(UPDATE_RMS * math.sqrt(max(sides)), update.dtype)

    return optax.stateless(lambda updates, _: jax.tree.map(scale, names, updates, is_leaf=is_names))


def scale_by_muon(names: PyTree, *, momentum: float, beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """Orthogonalised Nesterov momentum (Jordan et al. 2024) for each matrix of a stack; Adam for vectors, tables and the rest.

    A query kernel ("layers", "embed", "heads", "head_dim") is, for each layer, one matrix from embed to heads x head_dim.
    """

    def dimension_numbers(leaf: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | optax.MaskedNode:
        dims = matrix_dims(leaf)
        return optax.MaskedNode() if dims is None else optax.contrib.MuonDimensionNumbers(dims.rows, dims.columns)

    matrices = optax.chain(
        optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=map_names(dimension_numbers, names)), _scale_to_rms(names)
    )
    rules: dict[Hashable, optax.GradientTransformation] = {"matrix": matrices, "other": optax.scale_by_adam(beta1, beta2, eps)}
    return optax.partition(rules, map_names(lambda leaf: "other" if matrix_dims(leaf) is None else "matrix", names))

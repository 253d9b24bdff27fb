"""One step of the optimizer, or none: a step that is not finite leaves everything as it was."""

import jax
import optax
from jaxtyping import Array, Bool, Float

from jaxpar.core.typing import PyTree


def guarded_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    learning_rate: Float[Array, ""],
    factor: Float[Array, ""],
    ok: Bool[Array, ""],
) -> tuple[PyTree, PyTree]:
    """(params, opt_state) after p - lr direction(factor g) where ok, unchanged where not; on global arrays, shardings kept.

    A conditional, not a select on every leaf: with `where(ok, new, old)` on donated state XLA:CPU computes the new moments twice and
    copies the old ones first (measured for AdamW on 8.4M parameters: 24 ms against 6, and temporaries of twice the parameters).
    """

    def move(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        directions, opt_state = optimizer.update(clipped, opt_state, params)
        return jax.tree.map(lambda p, d: p - learning_rate.astype(p.dtype) * d, params, directions), opt_state

    def stay(_: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return params, opt_state

    return jax.lax.cond(ok, move, stay, grads, opt_state, params)

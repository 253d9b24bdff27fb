"""Running something on some stages only, without copying what it changes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.core.typing import Array
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.pipeline.program import AXIS, Type, varying_of

T = TypeVar("T")
G = TypeVar("G")


def run_if(on: Array, function: Callable[[G, T], T], given: G, carry: T) -> T:
    """`function(given, carry)` where `on`, else `carry`; stages may differ. `function` must take what the tick has made from `given`.

    A loop of at most one trip: it updates what it carries in place, where XLA copies whatever passes through a conditional
    (seen on CPU, JAX 0.10.2: stash and gradients twice in every tick, and twice the memory).
    """
    trips = on.astype(jnp.int32)
    start = vary(jnp.zeros((), jnp.int32), tuple(varying(trips)))

    def body(state: tuple[Array, T]) -> tuple[Array, T]:
        trip, carry = state
        return trip + 1, function(_tied(trip, given), _tied(trip, carry))

    return lax.while_loop(lambda state: state[0] < trips, body, (start, carry))[1]


def _tied(trip: Array, tree: T) -> T:
    """The same values, but nothing that XLA could know before the loop.

    Or it takes all that is computed from what the loop does not change out of it (the products of a chunk of one layer), and every
    stage computes them in every tick, in bubbles too (law L6).
    """

    def tie(x: Array) -> Array:
        return lax.optimization_barrier((vary(trip, tuple(varying(x))), x))[1] if AXIS in varying(x) else x

    return jax.tree.map(tie, tree)


def put(buffers: Sequence[Array], values: Sequence[Array], *at: Array | int) -> list[Array]:
    """Each value written into its buffer at these leading indices."""
    return [_put(buffer, value, at) for buffer, value in zip(buffers, values, strict=True)]


def _put(buffer: Array, value: Array, at: tuple[Array | int, ...]) -> Array:
    block = value.astype(buffer.dtype).reshape((1,) * len(at) + value.shape)
    return lax.dynamic_update_slice(buffer, vary(block, tuple(varying(buffer))), _corner(at, value.ndim))


def get(buffer: Array, *at: Array | int) -> Array:
    """The inverse of `put` for one buffer."""
    rest = buffer.shape[len(at) :]
    return lax.dynamic_slice(buffer, _corner(at, len(rest)), (*[1] * len(at), *rest)).reshape(rest)


def _corner(at: tuple[Array | int, ...], num_whole: int) -> tuple[Array, ...]:
    """Start of a slice. Of one type: in 64-bit programs a Python 0 would be wider than the slots of a table."""
    return tuple(jnp.asarray(i, jnp.int32) for i in (*at, *[0] * num_whole))


def loop(trips: Array | int, body: Callable[[Array, T], T], carry: T) -> T:
    """`lax.fori_loop` from 0, with an int32 counter in 64-bit programs too."""
    return lax.fori_loop(np.int32(0), np.int32(trips) if isinstance(trips, int) else trips, body, carry)


def add(buffer: Array, value: Array, *at: Array | int) -> Array:
    """`value` added to the buffer at these leading indices."""
    return _put(buffer, get(buffer, *at) + value.astype(buffer.dtype), at)


def buffer(like: Type, *lead: int) -> Array:
    """Room for values of this type; what it holds before something is put there is never used (law L6)."""
    return vary(empty(like, *lead), (AXIS,))


def zeros(like: Type, *lead: int) -> Array:
    """Zeros of this type, to add to."""
    return vary(jnp.zeros((*lead, *like.shape), like.dtype), tuple(varying_of(like)))


empty = zeros  # a test fills it with NaN

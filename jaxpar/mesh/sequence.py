"""Which token of a row sits at which slot when the sequence is split over `context`: the feed permutes rows, the step asks positions."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Order = Int[np.ndarray, " S"]


def _in_turn(seq_len: int, ways: int) -> Order:
    """Rank r holds the r-th contiguous part."""
    _check(seq_len, ways, ways)
    return np.arange(seq_len)


def _zig_zag(seq_len: int, ways: int) -> Order:
    """Rank r holds chunks r and 2 ways - 1 - r of 2 ways chunks, so causal work is equal (Brandon et al. 2023; Llama 3, section 3.3.2)."""
    _check(seq_len, ways, 2 * ways)
    chunks = np.arange(seq_len).reshape(2 * ways, -1)
    return np.concatenate([chunks[[r, 2 * ways - 1 - r]].reshape(-1) for r in range(ways)])


ORDERS: dict[str, Callable[[int, int], Order]] = {"ring": _zig_zag, "all_gather": _in_turn, "ulysses": _in_turn}


def sequence_order(seq_len: int, ways: int, method: str) -> Order:
    """order[i] = natural position of the token stored at slot i; ValueError where seq_len does not divide."""
    if method not in ORDERS:
        raise ValueError(f"unknown context method {method!r}: one of {', '.join(ORDERS)}")
    return np.arange(seq_len) if ways == 1 else ORDERS[method](seq_len, ways)


def natural_order(seq_len: int, ways: int, method: str) -> Order:
    """The inverse: slot that holds natural position i, so that `stored[natural_order(...)]` is in natural order."""
    return np.argsort(sequence_order(seq_len, ways, method))


def local_index(seq_len: int, ways: int, method: str, rank: Array | int) -> Int[Array, " S"]:
    """Natural positions of the tokens that `rank` (of the `context` axis) holds, int32 [seq_len / ways]."""
    shards = sequence_order(seq_len, ways, method).reshape(ways, -1)
    return jnp.take(jnp.asarray(shards, jnp.int32), rank, axis=0)


def _check(seq_len: int, ways: int, parts: int) -> None:
    if seq_len % parts:
        below = seq_len - seq_len % parts
        legal = " or ".join(str(n) for n in (below, below + parts) if n)
        raise ValueError(f"seq_len {seq_len} does not divide into {parts} equal chunks for context = {ways}; use {legal}")

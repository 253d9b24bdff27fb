"""Places in the experts' buffers: who is taken and who is dropped, a function of the group alone (law L4)."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

DropPolicy = Literal["position", "choice", "probability"]


def places(
    expert_gTk: Int[Array, "g T k"], gate_gTk: Float[Array, "g T k"] | None, num_experts: int, capacity: int, policy: DropPolicy
) -> Int[Array, "g T k"]:
    """The place of each choice among those of its expert, in [0, capacity); -1 where it is dropped or there is no expert.

    position: tokens in order, each with all its choices (Megatron-LM `position`). choice: all first choices in order, then all second
    ones (GShard, arXiv 2006.16668, algorithm 1). probability: the largest gates first, then by position (Megatron-LM `probs`).
    """
    rank = jax.vmap(lambda e, p: _ranks(e, p, num_experts))(expert_gTk, _priority(expert_gTk, gate_gTk, policy))
    return jnp.where((expert_gTk >= 0) & (rank < capacity), rank, jnp.full_like(rank, -1))


def _priority(expert_gTk: Array, gate_gTk: Array | None, policy: DropPolicy) -> Array:
    """Smaller is earlier; equal ones go by position."""
    if policy == "probability":
        assert gate_gTk is not None
        return -gate_gTk
    choice_k = jnp.arange(expert_gTk.shape[-1], dtype=jnp.int32)
    return jnp.broadcast_to(choice_k if policy == "choice" else jnp.zeros_like(choice_k), expert_gTk.shape)


def _ranks(expert_Tk: Array, priority_Tk: Array, num_experts: int) -> Array:
    """How many choices of the same expert come before each one. Sorted, for a cumulative sum of one-hots needs T x k x E integers."""
    flat_N = expert_Tk.reshape(-1)
    num = flat_N.shape[0]
    expert_N = jnp.where(flat_N < 0, jnp.full_like(flat_N, num_experts), flat_N)  # those without an expert last
    index_N = jnp.arange(num, dtype=jnp.int32)
    sorted_N, _, order_N = lax.sort((expert_N, priority_Tk.reshape(-1), index_N), num_keys=3)
    # Where the run of each expert begins, seen from every place of the sorted list.
    first_N = jnp.concatenate([jnp.ones((1,), bool), sorted_N[1:] != sorted_N[:-1]])
    begin_N = lax.cummax(jnp.where(first_N, index_N, jnp.zeros_like(index_N)))
    rank_N = jnp.zeros_like(index_N).at[order_N].set(index_N - begin_N, unique_indices=True)
    return rank_N.reshape(expert_Tk.shape)

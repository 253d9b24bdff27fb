"""Ring attention: queries stay, keys and values travel round `context`, each device meeting every block once.

Liu et al. 2023 (Ring Attention with Blockwise Transformers) with the zig-zag split: rank r holds chunks r and 2n - 1 - r of 2n, so after
its own block every step costs every rank exactly two of the quarter products (half the queries x half the keys), none of them on a
causal diagonal. The second quarter is chosen by selecting its operands and not by `lax.cond`: both cases are one program, and a GPU need
not wait on a predicate before each step.

The backward pass is written by hand from the final output and log-sum-exp (FlashAttention-2, algorithm 2): kernels may drop the gradient
of a block's log-sum-exp (cuDNN's does), and nothing but q, k, v, o and one number a row is kept.

Collectives of n ranks, k and v as one array: forward n - 1 permutes; backward n - 1 permutes of (k, v) and n of (dk, dv) in the
accumulation dtype. Each but the last is sent before the block that it overlaps with. With documents kept apart, the forward pass gathers
the int32 segments once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.core.vma import vary, vary_alike
from jaxpar.mesh.sequence import local_index
from jaxpar.ops.attention import AttentionSpec, DropoutWords, Kernel, Visibility

T = TypeVar("T")
Rows = tuple[Array, Array, Array, Array]


@dataclass(frozen=True)
class Ring:
    """What is static."""

    kernel: Kernel
    spec: AttentionSpec
    axis: str
    ways: int
    staged: bool  # stages of a pipeline run it at different times

    def send(self, x: Array) -> Array:
        """To the next rank."""

        def permuted(x: Array) -> Array:
            return lax.ppermute(x, self.axis, [(r, (r + 1) % self.ways) for r in range(self.ways)])

        def gathered(x: Array) -> Array:
            return lax.dynamic_index_in_dim(lax.all_gather(x, self.axis), (lax.axis_index(self.axis) - 1) % self.ways, keepdims=False)

        # XLA:CPU matches permutes by the order in which all devices of the program come to one, whatever their pairs: those of one
        # stage would meet another's. Gathers have groups.
        return lax.platform_dependent(x, cpu=gathered, default=permuted) if self.staged else permuted(x)


class Tokens(NamedTuple):
    """What masks and dropout need to know of the local tokens."""

    index_S: Array
    segments_bS: Array | None
    words: DropoutWords | None


class Sums(NamedTuple):
    """Output and log-sum-exp [b, H, S] over the keys met so far."""

    o: Array
    lse: Array

    def part(self, queries: slice) -> "Sums":
        return Sums(self.o[:, queries], self.lse[:, :, queries])


def attend(
    q_bSHK: Float[Array, "b S H K"],
    k_bSGK: Float[Array, "b S G K"],
    v_bSGK: Float[Array, "b S G K"],
    *,
    kernel: Kernel,
    spec: AttentionSpec,
    axis: str,
    ways: int,
    staged: bool = False,
    index_S: Int[Array, " S"],
    segments_bS: Int[Array, "b S"] | None = None,
    dropout_words: DropoutWords | None = None,
) -> Float[Array, "b S H K"]:
    """Attention over the whole sequence; tokens in the zig-zag order of `mesh.sequence`, index_S their natural positions."""
    tokens = Tokens(index_S, segments_bS, dropout_words if spec.dropout else None)
    leaves, treedef = jax.tree.flatten(vary((q_bSHK, k_bSGK, v_bSGK, tokens), (axis,)))
    return _attend(Ring(kernel, spec, axis, ways, staged), *jax.tree.unflatten(treedef, vary_alike(*leaves)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, q: Array, k: Array, v: Array, tokens: Tokens) -> Array:
    return _forward(ring, q, k, v, tokens)[0]


def _forward(ring: Ring, q: Array, k: Array, v: Array, tokens: Tokens) -> tuple[Array, tuple[Any, ...]]:
    segments = None if tokens.segments_bS is None else lax.all_gather(tokens.segments_bS, ring.axis)
    meet = partial(_step_forward, ring, tokens, segments, q)

    def middle(carry: tuple[Array, Sums], step: Array) -> tuple[tuple[Array, Sums], None]:
        kv, sums = carry
        following = ring.send(kv)
        return (following, meet(kv, sums, step)), None

    kv = ring.send(jnp.stack([k, v]))
    sums = Sums(*ring.kernel.block_forward(q, k, v, _own(ring, tokens)))
    if ring.ways > 2:
        (kv, sums), _ = lax.scan(middle, (kv, sums), jnp.arange(1, ring.ways - 1, dtype=jnp.int32))
    o, lse = meet(kv, sums, ring.ways - 1)
    o = o.astype(q.dtype)
    return o, (q, k, v, o, lse, tokens, segments)


def _backward(ring: Ring, residuals: tuple[Any, ...], do: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, o, lse, tokens, segments = residuals
    meet = partial(_step_backward, ring, tokens, segments, (q, o, do, jnp.swapaxes(lse, 1, 2)))

    def middle(carry: tuple[Array, Array, Array], step: Array) -> tuple[tuple[Array, Array, Array], None]:
        kv, dkv, dq = carry
        following, arrived = ring.send(kv), ring.send(dkv)
        return (following, *meet(kv, arrived, dq, step)), None

    kv = ring.send(jnp.stack([k, v]))
    dq, dk, dv = ring.kernel.block_backward(q, k, v, o, lse, do, _own(ring, tokens))
    dkv = jnp.stack([dk, dv])
    if ring.ways > 2:
        (kv, dkv, dq), _ = lax.scan(middle, (kv, dkv, dq), jnp.arange(1, ring.ways - 1, dtype=jnp.int32))
    dkv, dq = meet(kv, ring.send(dkv), dq, ring.ways - 1)
    dk, dv = ring.send(dkv)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _own(ring: Ring, tokens: Tokens) -> Visibility:
    """Step 0: the local tokens rise in order, so the plain causal mask holds."""
    index_S, segments_bS, words = tokens
    return Visibility(ring.spec, "same", index_S, index_S, segments_bS, segments_bS, words)


def _met(ring: Ring, tokens: Tokens, segments: Array | None, step: Array | int) -> tuple[Visibility, Array]:
    """What the local queries see of the block met at a step, and whether it comes from an earlier rank."""
    rank = lax.axis_index(ring.axis)
    source = (rank - step) % ring.ways
    k_index_T = local_index(tokens.index_S.shape[0] * ring.ways, ring.ways, "ring", source).astype(tokens.index_S.dtype)
    k_segments_bT = None if segments is None else lax.dynamic_index_in_dim(segments, source, keepdims=False)
    relation = "past" if ring.spec.causal else "any"
    return Visibility(ring.spec, relation, tokens.index_S, k_index_T, tokens.segments_bS, k_segments_bT, tokens.words), source < rank


def _step_forward(ring: Ring, tokens: Tokens, segments: Array | None, q: Array, kv: Array, sums: Sums, step: Array | int) -> Sums:
    sees, past = _met(ring, tokens, segments, step)
    if not ring.spec.causal:
        return _merge(sums, ring.kernel.block_forward(q, kv[0], kv[1], sees))
    low, high = _halves(q.shape[1])
    (q1, kv1, sees1), (q2, kv2, sees2) = _quarters(past, q, kv, sees)
    sums_low, sums_high = sums.part(low), _merge(sums.part(high), ring.kernel.block_forward(q1, kv1[0], kv1[1], sees1))
    merged = _merge(_select(past, sums_low, sums_high), ring.kernel.block_forward(q2, kv2[0], kv2[1], sees2))
    sums_low, sums_high = _select(past, merged, sums_low), _select(past, sums_high, merged)
    return Sums(jnp.concatenate([sums_low.o, sums_high.o], axis=1), jnp.concatenate([sums_low.lse, sums_high.lse], axis=2))


def _step_backward(
    ring: Ring, tokens: Tokens, segments: Array | None, rows: Rows, kv: Array, dkv: Array, dq: Array, step: Array | int
) -> tuple[Array, Array]:
    """(dkv, dq) with the gradients of the block met at this step added; rows = (q, o, do, lse_bSH)."""

    def pull(rows: Rows, kv: Array, sees: Visibility) -> tuple[Array, Array]:
        q, o, do, lse_bSH = rows
        dq, dk, dv = ring.kernel.block_backward(q, kv[0], kv[1], o, jnp.swapaxes(lse_bSH, 1, 2), do, sees)
        return jnp.stack([dk, dv]), dq

    sees, past = _met(ring, tokens, segments, step)
    if not ring.spec.causal:
        return jax.tree.map(jnp.add, (dkv, dq), pull(rows, kv, sees))
    low, high = _halves(dq.shape[1])
    first, second = _quarters(past, rows, kv, sees)
    (dkv1, dq1), (dkv2, dq2) = pull(*first), pull(*second)
    nothing = jax.tree.map(jnp.zeros_like, (dkv2, dq2))
    (dkv2_low, dq2_low), (dkv2_high, dq2_high) = _select(past, (dkv2, dq2), nothing), _select(past, nothing, (dkv2, dq2))
    dq = jnp.concatenate([dq[:, low] + dq2_low, dq[:, high] + dq1 + dq2_high], axis=1)
    return jnp.concatenate([dkv[:, :, low] + dkv1 + dkv2_low, dkv[:, :, high] + dkv2_high], axis=2), dq


def _quarters(past: Array, rows: Any, kv: Array, sees: Visibility) -> tuple[Any, Any]:
    """The two quarter products of a step: late queries x early keys always, and early x early (past) or late x late (not)."""
    low, high = _halves(kv.shape[2])

    def part(queries: slice, keys: slice) -> tuple[Any, Array, Visibility]:
        return jax.tree.map(lambda x: x[:, queries], rows), kv[:, :, keys], sees.part(queries, keys)

    return part(high, low), _select(past, part(low, low), part(high, high))


def _halves(size: int) -> tuple[slice, slice]:
    return slice(0, size // 2), slice(size // 2, size)


def _select(past: Array, yes: T, no: T) -> T:
    return jax.tree.map(lambda a, b: jnp.where(past, a, b), yes, no)


def _merge(sums: Sums, block: tuple[Array, Array]) -> Sums:
    """Two normalised outputs over disjoint keys -> one (online softmax: Milakov and Gimelshein 2018)."""
    o, block_lse = block
    lse = jnp.logaddexp(sums.lse, block_lse)
    old, new = (jnp.swapaxes(jnp.exp(part - lse), 1, 2)[..., None] for part in (sums.lse, block_lse))
    return Sums(sums.o * old + o * new, lse)

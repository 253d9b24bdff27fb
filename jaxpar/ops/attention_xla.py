"""Attention as einsums with a backward pass of its own, whole (`attend`) and in blocks (`block_forward`, `block_backward`).

Not `jax.nn.dot_product_attention(implementation="xla")`: forward + backward of [16, 256, 4, 64] causal float32 on two CPU cores takes it
1.2 times as long as a plain einsum with a mask, and it has neither soft-cap, dropout bits nor float64. This one takes 0.75 times as long,
as queries go in up to four causal blocks that leave out the keys after them, and feeds the backward matmuls in the inputs' dtype.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.core.dtypes import wide
from jaxpar.core.vma import vary_alike
from jaxpar.ops import random
from jaxpar.ops.attention_spec import MASKED, Visibility

# Blocks below 64 queries cost more in kernel launches than they save (CPU, S = 64: two blocks 1.1 times as slow as one).
MIN_BLOCK_QUERIES = 64


def attend(
    q_bSHK: Float[Array, "b S H K"], k_bTGK: Float[Array, "b T G K"], v_bTGK: Float[Array, "b T G K"], sees: Visibility
) -> Float[Array, "b S H K"]:
    """Attention over the visible keys."""
    q_bSHK, k_bTGK, v_bTGK = vary_alike(q_bSHK, k_bTGK, v_bTGK, *jax.tree.leaves(sees))[:3]
    outputs = [
        _attend(q_bSHK[:, q], k_bTGK[:, k], v_bTGK[:, k], sees.part(q, k)) for q, k in causal_blocks(q_bSHK.shape[1], k_bTGK.shape[1], sees)
    ]
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def causal_blocks(num_queries: int, num_keys: int, sees: Visibility) -> list[tuple[slice, slice]]:
    """Query blocks with the keys that they may see, by static slices: 4 blocks do 10/16 of the work."""
    if not (sees.spec.causal and sees.relation == "same"):
        return [(slice(0, num_queries), slice(0, num_keys))]
    num_blocks = next(n for n in (4, 2, 1) if n == 1 or (num_queries % n == 0 and num_queries // n >= MIN_BLOCK_QUERIES))
    size = num_queries // num_blocks
    reach = sees.spec.window if sees.spec.window is not None and sees.contiguous else num_keys
    return [(slice(start, start + size), slice(max(0, start - reach + 1), start + size)) for start in range(0, num_queries, size)]


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, sees: Visibility) -> Array:
    return _attend_forward(q, k, v, sees)[0]


def _attend_forward(q: Array, k: Array, v: Array, sees: Visibility) -> tuple[Array, tuple[Array, Array, Array, Array, Visibility]]:
    e, _, total = _exponentials(_logits(q, k, sees), sees)
    p = e / total
    return _values(_drop(p, sees).astype(q.dtype), v, q.dtype), (q, k, v, p.astype(q.dtype), sees)


def _attend_backward(residuals: tuple[Array, Array, Array, Array, Visibility], do: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, p, sees = residuals
    capped = None if sees.spec.softcap is None else _logits(q, k, sees)
    dq, dk, dv = _pull_back(q, k, v, p.astype(wide(q.dtype)), capped, do, None, sees)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def block_forward(q: Array, k: Array, v: Array, sees: Visibility) -> tuple[Array, Array]:
    """(o [b, S, H, K], lse [b, H, S]) of one block of keys, in the accumulation dtype; a row that sees none: (0, MASKED)."""
    blocks = causal_blocks(q.shape[1], k.shape[1], sees)
    outputs, sums = zip(*(_forward(q[:, i], k[:, j], v[:, j], sees.part(i, j)) for i, j in blocks), strict=True)
    return jnp.concatenate(outputs, axis=1), jnp.concatenate(sums, axis=2)


def block_backward(q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, sees: Visibility) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of one block in the accumulation dtype, from the row's final o and lse (FlashAttention-2, algorithm 2)."""
    dqs, dks, dvs = [], [], []
    for i, j in causal_blocks(q.shape[1], k.shape[1], sees):
        dq, dk, dv = _backward(q[:, i], k[:, j], v[:, j], o[:, i], lse[:, :, i], do[:, i], sees.part(i, j))
        around = ((0, 0), (j.start, k.shape[1] - j.stop), (0, 0), (0, 0))
        dqs.append(dq)
        dks.append(jnp.pad(dk, around))
        dvs.append(jnp.pad(dv, around))
    return jnp.concatenate(dqs, axis=1), reduce(jnp.add, dks), reduce(jnp.add, dvs)


def _forward(q: Array, k: Array, v: Array, sees: Visibility) -> tuple[Array, Array]:
    e, top, total = _exponentials(_logits(q, k, sees), sees)
    o = _values((_drop(e, sees) / total).astype(q.dtype), v, e.dtype)
    empty = top <= jnp.asarray(MASKED, top.dtype)
    return o, jnp.where(empty, top, top + jnp.log(total))[..., 0]


def _backward(q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, sees: Visibility) -> tuple[Array, Array, Array]:
    acc = wide(q.dtype)
    logits, mask = _logits(q, k, sees), sees.mask()
    p = jnp.exp(logits - lse[..., None])
    if mask is not None:
        p = jnp.where(mask, p, jnp.zeros((), acc))
    delta = jnp.swapaxes(jnp.sum(do.astype(acc) * o.astype(acc), axis=-1), 1, 2)[..., None]
    return _pull_back(q, k, v, p, logits if sees.spec.softcap is not None else None, do, delta, sees)


def _logits(q: Array, k: Array, sees: Visibility) -> Float[Array, "b H S T"]:
    """Scaled, soft-capped, not yet masked logits in the accumulation dtype."""
    acc = wide(q.dtype)
    logits = _scores(q, k, acc) * jnp.asarray(q.shape[-1] ** -0.5, acc)
    if sees.spec.softcap is None:
        return logits
    cap = jnp.asarray(sees.spec.softcap, acc)
    return cap * jnp.tanh(logits / cap)


def _exponentials(logits: Array, sees: Visibility) -> tuple[Array, Array, Array]:
    """(e, top, total) with softmax = e / total, e = exp(logits - top); e = 0 and total = 1 for a row that sees no key."""
    mask = sees.mask()
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.asarray(MASKED, logits.dtype))
    top = jnp.max(logits, axis=-1, keepdims=True)
    e = jnp.exp(logits - top)
    if mask is None or not sees.may_be_empty:
        return e, top, jnp.sum(e, axis=-1, keepdims=True)
    e = jnp.where(mask, e, jnp.zeros((), e.dtype))
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e, top, jnp.where(total == 0, jnp.ones((), e.dtype), total)


def _pull_back(
    q: Array, k: Array, v: Array, p: Array, capped: Array | None, do: Array, delta: Array | None, sees: Visibility
) -> tuple[Array, Array, Array]:
    """Gradients from probabilities p; delta = sum(do o) of each row (None: all its keys are here, so sum(p dp))."""
    do = do.astype(q.dtype)
    dv = _over_queries(_drop(p, sees).astype(q.dtype), do, v)
    dp = _drop(_scores(do, v, p.dtype), sees)
    if delta is None:
        delta = jnp.sum(p * dp, axis=-1, keepdims=True)
    ds = p * (dp - delta) * jnp.asarray(q.shape[-1] ** -0.5, p.dtype)
    if capped is not None:
        ds = ds * (1 - jnp.square(capped / jnp.asarray(sees.spec.softcap, p.dtype)))
    ds = ds.astype(q.dtype)
    return _values(ds, k, p.dtype), _over_queries(ds, q, k), dv


def _drop(p: Array, sees: Visibility) -> Array:
    """Dropout by the bits of the block's (query, key) pairs: linear, so it is its own transpose."""
    return p if sees.words is None else random.dropout(p, sees.words(sees.q_index_S, sees.k_index_T), sees.spec.dropout)


def _grouped(x_bSHK: Array, like_bTGK: Array) -> Array:
    """Heads as [groups, heads of a group]."""
    b, S, H, K = x_bSHK.shape
    G = like_bTGK.shape[2]
    return x_bSHK.reshape(b, S, G, H // G, K)


# With as many key-value heads as heads, 4-D einsums: a group dim of size 1 costs XLA:CPU 1.3 times the time.
def _scores(q: Array, k: Array, dtype: jnp.dtype) -> Float[Array, "b H S T"]:
    """q k for each head."""
    if q.shape[2] == k.shape[2]:
        return jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=dtype)
    scores = jnp.einsum("bsgnk,btgk->bgnst", _grouped(q, k), k, preferred_element_type=dtype)
    return scores.reshape(scores.shape[0], q.shape[2], *scores.shape[3:])


def _values(p: Array, v: Array, dtype: jnp.dtype) -> Float[Array, "b S H K"]:
    """p v for each head."""
    if p.shape[1] == v.shape[2]:
        return jnp.einsum("bhst,bthk->bshk", p, v, preferred_element_type=dtype)
    b, H, S, T = p.shape
    o = jnp.einsum("bgnst,btgk->bsgnk", p.reshape(b, v.shape[2], -1, S, T), v, preferred_element_type=dtype)
    return o.reshape(b, S, H, v.shape[-1])


def _over_queries(p: Array, x: Array, like: Array) -> Float[Array, "b T G K"]:
    """Sum over queries and over the heads of each group, in the accumulation dtype."""
    acc = wide(x.dtype)
    if x.shape[2] == like.shape[2]:
        return jnp.einsum("bhst,bshk->bthk", p, x, preferred_element_type=acc)
    b, _, S, T = p.shape
    return jnp.einsum("bgnst,bsgnk->btgk", p.reshape(b, like.shape[2], -1, S, T), _grouped(x, like), preferred_element_type=acc)

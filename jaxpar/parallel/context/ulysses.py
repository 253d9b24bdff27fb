"""Heads traded for sequence: each device attends over whole rows with its share of the heads (Jacobs et al. 2023, DeepSpeed-Ulysses).

Collectives, q, k and v as one array: two all-to-alls forward (in and out) and two backward; with documents kept apart one all-gather of
int32 segments. The kernel sees a plain causal mask, so flash kernels stay flash. Key-value heads fewer than ranks are repeated.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.ops.attention import AttentionSpec, DropoutWords, Kernel


def attend(
    q_bSHK: Float[Array, "b S H K"],
    k_bSGK: Float[Array, "b S G K"],
    v_bSGK: Float[Array, "b S G K"],
    *,
    kernel: Kernel,
    spec: AttentionSpec,
    axis: str,
    ways: int,
    index_S: Int[Array, " S"],
    segments_bS: Int[Array, "b S"] | None = None,
    dropout_words: DropoutWords | None = None,
) -> Float[Array, "b S H K"]:
    """Attention over the whole sequence; each device holds a contiguous part. ValueError where heads do not divide by ways."""
    num_heads, num_kv_heads = q_bSHK.shape[2], k_bSGK.shape[2]
    repeats = kv_repeats(num_heads, num_kv_heads, ways)
    parts = (q_bSHK, jnp.repeat(k_bSGK, repeats, axis=2), jnp.repeat(v_bSGK, repeats, axis=2))
    shares = [x.reshape(*x.shape[:2], ways, -1, x.shape[-1]) for x in parts]
    num_mine, num_kv_mine = (share.shape[3] for share in shares[:2])
    qkv = lax.all_to_all(jnp.concatenate(shares, axis=3), axis, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
    q, k, v = jnp.split(qkv, [num_mine, num_mine + num_kv_mine], axis=2)
    index_T = jnp.arange(index_S.shape[0] * ways, dtype=index_S.dtype)
    segments_bT = None if segments_bS is None else lax.all_gather(segments_bS, axis, axis=1, tiled=True)
    if dropout_words is not None:
        dropout_words = dropout_words.heads(lax.axis_index(axis) * num_mine, num_mine)
    o = kernel(
        q,
        k,
        v,
        spec=spec,
        q_index_S=index_T,
        k_index_T=index_T,
        q_segments_bS=segments_bT,
        k_segments_bT=segments_bT,
        aligned=True,
        dropout_words=dropout_words,
    )
    return lax.all_to_all(o, axis, split_axis=1, concat_axis=2, tiled=True)


def kv_repeats(num_heads: int, num_kv_heads: int, ways: int) -> int:
    """How often each key-value head is repeated so that every rank gets whole ones; counts are those of one `tensor` rank."""
    legal = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)]
    if ways not in legal:
        raise ValueError(
            f"context.method: ulysses with context = {ways} needs a divisor of the {num_heads} heads of a tensor rank that divides, or is "
            f"a multiple of, its {num_kv_heads} key-value heads; mesh.context may be {', '.join(map(str, legal))}, or context.method=ring"
        )
    return max(1, ways // num_kv_heads)

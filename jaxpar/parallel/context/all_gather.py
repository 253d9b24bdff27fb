"""Keys and values gathered over `context`; queries stay (Llama 3, section 3.3.2).

Collectives, k and v as one array: one all-gather forward; its transpose, one reduce-scatter, backward; with documents kept apart one more
all-gather, of int32 segments. All keys of a row are held at once, and causal work is computed in full: masks come from indices.
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
    """Attention over the whole sequence; each device holds a contiguous part, index_S its natural positions."""
    k_bTGK, v_bTGK = lax.all_gather(jnp.stack([k_bSGK, v_bSGK]), axis, axis=2, tiled=True)
    return kernel(
        q_bSHK,
        k_bTGK,
        v_bTGK,
        spec=spec,
        q_index_S=index_S,
        k_index_T=jnp.arange(index_S.shape[0] * ways, dtype=index_S.dtype),
        q_segments_bS=segments_bS,
        k_segments_bT=None if segments_bS is None else lax.all_gather(segments_bS, axis, axis=1, tiled=True),
        aligned=False,
        dropout_words=dropout_words,
    )

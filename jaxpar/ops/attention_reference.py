"""Attention as the textbook writes it, differentiated by JAX: the judge of the other kernels.

Right in float64 too, where `jax.nn.dot_product_attention` takes its softmax in float32 whatever the inputs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.core.dtypes import wide
from jaxpar.ops import random
from jaxpar.ops.attention_spec import MASKED, Visibility


def attend(
    q_bSHK: Float[Array, "b S H K"], k_bTGK: Float[Array, "b T G K"], v_bTGK: Float[Array, "b T G K"], sees: Visibility
) -> Float[Array, "b S H K"]:
    """Vaswani et al. 2017, equation 1, with grouped keys and values (Ainslie et al. 2023); softmax in the accumulation dtype."""
    num_groups = q_bSHK.shape[2] // k_bTGK.shape[2]
    acc, spec = wide(q_bSHK.dtype), sees.spec
    k_bTHK, v_bTHK = (jnp.repeat(x, num_groups, axis=2) for x in (k_bTGK, v_bTGK))
    logits = jnp.einsum("bshk,bthk->bhst", q_bSHK, k_bTHK, preferred_element_type=acc) * jnp.asarray(q_bSHK.shape[-1] ** -0.5, acc)
    if spec.softcap is not None:
        cap = jnp.asarray(spec.softcap, acc)
        logits = cap * jnp.tanh(logits / cap)
    mask = sees.mask()
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.asarray(MASKED, acc))
    p = jax.nn.softmax(logits, axis=-1)
    if mask is not None:
        p = jnp.where(mask, p, jnp.zeros((), acc))
    if sees.words is not None:
        p = random.dropout(p, sees.words(sees.q_index_S, sees.k_index_T), spec.dropout)
    return jnp.einsum("bhst,bthk->bshk", p.astype(q_bSHK.dtype), v_bTHK)

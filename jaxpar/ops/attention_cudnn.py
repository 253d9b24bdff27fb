"""cuDNN flash attention on GPUs: float16 or bfloat16, head_dim a multiple of 8.

Causal and window masks stay flags of the flash kernel; documents kept apart, a window across context shards and gathered keys become a bias
[b or 1, 1, S, T] in memory. The blocks of a ring call the primitives below JAX's public function, as that one rounds the log-sum-exp
to the inputs' dtype (bfloat16: 3 % wrong weights at a log-sum-exp of 8) and its backward rule ignores the gradient of the log-sum-exp.
Compiled for H100s with JAX 0.10.2 and 0.12.0.1 (every context method, with and without documents and window), not run: no GPU was at hand.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.core.vma import vary_alike
from jaxpar.ops.attention_spec import Visibility

# Static parameters of the primitives that are understood here; JAX 0.12 added score_mod.
# fmt: off
PARAMETERS = {
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v",
    "score_mod_args", "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "score_mod",
    "cudnn_version", "return_residual",
}
# fmt: on
DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 128  # 256 from Hopper on, which a program compiled elsewhere cannot ask


def check(dtype: Any, head_dim: int, dropout: float, softcap: float | None) -> list[str]:
    """Why this attention cannot go through cuDNN; empty: it can."""
    name = jnp.dtype(dtype).name
    reasons = []
    if name not in DTYPES:
        reasons.append(f"it computes in {' or '.join(DTYPES)}, not {name}")
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        reasons.append(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, not {head_dim}")
    if softcap is not None:
        reasons.append(f"it has no attention_softcap ({softcap})")
    if dropout:
        reasons.append(f"its dropout draws bits that depend on the layout (attention_dropout {dropout})")
    return reasons


def missing() -> str | None:
    """Why cuDNN attention is not on this machine; None: it is."""
    try:
        if unknown := _parameters() - PARAMETERS:
            return f"this JAX ({jax.__version__}) has a cuDNN attention that jaxpar does not know yet: {', '.join(sorted(unknown))}"
        _primitives().check_cudnn_version()
    except (ImportError, AttributeError) as error:
        return f"this JAX ({jax.__version__}) has its cuDNN attention elsewhere: {error}"
    except RuntimeError as error:
        return str(error)
    return None


def _primitives() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(_primitives()._dot_product_attention_fwd).parameters)


def attend(
    q_bSHK: Float[Array, "b S H K"], k_bTGK: Float[Array, "b T G K"], v_bTGK: Float[Array, "b T G K"], sees: Visibility
) -> Float[Array, "b S H K"]:
    """Attention over the visible keys."""
    q, k, v = vary_alike(q_bSHK, k_bTGK, v_bTGK, *jax.tree.leaves(sees))[:3]
    same, window = sees.relation == "same", sees.spec.window
    o = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if sees.plain else _mask(q, k, sees),
        is_causal=sees.spec.causal and same,
        local_window_size=(window - 1, 0) if window is not None and same and sees.contiguous else None,
        implementation="cudnn",
    )
    return _zero_padding(o, sees)


def block_forward(q: Array, k: Array, v: Array, sees: Visibility) -> tuple[Array, Array]:
    """(o, lse_bHS) of one block, float32."""
    o, lse = _primitives()._dot_product_attention_fwd_p_wrapper.bind(*_operands(q, k, v, sees), is_training=True, **_flags(q, sees))
    return o.astype(jnp.float32), lse


def block_backward(q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, sees: Visibility) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of one block, float32, from the row's final o and log-sum-exp."""
    do = _zero_padding(do, sees).astype(q.dtype)
    operands = (*_operands(q, k, v, sees), lse, o.astype(q.dtype), do)
    dq, dk, dv = _primitives()._dot_product_attention_bwd_p_wrapper.bind(*operands, **_flags(q, sees))[:3]
    return dq.astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)


def _operands(q: Array, k: Array, v: Array, sees: Visibility) -> tuple[Array, ...]:
    """q, k, v, bias and six operands of paged and ragged layouts that are not used."""
    none = jnp.zeros(0, q.dtype)
    bias = none
    if not sees.plain:
        low = _primitives().get_large_negative_number(q.dtype)
        bias = jnp.where(_mask(q, k, sees), jnp.zeros((), q.dtype), low)
    return vary_alike(q, k, v, bias, *[none] * 6)


def _flags(q: Array, sees: Visibility) -> dict[str, Any]:
    kinds, same = _primitives().MaskType, sees.relation == "same"
    return {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (not sees.plain, False),  # a bias, whose gradient nobody wants
        "mask_type": kinds.CAUSAL if sees.spec.causal and same else kinds.NO_MASK,
        "layout": _primitives().AttentionLayout.BTNH.value,
        "sliding_window_length": sees.spec.window if same and sees.contiguous else None,
    } | ({"score_mod": None} if "score_mod" in _parameters() else {})


def _mask(q: Array, k: Array, sees: Visibility) -> Array:
    if q.shape[1] % 2 or k.shape[1] % 2:
        raise ValueError(f"attention: cudnn with a mask needs an even sequence on each device, not {q.shape[1]} x {k.shape[1]}")
    mask = sees.mask()
    assert mask is not None
    return mask


def _zero_padding(x_bSHK: Array, sees: Visibility) -> Array:
    """Padding sees no key: zeros out, and no gradient in."""
    if sees.q_segments_bS is None:
        return x_bSHK
    return jnp.where((sees.q_segments_bS != 0)[:, :, None, None], x_bSHK, jnp.zeros((), x_bSHK.dtype))

"""Embedding and cross entropy over a vocabulary that `tensor` may split; logits exist for one chunk of tokens at a time.

But for schedules that split the backward pass: W takes the gradient of the head's weights from those of all logits of a microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.config.layout import Layout
from jaxpar.core.dtypes import wide
from jaxpar.core.typing import Terms
from jaxpar.core.vma import vary, vary_alike, varying
from jaxpar.ops.lookup import look_up
from jaxpar.parallel.tensor import index, leave, split_for_sequence


@dataclass(frozen=True)
class LossSpec:
    """What is added to the plain cross entropy."""

    vocab_size: int  # columns beyond it are padding and never count
    chunk_tokens: int
    z_loss: float = 0.0  # coefficient of logsumexp(logits)^2 (PaLM, arXiv 2204.02311, section 5)
    softcap: float | None = None  # logits -> softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118)
    one_product: bool = False  # w's gradient is one product over all tokens: it can be left for later, and keeps all logits' gradients


def embed(layout: Layout, table_VD: Float[Array, "V D"], ids_bS: Int[Array, "b S"]) -> Float[Array, "b T D"]:
    """Rows of a table; each device looks up the ids of its part, zeros elsewhere, and the parts are summed."""
    axes = split_for_sequence(layout, "vocab")
    if not axes:
        return look_up(table_VD, ids_bS)
    rows = table_VD.shape[0]
    local_bS = ids_bS - index(axes) * rows
    mine_bS1 = ((local_bS >= 0) & (local_bS < rows))[..., None]
    found_bSD = look_up(table_VD, local_bS)
    return leave(layout, jnp.where(mine_bS1, found_bSD, jnp.zeros((), table_VD.dtype)), "vocab")


def logits(
    layout: Layout, spec: LossSpec, x_nD: Float[Array, "n D"], w_DV: Float[Array, "D V"], tap_nV: Array | None = None
) -> Float[Array, "n V"]:
    """This device's columns of the logits, float32 at least; padded columns are -inf. tap: zeros, whose gradient is the product's."""
    dtype = wide(x_nD.dtype)
    out_nV = jnp.matmul(x_nD, w_DV, preferred_element_type=dtype)
    out_nV = out_nV if tap_nV is None else out_nV + tap_nV
    if spec.softcap is not None:
        out_nV = spec.softcap * jnp.tanh(out_nV / spec.softcap)
    columns = w_DV.shape[1]
    if columns * layout.ways("vocab") == spec.vocab_size:
        return out_nV
    column_V = index(layout.split("vocab")) * columns + jnp.arange(columns, dtype=jnp.int32)
    return jnp.where(column_V < spec.vocab_size, out_nV, jnp.asarray(-jnp.inf, dtype))


def cross_entropy(layout: Layout, spec: LossSpec, x_bSD: Float[Array, "b S D"], w_DV: Array, targets_bS: Array, weights_bS: Array) -> Terms:
    """{"loss": (sum of weighted token losses, sum of weights)}; with a z-loss also its parts, as metrics only.

    x is what `enter(., "vocab")` returns. Gradients are computed together with the loss, chunk by chunk, because the loss
    is linear in its cotangent: no logits are kept and none are computed twice.
    """
    n = targets_bS.size
    chunk = min(spec.chunk_tokens, n)
    flat = (x_bSD.reshape(n, -1), targets_bS.reshape(n), weights_bS.reshape(n))
    x_cnD, targets_cn, weights_cn = (_in_chunks(a, chunk) for a in flat)
    sums = _chunked(partial(_chunk_sums, layout, spec), spec.one_product, x_cnD, w_DV, targets_cn, weights_cn)
    total, plain, z = cast(Sums, sums)  # custom_vjp hides the type
    weight = jnp.sum(weights_bS)
    terms = {"loss": (total, weight)}
    return terms | {"cross_entropy": (plain, weight), "z_loss": (z, weight)} if spec.z_loss else terms


def _in_chunks(a: Array, chunk: int) -> Array:
    """[n, ...] -> [chunks, chunk, ...]; the last is filled up with zeros, so with rows of weight 0."""
    padding = -a.shape[0] % chunk
    if padding:
        a = jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1))
    return a.reshape(-1, chunk, *a.shape[1:])


Sums = tuple[Array, Array, Array]  # total, cross entropy, squared logsumexp; all weighted sums


def _chunk_sums(
    layout: Layout, spec: LossSpec, x_nD: Array, w_DV: Array, targets_n: Array, weights_n: Array, tap_nV: Array | None = None
) -> Sums:
    logits_nV = logits(layout, spec, x_nD, w_DV, tap_nV)
    axes = layout.split("vocab")
    top_n = lax.stop_gradient(jnp.max(logits_nV, axis=-1))
    top_n = lax.pmax(top_n, axes) if axes else top_n
    columns = logits_nV.shape[-1]
    local_n = targets_n - index(axes) * columns
    mine_n = (local_n >= 0) & (local_n < columns)
    gold_n = jnp.take_along_axis(logits_nV, jnp.clip(local_n, 0, columns - 1)[:, None], axis=-1)[:, 0]
    gold_n = jnp.where(mine_n, gold_n, jnp.zeros((), gold_n.dtype))
    sumexp_n = jnp.sum(jnp.exp(logits_nV - top_n[:, None]), axis=-1)
    if axes:
        both_2n = lax.psum(jnp.stack([sumexp_n, gold_n]), axes)
        sumexp_n, gold_n = both_2n[0], both_2n[1]
    lse_n = jnp.log(sumexp_n) + top_n
    weights_n = weights_n.astype(lse_n.dtype)
    plain = jnp.sum((lse_n - gold_n) * weights_n)
    z = jnp.sum(jnp.square(lse_n) * weights_n)
    total = plain + spec.z_loss * z if spec.z_loss else plain
    return total, lax.stop_gradient(plain), lax.stop_gradient(z)


ChunkFn = Callable[..., Sums]  # (x, w, targets, weights[, tap])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(chunk_fn: ChunkFn, one_product: bool, x_cnD: Array, w_DV: Array, targets_cn: Array, weights_cn: Array) -> Sums:
    """Sums over chunks; only the first result is differentiable."""
    del one_product
    if x_cnD.shape[0] == 1:
        return chunk_fn(x_cnD[0], w_DV, targets_cn[0], weights_cn[0])
    parts = lax.map(lambda args: chunk_fn(args[0], w_DV, args[1], args[2]), (x_cnD, targets_cn, weights_cn))
    return _totals(parts)


def _chunked_fwd(
    chunk_fn: ChunkFn, one_product: bool, x_cnD: Array, w_DV: Array, targets_cn: Array, weights_cn: Array
) -> tuple[Sums, tuple[Array, Array]]:
    accumulator = wide(w_DV.dtype)

    def one(x_nD: Array, targets_n: Array, weights_n: Array) -> tuple[Sums, Array, Array]:
        sums, pullback = jax.vjp(lambda x, w: chunk_fn(x, w, targets_n, weights_n), x_nD, w_DV)
        zeros = jnp.zeros_like(sums[1])
        dx_nD, dw_DV = pullback((jnp.ones_like(sums[0]), zeros, zeros))
        return sums, dx_nD, dw_DV.astype(accumulator)

    if x_cnD.shape[0] == 1:
        sums, dx_nD, dw_DV = one(x_cnD[0], targets_cn[0], weights_cn[0])
        return sums, (dx_nD[None], dw_DV.astype(w_DV.dtype))

    if one_product:
        return _in_one_product(chunk_fn, x_cnD, w_DV, targets_cn, weights_cn)

    def step(dw_DV: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, tuple[Sums, Array]]:
        sums, dx_nD, dw_chunk_DV = one(*chunk)
        return dw_DV + dw_chunk_DV, (sums, dx_nD)

    start = vary(jnp.zeros(w_DV.shape, accumulator), tuple(varying(w_DV)))
    dw_DV, (parts, dx_cnD) = lax.scan(step, start, (x_cnD, targets_cn, weights_cn))
    return _totals(parts), (dx_cnD, dw_DV.astype(w_DV.dtype))


def _in_one_product(chunk_fn: ChunkFn, x_cnD: Array, w_DV: Array, targets_cn: Array, weights_cn: Array) -> tuple[Sums, tuple[Array, Array]]:
    """As `_chunked_fwd` over several chunks, but the gradients of their logits are kept and meet the inputs in the end."""
    dtype = wide(x_cnD.dtype)
    _, like_w = vary_alike(x_cnD[0], w_DV)
    tap_nV = vary(jnp.zeros((x_cnD.shape[1], w_DV.shape[1]), dtype), tuple(varying(like_w)))

    def one(chunk: tuple[Array, Array, Array]) -> tuple[Sums, Array, Array]:
        x_nD, targets_n, weights_n = chunk
        sums, pullback = jax.vjp(lambda x, tap: chunk_fn(x, w_DV, targets_n, weights_n, tap), x_nD, tap_nV)
        zeros = jnp.zeros_like(sums[1])
        dx_nD, dlogits_nV = pullback((jnp.ones_like(sums[0]), zeros, zeros))
        return sums, dx_nD, dlogits_nV.astype(x_nD.dtype)

    parts, dx_cnD, dlogits_cnV = lax.map(one, (x_cnD, targets_cn, weights_cn))
    dw_DV = jnp.einsum("cnd,cnv->dv", x_cnD, dlogits_cnV, preferred_element_type=wide(w_DV.dtype))
    return _totals(parts), (dx_cnD, vary(dw_DV.astype(w_DV.dtype), tuple(varying(w_DV))))


def _totals(parts: Sums) -> Sums:
    total, plain, z = parts
    return jnp.sum(total), jnp.sum(plain), jnp.sum(z)


def _chunked_bwd(_chunk_fn: ChunkFn, _one_product: bool, grads: tuple[Array, Array], cotangents: Sums) -> tuple[Array | None, ...]:
    dx_cnD, dw_DV = grads
    return dx_cnD * cotangents[0].astype(dx_cnD.dtype), dw_DV * cotangents[0].astype(dw_DV.dtype), None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)

"""Sampling text from the model as it is laid out for training: the whole window is run again for every token.

Simple and right under any layout; no key-value cache, so it is for looking at a model, not for serving one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.core.typing import Array, Params
from jaxpar.mesh.specs import batch_spec
from jaxpar.ops import random
from jaxpar.parallel.executor import logits
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.step.placement import Placement

# (params, batch [rows, S] in the feed's order, prompt length, number of tokens, temperature) -> tokens [rows, S] in natural order
SampleFn = Callable[..., Array]


def make_next_logits(forward: Forward, placement: Placement) -> Callable[[Params, Batch, Array], Array]:
    """(params, batch [rows, S], natural position) -> logits [rows, V] of the token that follows that position."""
    layout = placement.layout

    def spmd(params: Params, batch: Batch, position: Array) -> Array:
        logits_bSV = logits(forward, params, batch)
        here_S = forward.context(batch, None).seq_index_S == position
        picked_bV = jnp.sum(jnp.where(here_S[None, :, None], logits_bSV, jnp.zeros((), logits_bSV.dtype)), axis=1)
        return lax.psum(picked_bV, layout.context_axes) if layout.context_axes else picked_bV

    def next_logits(params: Params, batch: Batch, position: Array) -> Array:
        all_specs = batch_spec(layout, microbatched=False)
        rows, vocab = all_specs["samples"][0], layout.split("vocab")
        mapped = jax.shard_map(
            spmd,
            mesh=placement.mesh,
            in_specs=(placement.param_specs, {name: all_specs[name] for name in batch}, P()),
            out_specs=P(rows, vocab if vocab else None),
        )
        return mapped(params, dict(batch), position)

    return next_logits


def gumbel(words: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Standard Gumbel noise of uint32 words, always finite.

    The highest words round to a uniform of 1 in float32 (one of 2^25), of which the noise would be infinite.
    """
    uniform = (words.astype(dtype) + 0.5) / jnp.asarray(2.0**32, dtype)
    below_one = jnp.asarray(1.0 - jnp.finfo(dtype).epsneg, dtype)
    return -jnp.log(-jnp.log(jnp.minimum(uniform, below_one)))


def make_sample_step(forward: Forward, placement: Placement, order: Array, seed: int) -> SampleFn:
    """Gumbel-max sampling; the noise is a function of (seed, row, position, token id), so layouts agree on the text.

    order: natural position stored at each slot of a row (`mesh.sequence.sequence_order`).
    """
    next_logits = make_next_logits(forward, placement)
    slot_of = jnp.argsort(order)

    def sample(params: Params, batch: Batch, start: Array, count: Array, temperature: Array) -> Array:
        key = random.fold(random.key_of(seed), 0x5A4D)  # a word of its own, so that the noise is not that of a step's dropout

        def one(i: Array, tokens_bS: Array) -> Array:
            position = start + i - 1
            logits_bV = next_logits(params, {**batch, "tokens": tokens_bS}, position)
            words_bV = random.bits(key, batch["samples"], position[None], jnp.arange(logits_bV.shape[1], dtype=jnp.int32))[:, 0]
            noise_bV = gumbel(words_bV, logits_bV.dtype) * temperature.astype(logits_bV.dtype)
            chosen_b = jnp.argmax(logits_bV + noise_bV, axis=-1).astype(tokens_bS.dtype)
            return lax.dynamic_update_slice_in_dim(tokens_bS, chosen_b[:, None], slot_of[position + 1], 1)

        tokens_bS = lax.fori_loop(0, count, one, batch["tokens"])
        return jnp.take(tokens_bS, slot_of, axis=1)

    return sample

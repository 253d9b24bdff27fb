"""The concrete `Context` that a model is handed inside the step: layout-dependent functions behind dim names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxpar.config.layout import Layout
from jaxpar.core.protocols import Experts, Routing
from jaxpar.core.typing import Terms
from jaxpar.core.vma import vary
from jaxpar.mesh.sequence import sequence_order
from jaxpar.ops import random
from jaxpar.ops.attention import DropoutWords
from jaxpar.parallel import tensor, vocab
from jaxpar.parallel.dispatch.routed import Routed

# parallel.context.select.Attend with everything but the arrays bound
AttendFn = Callable[..., Array]
DispatchFn = Callable[[Layout, Array, Routed, Experts], tuple[Array, Array | None]]  # one of parallel.dispatch
SITE_ATTENTION = 1  # dropout site of attention probabilities


@dataclass(frozen=True)
class SpmdContext:
    """Context of one microbatch on one device; `at` gives the same for one layer."""

    layout: Layout
    loss: vocab.LossSpec
    attend_fn: AttendFn
    context_method: str
    seq_len: int
    dispatch_fn: DispatchFn
    tokens_bS: Array
    samples_b: Array
    packed_positions_bS: Array | None  # None: rows are not packed
    segments_bS: Array | None
    wide_dtype: Any
    key: tuple[Array, Array] | None  # (seed, step) of the run; None: evaluation, no dropout
    remat_policy: Callable[..., Any] | None = None  # None: everything is kept
    attention_dropout: float = 0.0
    layer: Array | int = 0
    shared: Any = None  # what `Model.shared` made once for all layers

    def at(self, layer: Array | int) -> "SpmdContext":
        """The same context for one layer."""
        return replace(self, layer=layer)

    def replace(self, **fields: Any) -> "SpmdContext":
        return replace(self, **fields)

    def enter(self, x_bSD: Array, dim: str) -> Array:
        return tensor.enter(self.layout, x_bSD, dim)

    def leave(self, y_bSD: Array, dim: str) -> Array:
        return tensor.leave(self.layout, y_bSD, dim)

    def remat(self, layer: Callable[[Array], Array], x_bSD: Array) -> Array:
        return layer(x_bSD) if self.remat_policy is None else jax.checkpoint(layer, policy=self.remat_policy)(x_bSD)

    def select(self, w: Array, array_dim: int, dim: str, of: str) -> Array:
        return tensor.select(self.layout, w, array_dim, dim, of)

    def embed(self, table_VD: Array, ids_bS: Array) -> Array:
        return vocab.embed(self.layout, table_VD, ids_bS)

    def at_block_boundary(self, x_bSD: Array) -> Array:
        """Per-token values [b, S, ...] of this device's `context` shard -> those of its tokens at a block boundary."""
        if not self._tensor_seq_axes:
            return x_bSD
        size = x_bSD.shape[1] // self.layout.size(self._tensor_seq_axes)
        return lax.dynamic_slice_in_dim(x_bSD, lax.axis_index(self._tensor_seq_axes) * size, size, 1)

    def cross_entropy(self, x_bSD: Array, w_DV: Array, targets_bS: Array, weights_bS: Array) -> Terms:
        return vocab.cross_entropy(self.layout, self.loss, self.enter(x_bSD, "vocab"), w_DV, targets_bS, weights_bS)

    def logits(self, x_bSD: Array, w_DV: Array) -> Array:
        """This device's columns of the logits, [b, S, V/tensor]; for sampling and for comparisons."""
        x_bSD = self.enter(x_bSD, "vocab")
        flat = vocab.logits(self.layout, self.loss, x_bSD.reshape(-1, x_bSD.shape[-1]), w_DV)
        return flat.reshape(*x_bSD.shape[:2], -1)

    def attend(self, q_bSHK: Array, k_bSGK: Array, v_bSGK: Array) -> Array:
        words = self._dropout_words(q_bSHK.shape[2]) if self.attention_dropout and self.key is not None else None
        return self.attend_fn(q_bSHK, k_bSGK, v_bSGK, index_S=self.seq_index_S, segments_bS=self.segments_bS, dropout_words=words)

    def dropout(self, x: Array, rate: float, site: int, dims: tuple[str, ...]) -> Array:
        """dims: "batch", "seq" (inside a region) or "block_seq" (at a block boundary), then one feature dim."""
        if not rate or self.key is None:
            return x
        position_S = self.block_seq_index_S if dims[1] == "block_seq" else self.seq_index_S
        feature_axes = self.layout.split(dims[2])
        feature = tensor.index(feature_axes) * x.shape[2] + jnp.arange(x.shape[2], dtype=jnp.int32)
        words = random.bits(random.fold(self.key, self.layer, site), self.samples_b, position_S, feature)
        return random.dropout(x, words, rate)

    @property
    def training(self) -> bool:
        return self.key is not None

    def uniform(self, site: int, size: int | None = None) -> Array | None:
        if self.key is None:
            return None
        features = () if size is None else (jnp.arange(size, dtype=jnp.int32),)
        words = random.bits(random.fold(self.key, self.layer, site), self.samples_b, self.block_seq_index_S, *features)
        return random.uniform(words, self.wide_dtype)

    @property
    def positions_bS(self) -> Array:
        """Rows that are not packed all count from 0: then one row serves the batch."""
        return self.seq_index_S[None] if self.packed_positions_bS is None else self.packed_positions_bS

    @property
    def seq_index_S(self) -> Array:
        """Natural position in the row of each token of this device's `context` shard."""
        axes = self.layout.context_axes
        order = sequence_order(self.seq_len, self.layout.size(axes), self.context_method)
        if not axes:
            return jnp.asarray(order, jnp.int32)
        shards = jnp.asarray(np.asarray(order).reshape(self.layout.size(axes), -1), jnp.int32)
        return lax.dynamic_index_in_dim(shards, lax.axis_index(axes), keepdims=False)

    @property
    def block_seq_index_S(self) -> Array:
        """The same for the tokens held at a block boundary."""
        return self.at_block_boundary(self.seq_index_S[None])[0]

    @property
    def _tensor_seq_axes(self) -> tuple[str, ...]:
        return self.layout.live(("tensor",)) if self.layout.sequence_parallel else ()

    def _dropout_words(self, num_heads: int) -> DropoutWords:
        """Bits of attention dropout, each by its global row, head, query and key."""
        assert self.key is not None
        head_H = tensor.index(self.layout.split("heads")) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
        return DropoutWords(random.fold(self.key, self.layer, SITE_ATTENTION), self.samples_b, head_H)

    def whole_rows(self, x_bSD: Array) -> Array:
        axes = self._tensor_seq_axes
        return self.whole_sequence(lax.all_gather(x_bSD, axes, axis=1, tiled=True) if axes else x_bSD)

    def my_tokens(self, x_bSD: Array) -> Array:
        return self.at_block_boundary(self.my_sequence(x_bSD))

    def sum_over_rows(self, x: Array) -> Array:
        axes = self.layout.block_seq_axes
        return lax.psum(vary(x, axes), axes) if axes else x

    def route(self, x_bSD: Array, routing: Routing, experts: Experts) -> tuple[Array, Array | None]:
        rows, length, _ = x_bSD.shape
        num_groups = rows // routing.group_rows
        group_n = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), routing.group_rows * length)
        expert_nk, gate_nk, place_nk = (a.reshape(rows * length, -1) for a in (routing.expert_bSk, routing.gate_bSk, routing.place_bSk))
        routed = Routed(expert_nk, gate_nk, place_nk, group_n, num_groups, routing.capacity, routing.num_experts)
        y_nD, lost = self.dispatch_fn(self.layout, x_bSD.reshape(rows * length, -1), routed, experts)
        if lost is not None and (tensor_axes := self.layout.live(("tensor",))):
            lost = lax.pmax(vary(lost, tensor_axes), tensor_axes)  # alike on all of them, and to be counted once
        return y_nD.reshape(x_bSD.shape), lost

    def whole_sequence(self, x_bSD: Array) -> Array:
        axes = self.layout.context_axes
        if not axes:
            return x_bSD
        gathered = lax.all_gather(x_bSD, axes, axis=1, tiled=True)
        order = sequence_order(self.seq_len, self.layout.size(axes), self.context_method)
        return jnp.take(gathered, np.argsort(order), axis=1)

    def my_sequence(self, x_bSD: Array) -> Array:
        return jnp.take(x_bSD, self.seq_index_S, axis=1) if self.layout.context_axes else x_bSD

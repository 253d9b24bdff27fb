"""What attention computes (`AttentionSpec`), which keys a query sees (`Visibility`), and what a kernel is (`Kernel`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxpar.ops import random

# A masked logit, and the log-sum-exp of a row without a visible key: finite, so that no difference of two is NaN (NUM-10).
MASKED = -1e30

Relation = Literal["same", "past", "any"]


@dataclass(frozen=True)
class AttentionSpec:
    """The maths, static: `window` = a token sees itself and the window - 1 tokens before it; `softcap` c: logits c tanh(x / c)."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError(f"sliding_window {self.window} needs causal attention: it counts the tokens before a token")


@partial(jax.tree_util.register_dataclass, data_fields=["key", "sample_b", "head_H"], meta_fields=[])
@dataclass(frozen=True)
class DropoutWords:
    """Bits for attention probabilities by global coordinates (law L3): equal under any layout, block or recompute.

    key: of (seed, step, layer, site). sample_b: global row of each local row. head_H: global index of each local head.
    """

    key: tuple[Array, Array]
    sample_b: Int[Array, " b"]
    head_H: Int[Array, " H"]

    def __call__(self, q_index_S: Int[Array, " S"], k_index_T: Int[Array, " T"]) -> UInt[Array, "b H S T"]:
        """One word for each (row, head, query, key)."""
        return jnp.swapaxes(random.bits(self.key, self.sample_b, q_index_S, self.head_H, k_index_T), 1, 2)

    def heads(self, start: Array | int, num: int) -> "DropoutWords":
        """The words of `num` of the heads, counted from `start` among those held."""
        return replace(self, head_H=jax.lax.dynamic_slice_in_dim(self.head_H, start, num))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q_index_S", "k_index_T", "q_segments_bS", "k_segments_bT", "words"],
    meta_fields=["spec", "relation", "contiguous"],
)
@dataclass(frozen=True)
class Visibility:
    """Which keys the queries of one block see, and the dropout bits of the pairs.

    relation: "same": queries and keys are the same tokens in rising order, so a plain causal mask is right; "past": every key
    is before every query; "any": only the indices tell. contiguous: the indices rise by one (with "same": a plain window too).
    """

    spec: AttentionSpec
    relation: Relation
    q_index_S: Int[Array, " S"]
    k_index_T: Int[Array, " T"]
    q_segments_bS: Int[Array, "b S"] | None = None
    k_segments_bT: Int[Array, "b T"] | None = None
    words: DropoutWords | None = None
    contiguous: bool = False

    @property
    def plain(self) -> bool:
        """True where causal and window flags of a kernel say all, so that no mask array is needed."""
        by_flags = self.relation == "past" or not self.spec.causal or self.relation == "same"
        window = self.spec.window is None or (self.relation == "same" and self.contiguous)
        return by_flags and window and self.q_segments_bS is None

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key at all."""
        return self.q_segments_bS is not None or (self.spec.causal and self.relation == "any") or self._window_off_diagonal

    @property
    def _window_off_diagonal(self) -> bool:
        return self.spec.window is not None and self.relation != "same"

    def mask(self) -> Bool[Array, "... S T"] | None:
        """True where a query sees a key, [b or 1, 1, S, T]; None: everywhere. Segment 0 is padding: it sees and is seen by none."""
        terms = []
        q_S1, k_1T = self.q_index_S[:, None], self.k_index_T[None, :]
        if self.spec.causal and self.relation != "past":
            terms.append((q_S1 >= k_1T)[None, None])
        if self.spec.window is not None:
            terms.append((q_S1 - k_1T < self.spec.window)[None, None])
        if self.q_segments_bS is not None and self.k_segments_bT is not None:
            k_b1T = self.k_segments_bT[:, None, :]
            terms.append(((self.q_segments_bS[:, :, None] == k_b1T) & (k_b1T != 0))[:, None])
        if not terms:
            return None
        mask = terms[0]
        for term in terms[1:]:
            mask = mask & term
        return mask

    def part(self, q: slice, k: slice, relation: Relation | None = None) -> "Visibility":
        """The block of some queries and some keys."""
        segments = (self.q_segments_bS, self.k_segments_bT)
        q_segments, k_segments = (None if s is None else s[:, part] for s, part in zip(segments, (q, k), strict=True))
        return replace(
            self,
            relation=relation or self.relation,
            q_index_S=self.q_index_S[q],
            k_index_T=self.k_index_T[k],
            q_segments_bS=q_segments,
            k_segments_bT=k_segments,
        )


Attend = Callable[[Array, Array, Array, Visibility], Array]
BlockForward = Callable[[Array, Array, Array, Visibility], tuple[Array, Array]]
BlockBackward = Callable[[Array, Array, Array, Array, Array, Array, Visibility], tuple[Array, Array, Array]]


@dataclass(frozen=True)
class Kernel:
    """Attention on one device's arrays.

    attend(q, k, v, sees) -> o. block_forward(q, k, v, sees) -> (o, lse_bHS), both in the accumulation dtype: float32, or float64
    for float64. block_backward(q, k, v, o, lse, do, sees) -> (dq, dk, dv) of this block, given the output and log-sum-exp
    of the *whole* row: what a ring needs (Liu et al. 2023, Ring Attention; Dao 2023, FlashAttention-2, algorithm 2).
    """

    name: str
    attend: Attend
    block_forward: BlockForward
    block_backward: BlockBackward

    def __call__(
        self,
        q_bSHK: Float[Array, "b S H K"],
        k_bTGK: Float[Array, "b T G K"],
        v_bTGK: Float[Array, "b T G K"],
        *,
        spec: AttentionSpec,
        q_index_S: Int[Array, " S"],
        k_index_T: Int[Array, " T"],
        aligned: bool,
        q_segments_bS: Int[Array, "b S"] | None = None,
        k_segments_bT: Int[Array, "b T"] | None = None,
        dropout_words: DropoutWords | None = None,
    ) -> Float[Array, "b S H K"]:
        """softmax(q k / sqrt(K)) v over the visible keys; a query that sees none gives zeros.

        Indices are places in the row, not in a document. aligned: queries and keys are the same contiguous range. H is a multiple of G.
        No dropout_words: no dropout (evaluation).
        """
        relation: Relation = "same" if aligned else "any"
        words = dropout_words if spec.dropout else None
        sees = Visibility(spec, relation, q_index_S, k_index_T, q_segments_bS, k_segments_bT, words, contiguous=aligned)
        return self.attend(q_bSHK, k_bTGK, v_bTGK, sees)

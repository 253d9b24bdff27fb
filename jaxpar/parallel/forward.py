"""The model's forward pass on one microbatch: embed, scanned blocks, head; remat and ZeRO gathers around each layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.layout import Layout
from jaxpar.config.train import RematConfig
from jaxpar.core.dtypes import wide
from jaxpar.core.protocols import Model
from jaxpar.core.typing import Array, Params, PyTree, Terms
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.ctx import AttendFn, DispatchFn, SpmdContext
from jaxpar.parallel.remat import remat_policy
from jaxpar.parallel.vocab import LossSpec
from jaxpar.parallel.zero import prepare
from jaxpar.schedule.ticks import TickTable

Batch = Mapping[str, Array]


@dataclass(frozen=True)
class Forward:
    """All that is fixed when the step is traced."""

    model: Model
    layout: Layout
    plans: PyTree  # LeafPlan of every stored parameter
    attend: AttendFn
    dispatch: DispatchFn
    context_method: str
    loss: LossSpec
    remat: RematConfig
    compute_dtype: Any
    seq_len: int
    attention_dropout: float = 0.0
    ticks: TickTable | None = None  # what the stages of a pipeline run

    def context(self, batch: Batch, key: tuple[Array, Array] | None, shared: PyTree = None) -> SpmdContext:
        """Context of one microbatch of this device; shared: what `Model.shared` made of it, where that is known."""
        ctx = SpmdContext(
            layout=self.layout,
            loss=self.loss,
            attend_fn=self.attend,
            dispatch_fn=self.dispatch,
            context_method=self.context_method,
            seq_len=self.seq_len,
            tokens_bS=batch["tokens"],
            samples_b=batch["samples"],
            packed_positions_bS=batch.get("positions"),
            segments_bS=batch.get("segments"),
            wide_dtype=wide(self.compute_dtype),
            key=key,
            attention_dropout=self.attention_dropout,
            remat_policy=None if self.remat.policy == "none" else remat_policy(self.remat, self.layout, self.plans["blocks"]),
        )
        return ctx.replace(shared=self.model.shared(ctx) if shared is None else shared)

    def terms(self, params: Params, batch: Batch, key: tuple[Array, Array] | None) -> Terms:
        """Loss terms and metrics of this device's tokens, as (sum, weight)."""
        ctx = self.context(batch, key)
        embed = self.prepare("embed", params["embed"])
        x_bSD, aux = self._blocks(params, self.model.embed(embed, batch["tokens"], ctx), ctx)
        head = self.prepare("head", params["head"])
        terms = alike(self.model.head(head, embed, x_bSD, batch["targets"], batch["weights"], ctx))
        self.check_names(aux, terms)
        return aux | terms

    def logits(self, params: Params, batch: Batch) -> Array:
        """This device's columns of the logits [b, S, V/tensor]."""
        ctx = self.context(batch, None)
        embed = self.prepare("embed", params["embed"])
        x_bSD, _ = self._blocks(params, self.model.embed(embed, batch["tokens"], ctx), ctx)
        return self.model.logits(self.prepare("head", params["head"]), embed, x_bSD, ctx)

    def check_names(self, aux: Terms, head: Terms) -> None:
        """ValueError where a term would hide another, or one that is needed is not there."""
        if both := sorted(aux.keys() & head.keys()):
            raise ValueError(f"model: blocks and head both return a term {', '.join(map(repr, both))}; give one of them another name")
        if lacking := [name for name in ("loss", *self.model.loss_terms) if name not in aux | head]:
            found = ", ".join(map(repr, aux | head)) or "none"
            raise ValueError(
                f"model: no term {lacking[0]!r}: found {found}; `head` must return 'loss', and every key of `loss_terms` be a term"
            )

    def _blocks(self, params: Params, x_bSD: Array, ctx: SpmdContext) -> tuple[Array, Terms]:
        """Through all layers; on a pipeline only traced, for the weights of the terms (`terms.total_weights`)."""

        def layer(x_bSD: Array, layer_params: tuple[Params, Array]) -> tuple[Array, Terms]:
            weights, index = layer_params
            x_bSD, terms = self.model.block(self.prepare("blocks", weights), x_bSD, ctx.at(index))
            return x_bSD, alike(terms)

        layer_N = self._layers()
        x_bSD, stacked = lax.scan(self.remat_layer(layer), vary(x_bSD, tuple(varying(layer_N))), (params["blocks"], layer_N))
        return x_bSD, jax.tree.map(lambda terms_N: _sum_where(layer_N >= 0, terms_N), stacked)

    def _layers(self) -> Array:
        """Layers whose weights this device holds, in stored order; negative where a row belongs to none."""
        stages = self.layout.stages
        if stages is None:
            return jnp.arange(self.model.num_layers, dtype=jnp.int32)
        row_PN = jnp.asarray(stages.layer_of_row, jnp.int32).reshape(stages.shape.num_stages, -1)
        return lax.dynamic_index_in_dim(row_PN, lax.axis_index("pipe"), keepdims=False)

    def prepare(self, part: str, weights: Params) -> Params:
        """Stored weights of a part (of one layer, for blocks) -> what it computes with."""
        return prepare(self.layout, self.plans[part], weights, dtype=self.compute_dtype, stacked=part == "blocks")

    def remat_layer(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer with the config's choice of what it keeps for its backward pass."""
        policy = remat_policy(self.remat, self.layout, self.plans["blocks"])
        # prevent_cse=False: inside a scan XLA cannot merge the recomputation with the forward pass anyway.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _sum_where(counts_N: Array, terms_N: Array) -> Array:
    """Sum over the leading dim of what counts."""
    counts = counts_N.reshape(-1, *[1] * (terms_N.ndim - 1))
    return jnp.sum(jnp.where(counts, terms_N, jnp.zeros_like(terms_N)), axis=0)


def alike(terms: Terms) -> Terms:
    """Each weight marked as varying where its sum does, so that both are summed over the same devices: a weight may be a constant,
    the number of this device's tokens. (Over `pipe` the head's sum varies in type only; the blocks' weights are counted there by row.)
    """
    sums = {name: jnp.asarray(total) for name, (total, _) in terms.items()}
    return {name: (sums[name], vary(jnp.asarray(weight), tuple(varying(sums[name]) - {"pipe"}))) for name, (_, weight) in terms.items()}

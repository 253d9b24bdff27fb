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
from jaxpar.parallel.ctx import AttendFn, SpmdContext
from jaxpar.parallel.remat import remat_policy
from jaxpar.parallel.vocab import LossSpec
from jaxpar.parallel.zero import prepare

Batch = Mapping[str, Array]


@dataclass(frozen=True)
class Forward:
    """All that is fixed when the step is traced."""

    model: Model
    layout: Layout
    plans: PyTree  # LeafPlan of every stored parameter
    attend: AttendFn
    context_method: str
    loss: LossSpec
    remat: RematConfig
    compute_dtype: Any
    seq_len: int
    attention_dropout: float = 0.0

    def context(self, batch: Batch, key: tuple[Array, Array] | None) -> SpmdContext:
        """Context of one microbatch of this device."""
        ctx = SpmdContext(
            layout=self.layout,
            loss=self.loss,
            attend_fn=self.attend,
            context_method=self.context_method,
            seq_len=self.seq_len,
            samples_b=batch["samples"],
            packed_positions_bS=batch.get("positions"),
            segments_bS=batch.get("segments"),
            wide_dtype=wide(self.compute_dtype),
            key=key,
            attention_dropout=self.attention_dropout,
        )
        return ctx.replace(shared=self.model.shared(ctx))

    def terms(self, params: Params, batch: Batch, key: tuple[Array, Array] | None) -> Terms:
        """Loss terms and metrics of this device's tokens, as (sum, weight)."""
        ctx = self.context(batch, key)
        embed = self._prepare("embed", params["embed"])
        x_bSD, aux = self._blocks(params, self.model.embed(embed, batch["tokens"], ctx), ctx)
        head = self._prepare("head", params["head"])
        terms = self.model.head(head, embed, x_bSD, batch["targets"], batch["weights"], ctx)
        self._check_names(aux, terms)
        return aux | terms

    def logits(self, params: Params, batch: Batch) -> Array:
        """This device's columns of the logits [b, S, V/tensor]."""
        ctx = self.context(batch, None)
        embed = self._prepare("embed", params["embed"])
        x_bSD, _ = self._blocks(params, self.model.embed(embed, batch["tokens"], ctx), ctx)
        return self.model.logits(self._prepare("head", params["head"]), embed, x_bSD, ctx)

    def _check_names(self, aux: Terms, head: Terms) -> None:
        """ValueError where a term would hide another, or one that is needed is not there."""
        if both := sorted(aux.keys() & head.keys()):
            raise ValueError(f"model: blocks and head both return a term {', '.join(map(repr, both))}; give one of them another name")
        if lacking := [name for name in ("loss", *self.model.loss_terms) if name not in aux | head]:
            found = ", ".join(map(repr, aux | head)) or "none"
            raise ValueError(
                f"model: no term {lacking[0]!r}: found {found}; `head` must return 'loss', and every key of `loss_terms` be a term"
            )

    def _blocks(self, params: Params, x_bSD: Array, ctx: SpmdContext) -> tuple[Array, Terms]:
        def layer(x_bSD: Array, layer_params: tuple[Params, Array]) -> tuple[Array, Terms]:
            weights, index = layer_params
            return self.model.block(self._prepare("blocks", weights), x_bSD, ctx.at(index))

        layers = jnp.arange(self.model.num_layers, dtype=jnp.int32)
        x_bSD, stacked = lax.scan(self._remat(layer), x_bSD, (params["blocks"], layers))
        return x_bSD, {name: (jnp.sum(total), jnp.sum(weight)) for name, (total, weight) in stacked.items()}

    def _prepare(self, part: str, weights: Params) -> Params:
        return prepare(self.layout, self.plans[part], weights, dtype=self.compute_dtype, stacked=part == "blocks")

    def _remat(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        policy = remat_policy(self.remat, self.layout, self.plans["blocks"])
        # prevent_cse=False: inside a scan XLA cannot merge the recomputation with the forward pass anyway.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

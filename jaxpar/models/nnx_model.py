"""From three NNX modules to the `Model` protocol: split once at build, merged inside the step on pure pytrees."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxpar.core.protocols import Context, Update
from jaxpar.core.typing import Array, Params, Terms


class Part:
    """One NNX module as (parameter specs, function of parameters)."""

    def __init__(self, module: nnx.Module) -> None:
        self.graphdef, self.state = nnx.split(module)
        self.specs: Params = nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf.spec, self.state, is_leaf=lambda x: isinstance(x, nnx.Param)))

    def bind(self, params: Params) -> Any:
        """The module with these parameters."""
        # A copy, because `replace_by_pure_dict` writes into it.
        state = nnx.State(jax.tree.map(lambda leaf: leaf, self.state, is_leaf=lambda x: isinstance(x, nnx.Param)))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self.graphdef, state)


class NNXModel:
    """A model of three modules called as `embed(tokens, ctx)`, `block(x, ctx)` and `head(x, targets, weights, embed, ctx)`."""

    def __init__(self, *, embed: nnx.Module, block: nnx.Module, head: nnx.Module, num_layers: int) -> None:
        self.parts = {"embed": Part(embed), "blocks": Part(block), "head": Part(head)}
        self.num_layers = num_layers

    @property
    def params(self) -> dict[str, Params]:
        return {name: part.specs for name, part in self.parts.items()}

    @property
    def loss_terms(self) -> Mapping[str, float]:
        return {"loss": 1.0}

    @property
    def updates(self) -> Mapping[str, Update]:
        return {}

    def shared(self, ctx: Context) -> Any:  # noqa: ARG002
        return None

    def embed(self, params_embed: Params, tokens_bS: Array, ctx: Context) -> Array:
        return self.parts["embed"].bind(params_embed)(tokens_bS, ctx)

    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        out = self.parts["blocks"].bind(params_block)(x_bSD, ctx)
        return out if isinstance(out, tuple) else (out, {})

    def head(self, params_head: Params, params_embed: Params, x_bSD: Array, targets_bS: Array, weights_bS: Array, ctx: Context) -> Terms:
        embed = self.parts["embed"].bind(params_embed)
        return self.parts["head"].bind(params_head)(x_bSD, targets_bS, weights_bS, embed, ctx)

    def logits(self, params_head: Params, params_embed: Params, x_bSD: Array, ctx: Context) -> Array:
        embed = self.parts["embed"].bind(params_embed)
        return self.parts["head"].bind(params_head).logits(x_bSD, embed, ctx)

"""All routers by the name they have in `model.moe.router`."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.base import base
from jaxpar.ops.routing.choice import Router
from jaxpar.ops.routing.expert_choice import expert_choice
from jaxpar.ops.routing.gshard import gshard
from jaxpar.ops.routing.hashed import hashed
from jaxpar.ops.routing.sigmoid_bias import sigmoid_bias
from jaxpar.ops.routing.sinkhorn import sinkhorn
from jaxpar.ops.routing.switch import switch
from jaxpar.ops.routing.topk import topk

ROUTERS: Mapping[str, Callable[[MoeConfig], Router]] = {
    "topk": topk,
    "switch": switch,
    "gshard": gshard,
    "sigmoid_bias": sigmoid_bias,
    "expert_choice": expert_choice,
    "base": base,
    "sinkhorn": sinkhorn,
    "hash": hashed,
}


def make_router(config: MoeConfig) -> Router:
    """The router of a config, its gates times `routed_scaling`."""
    router = ROUTERS[config.router](config)
    if config.routed_scaling == 1:
        return router

    def gates(logits: Array, scores: Array, expert: Array) -> Array:
        return router.gates(logits, scores, expert) * config.routed_scaling

    return replace(router, gates=gates)

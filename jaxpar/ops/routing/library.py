"""All rules by the name they have in `model.moe.router`."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxpar.config.moe import MoeConfig
from jaxpar.core.typing import Array
from jaxpar.ops.routing.base import base
from jaxpar.ops.routing.expert_choice import expert_choice
from jaxpar.ops.routing.gshard import gshard
from jaxpar.ops.routing.hashed import hashed
from jaxpar.ops.routing.rule import RoutingRule
from jaxpar.ops.routing.sigmoid_bias import sigmoid_bias
from jaxpar.ops.routing.sinkhorn import sinkhorn
from jaxpar.ops.routing.switch import switch
from jaxpar.ops.routing.topk import topk

RULES: Mapping[str, Callable[[MoeConfig], RoutingRule]] = {
    "topk": topk,
    "switch": switch,
    "gshard": gshard,
    "sigmoid_bias": sigmoid_bias,
    "expert_choice": expert_choice,
    "base": base,
    "sinkhorn": sinkhorn,
    "hash": hashed,
}


def make_rule(config: MoeConfig) -> RoutingRule:
    """The rule of a config's router, its gates times `routed_scaling`."""
    rule = RULES[config.router](config)
    if config.routed_scaling == 1:
        return rule

    def gates(logits: Array, scores: Array, expert: Array) -> Array:
        return rule.gates(logits, scores, expert) * config.routed_scaling

    return replace(rule, gates=gates)

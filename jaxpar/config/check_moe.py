"""Checks of `model.moe`: which layers have experts, what each router asks for, capacity, routing groups, and options without effect."""

import math
from collections.abc import Iterator
from typing import Any

from jaxpar.config.axes import MESH_KEYS
from jaxpar.config.layout import Layout
from jaxpar.config.model import ModelConfig
from jaxpar.config.moe import ONE_EXPERT, TWO_EXPERTS, MoeConfig
from jaxpar.config.problem import Problem, divisors, near_multiples
from jaxpar.config.run import RunConfig

SHOWN = 16  # sizes listed in a message

GROUPED = ("topk", "sigmoid_bias")  # routers that can limit a token to some groups of experts
RENORMALIZED = ("topk", "sigmoid_bias")  # routers whose gates are what they are, or divided by their sum
# Why a balance loss has no place beside a router (Megatron-LM asks for 0 with sinkhorn).
SELF_BALANCED = {
    "sinkhorn": "balances each group by itself",
    "base": "gives every expert the same number of tokens",
    "expert_choice": "fills every expert to its capacity",
    "hash": "chooses by token ids, which no loss moves",
}


def moe_problems(config: RunConfig) -> Iterator[Problem]:
    """What can be told without a mesh."""
    moe = config.model.moe
    if moe is None:
        return
    yield from _depth_problems(config.model, moe)
    yield from _choice_problems(moe)
    yield from _causal_problems(moe)
    yield from _expert_group_problems(moe)
    yield from _capacity_problems(config, moe)
    yield from _balance_problems(config, moe)
    yield from _idle_problems(moe)


def moe_layout_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Dispatch and routing groups against the axes of `layout`."""
    moe, expert = config.model.moe, layout.sizes["expert"]
    if moe is None:
        return
    if moe.dispatch == "local" and expert > 1:
        text = f"model.moe.dispatch: local, but mesh.expert={expert} spreads the experts over devices"
        yield Problem(("model.moe.dispatch", *MESH_KEYS), f"{text}; model.moe.dispatch=all_to_all would work, or mesh.expert=1")
    yield from _routing_group_problems(config, moe, layout)


def is_whole_blocks(model: ModelConfig) -> bool:
    """The layers that are not leading are one block or more, and no part of one."""
    left = model.num_layers - model.leading_dense
    return left > 0 and left % (model.moe.every if model.moe else 1) == 0


def _depth_problems(model: ModelConfig, moe: MoeConfig) -> Iterator[Problem]:
    if is_whole_blocks(model):
        return
    keys = ("model.num_layers", "model.moe.leading_dense", "model.moe.every")
    left = model.num_layers - moe.leading_dense
    if left <= 0:
        text = f"model.num_layers: {model.num_layers}, but model.moe.leading_dense={moe.leading_dense} leaves no layer for experts"
        yield Problem(keys, f"{text}; model.num_layers={moe.leading_dense + moe.every} would work")
        return
    less = f" less model.moe.leading_dense={moe.leading_dense}" if moe.leading_dense else ""
    below = left // moe.every * moe.every
    works = " or ".join(str(moe.leading_dense + n) for n in (below, below + moe.every) if n)
    text = f"model.num_layers: {model.num_layers}{less} is not a multiple of model.moe.every={moe.every}"
    yield Problem(keys, f"{text}; {works} would work, or model.moe.every of {', '.join(map(str, divisors(left)))}")


def _choice_problems(moe: MoeConfig) -> Iterator[Problem]:
    """How many experts a token goes to."""
    keys = ("model.moe.top_k", "model.moe.num_experts", "model.moe.router")
    fixed = 1 if moe.router in ONE_EXPERT else 2 if moe.router in TWO_EXPERTS else None
    if fixed is not None and fixed > moe.num_experts:
        text = f"model.moe.num_experts: {moe.num_experts}, but model.moe.router={moe.router} sends a token to {fixed}"
        yield Problem(keys, f"{text}; model.moe.num_experts={fixed} would work, or model.moe.router=switch model.moe.top_k=1")
    elif fixed is not None and moe.top_k != fixed:
        text = f"model.moe.top_k: {moe.top_k}, but model.moe.router={moe.router} sends a token to {fixed}"
        other = ", or model.moe.router=topk" if moe.top_k <= moe.num_experts else ""
        yield Problem(keys, f"{text}; model.moe.top_k={fixed} would work{other}")
    elif moe.top_k > moe.num_experts:
        text = f"model.moe.top_k: {moe.top_k} is more than model.moe.num_experts={moe.num_experts}"
        yield Problem(keys, f"{text}; at most {moe.num_experts} would work")


def _causal_problems(moe: MoeConfig) -> Iterator[Problem]:
    """`causal_only` against choices and drops that look at later tokens."""
    if not moe.causal_only:
        return
    key = "model.moe.causal_only"
    if moe.needs_group:
        text = f"{key}: true, but model.moe.router={moe.router} decides with all tokens of a group, later ones too"
        yield Problem((key, "model.moe.router"), f"{text}; model.moe.router=topk would work, or {key}=false")
    elif moe.capacity_factor is not None and moe.drop_policy != "position":
        text = f"{key}: true, but with model.moe.drop_policy={moe.drop_policy} a later token can take an earlier one's place"
        works = "model.moe.drop_policy=position would work, or model.moe.capacity_factor=null"
        yield Problem((key, "model.moe.drop_policy", "model.moe.capacity_factor"), f"{text}; {works}")


def _expert_group_problems(moe: MoeConfig) -> Iterator[Problem]:
    """Groups of experts (not of tokens) to which a token is limited."""
    if moe.router not in GROUPED:
        return
    keys = ("model.moe.num_groups", "model.moe.top_groups", "model.moe.num_experts", "model.moe.top_k")
    groups, size = moe.num_groups, moe.num_experts // moe.num_groups
    if moe.num_experts % groups:
        legal = ", ".join(map(str, divisors(moe.num_experts)[:SHOWN]))
        text = f"model.moe.num_groups: {groups} does not divide model.moe.num_experts={moe.num_experts}"
        yield Problem(keys, f"{text}; {legal} would work")
        return
    if moe.top_groups > groups:
        text = f"model.moe.top_groups: {moe.top_groups} is more than model.moe.num_groups={groups}"
        yield Problem(keys, f"{text}; at most {groups} would work")
    elif moe.top_groups * size < moe.top_k <= moe.num_experts:
        text = f"model.moe.top_groups: {moe.top_groups} of {size} experts have fewer than model.moe.top_k={moe.top_k}"
        yield Problem(keys, f"{text}; model.moe.top_groups={-(-moe.top_k // size)} would work")


def _capacity_problems(config: RunConfig, moe: MoeConfig) -> Iterator[Problem]:
    factor = moe.capacity_factor
    if factor is None and moe.router == "expert_choice":
        text = "model.moe.capacity_factor: null, but model.moe.router=expert_choice fills every expert to its capacity"
        yield Problem(("model.moe.capacity_factor", "model.moe.router"), f"{text}; model.moe.capacity_factor=1 would work")
    share = math.ceil(_group_tokens(config, moe) / moe.num_experts)
    if factor is not None and moe.capacity_formula == "tutel" and int(factor * share) == 0:
        digits = 10 ** (3 + len(str(share)))
        least = math.ceil(digits / share) / digits
        keys = ("model.moe.capacity_factor", "model.moe.capacity_formula", "model.moe.num_experts", "data.seq_len")
        text = f"model.moe.capacity_factor: {factor:g} of {share} tokens an expert rounds to 0 by model.moe.capacity_formula=tutel"
        yield Problem(keys, f"{text}; model.moe.capacity_factor={least:g} gives 1, or model.moe.capacity_formula=megatron would work")
    if moe.ragged_buffer_factor < 1:
        text = f"model.moe.ragged_buffer_factor: {moe.ragged_buffer_factor:g} has less room than a balanced load needs"
        yield Problem(("model.moe.ragged_buffer_factor",), f"{text}; 1 or more would work")


def _balance_problems(config: RunConfig, moe: MoeConfig) -> Iterator[Problem]:
    """Routers that balance without a loss."""
    if moe.balance_coefficient and (why := SELF_BALANCED.get(moe.router)):
        text = f"model.moe.balance_coefficient: {moe.balance_coefficient:g}, but model.moe.router={moe.router} {why}"
        yield Problem(("model.moe.balance_coefficient", "model.moe.router"), f"{text}; model.moe.balance_coefficient=0 would work")
    tokens = _group_tokens(config, moe)
    if moe.router == "base" and tokens < moe.num_experts:
        keys = ("model.moe.routing_group_sequences", "model.moe.num_experts", "model.moe.router", "data.seq_len")
        text = f"model.moe.routing_group_sequences: {moe.routing_group_sequences} x data.seq_len={config.data.seq_len} are {tokens} tokens"
        works = f"model.moe.routing_group_sequences={-(-moe.num_experts // config.data.seq_len)} would work, or model.moe.router=switch"
        yield Problem(keys, f"{text}, too few for model.moe.router=base to give each of {moe.num_experts} experts one; {works}")


def _group_tokens(config: RunConfig, moe: MoeConfig) -> int:
    return moe.routing_group_sequences * config.data.seq_len


def _idle_problems(moe: MoeConfig) -> Iterator[Problem]:
    """Options that are set and change nothing."""
    for name, why in _idle(moe).items():
        value, default = getattr(moe, name), MoeConfig.model_fields[name].default
        if value != default:
            text = f"model.moe.{name}: {_yaml(value)} has no effect with {why}"
            keys = ("model.moe.router", "model.moe.capacity_factor", "model.moe.dispatch")
            yield Problem((f"model.moe.{name}", *keys), f"{text}; set model.moe.{name}={_yaml(default)}")


def _idle(moe: MoeConfig) -> dict[str, str]:
    """Option -> with what other option it has no effect."""
    idle: dict[str, str] = {}
    router = f"model.moe.router={moe.router}"
    if moe.capacity_factor is None:
        why = "model.moe.capacity_factor=null, which drops no token"
        idle |= dict.fromkeys(("capacity_formula", "min_capacity", "drop_policy", "renormalize_after_drop"), why)
        if not (moe.dispatch == "ragged" and moe.allow_overflow):
            idle["max_drop_fraction"] = why
    if moe.dispatch != "ragged":
        idle |= dict.fromkeys(("ragged_buffer_factor", "allow_overflow"), f"model.moe.dispatch={moe.dispatch}, only with ragged")
    if moe.router == "expert_choice":
        drops = ("drop_policy", "renormalize_after_drop", "max_drop_fraction")
        idle |= dict.fromkeys(drops, f"{router}, whose experts take what they have room for")
    if moe.router not in GROUPED:
        idle |= dict.fromkeys(("num_groups", "top_groups", "group_score"), f"{router}, only with {' and '.join(GROUPED)}")
    elif moe.num_groups == 1:
        idle["group_score"] = "model.moe.num_groups=1"
    if moe.router != "topk":
        idle["softmax"] = f"{router}, only with topk"
    if moe.router not in RENORMALIZED:
        idle["renormalize"] = f"{router}, only with {' and '.join(RENORMALIZED)}"
    elif moe.router == "topk" and moe.softmax == "after":
        idle["renormalize"] = "model.moe.softmax=after, whose gates sum to 1 already"
    if moe.router == "hash":
        idle |= dict.fromkeys(("jitter", "entropy_coefficient", "router_z_coefficient"), f"{router}, which chooses by token ids")
    if moe.router != "sigmoid_bias":
        idle |= dict.fromkeys(("bias_rate", "bias_centred"), f"{router}, only with sigmoid_bias")
    if moe.router != "sinkhorn":
        idle["sinkhorn_tolerance"] = f"{router}, only with sinkhorn"
    if moe.balance_scope == "global" and moe.balance_coefficient:
        idle["balance_counts"] = "model.moe.balance_scope=global, which takes what the last step counted: all choices"
    elif moe.balance_scope == "global":
        idle["balance_scope"] = "model.moe.balance_coefficient=0"
    if not moe.shared_experts:
        idle["shared_gate"] = "model.moe.shared_experts=0"
    return idle


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _routing_group_problems(config: RunConfig, moe: MoeConfig, layout: Layout) -> Iterator[Problem]:
    """A device has whole groups in each microbatch, so that no layout changes who is dropped."""
    rows, parts, shards = config.data.global_batch_size, config.num_microbatches, layout.ways("batch")
    group = moe.routing_group_sequences
    if rows % (parts * shards):
        return  # reported with the batch
    here = rows // (parts * shards)
    if here % group == 0:
        return
    text = f"model.moe.routing_group_sequences: {group} does not divide the {here} rows of a microbatch on a device"
    why = f"data.global_batch_size={rows} / (num_microbatches={parts} x batch shards {shards})"
    works = f"{', '.join(map(str, divisors(here)[:SHOWN]))} would work"
    if fitting := [n for n in divisors(rows // shards) if rows // shards // n % group == 0]:
        works += f", or num_microbatches of {', '.join(map(str, fitting[:SHOWN]))}"
    elif rows % group == 0:
        works += f", or batch shards that divide {rows // group}"
    else:
        works += f", or data.global_batch_size={near_multiples(rows, parts * shards * group)}"
    keys = ("model.moe.routing_group_sequences", "data.global_batch_size", "num_microbatches", *MESH_KEYS)
    yield Problem(keys, f"{text} ({why}); {works}")

"""Checks of `model.mla`: options of plain attention that have no effect beside it, positions, widths of a head's parts."""

from collections.abc import Iterator

from jaxpar.config.mla import MlaConfig
from jaxpar.config.model import ModelConfig
from jaxpar.config.problem import Problem
from jaxpar.config.run import RunConfig

# Options of plain attention -> why they change nothing, and the value that says nothing.
IDLE = {
    "num_kv_heads": ("whose heads all have keys and values of their own", "null"),
    "head_dim": ("which has qk_nope_head_dim, qk_rope_head_dim and v_head_dim", "null"),
    "qk_norm": ("which has norms on its latents", "false"),
}


def mla_problems(config: RunConfig) -> Iterator[Problem]:
    """What can be told without a mesh."""
    model, mla = config.model, config.model.mla
    if mla is None:
        return
    yield from _plain_attention_problems(model)
    yield from _width_problems(mla)


def _plain_attention_problems(model: ModelConfig) -> Iterator[Problem]:
    """Options that plain attention has and this has not."""
    for name, (why, nothing) in IDLE.items():
        value = getattr(model, name)
        if value != ModelConfig.model_fields[name].default:
            text = f"model.{name}: {str(value).lower()} has no effect with model.mla, {why}"
            yield Problem((f"model.{name}", "model.mla"), f"{text}; set model.{name}={nothing}")
    if model.bias:
        text = "model.bias: true, but the maps of model.mla have none"
        yield Problem(("model.bias", "model.mla"), f"{text}; model.bias=false would work, or model.mla=null")
    if model.positions != "rope":
        text = f"model.positions: {model.positions}, but model.mla has a rotary part in every head"
        yield Problem(("model.positions", "model.mla"), f"{text}; model.positions=rope would work, or model.mla=null")


def _width_problems(mla: MlaConfig) -> Iterator[Problem]:
    rope = mla.qk_rope_head_dim
    if rope % 2:
        near = f"{rope - 1} or {rope + 1}" if rope > 1 else "2"
        text = f"model.mla.qk_rope_head_dim: {rope} is odd, but rotary angles turn pairs"
        yield Problem(("model.mla.qk_rope_head_dim",), f"{text}; {near} would work")
    if mla.v_head_dim > mla.qk_head_dim:
        keys = ("model.mla.v_head_dim", "model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim")
        text = f"model.mla.v_head_dim: {mla.v_head_dim} is more than qk_nope_head_dim + qk_rope_head_dim = {mla.qk_head_dim}"
        yield Problem(keys, f"{text}, and attention takes values as wide as keys at most; at most {mla.qk_head_dim} would work")

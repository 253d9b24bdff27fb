"""Config errors for people: every violation on a line of its own, unknown keys with the name that was meant."""

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxpar.config.base import Section

# Names of other trainers (torch-style command lines, Hugging Face configs) and ours.
ALIASES: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "warmup": "optimizer.warmup_steps",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "clip_grad": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm",
    "batch_size": "data.global_batch_size",
    "train_batch_size": "data.global_batch_size",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "gradient_accumulation_steps": "num_microbatches",
    "train_iters": "train.steps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "save_interval": "checkpoint.save_every",
    "hidden_size": "model.embed_dim",
    "intermediate_size": "model.mlp_dim",
    "ffn_hidden_size": "model.mlp_dim",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "multi_latent_attention": "model.mla",
    "qk_head_dim": "model.mla.qk_nope_head_dim",
    "qk_pos_emb_head_dim": "model.mla.qk_rope_head_dim",
    "dtype": "compute_dtype",
    "dp": "mesh.data",
    "fsdp": "mesh.data",
    "tp": "mesh.tensor",
    "cp": "mesh.context",
    "sp": "mesh.context",
    "pp": "mesh.pipe",
    "ep": "mesh.expert",
    "ep_size": "mesh.expert",
    "expert_parallel_size": "mesh.expert",
    "expert_parallel_degree": "mesh.expert",
    "expert_model_parallel_size": "mesh.expert",
    "num_local_experts": "model.moe.num_experts",
    "n_routed_experts": "model.moe.num_experts",
    "num_moe_experts": "model.moe.num_experts",
    "num_experts_per_tok": "model.moe.top_k",
    "moe_router_topk": "model.moe.top_k",
    "moe_intermediate_size": "model.moe.expert_dim",
    "moe_ffn_hidden_size": "model.moe.expert_dim",
    "n_shared_experts": "model.moe.shared_experts",
    "moe_shared_expert_gate": "model.moe.shared_gate",
    "first_k_dense_replace": "model.moe.leading_dense",
    "decoder_sparse_step": "model.moe.every",
    "moe_layer_freq": "model.moe.every",
    "moe_expert_capacity_factor": "model.moe.capacity_factor",
    "moe_token_drop_policy": "model.moe.drop_policy",
    "moe_token_dispatcher_type": "model.moe.dispatch",
    "moe_router_load_balancing_type": "model.moe.router",
    "score_func": "model.moe.router",
    "scoring_func": "model.moe.router",
    "moe_router_pre_softmax": "model.moe.softmax",
    "norm_topk_prob": "model.moe.renormalize",
    "router_jitter_noise": "model.moe.jitter",
    "moe_input_jitter_eps": "model.moe.jitter",
    "routed_scaling_factor": "model.moe.routed_scaling",
    "moe_router_topk_scaling_factor": "model.moe.routed_scaling",
    "n_group": "model.moe.num_groups",
    "topk_group": "model.moe.top_groups",
    "moe_router_num_groups": "model.moe.num_groups",
    "moe_router_group_topk": "model.moe.top_groups",
    "moe_router_bias_update_rate": "model.moe.bias_rate",
    "aux_loss_alpha": "model.moe.balance_coefficient",
    "router_aux_loss_coef": "model.moe.balance_coefficient",
    "moe_aux_loss_coeff": "model.moe.balance_coefficient",
    "router_z_loss_coef": "model.moe.router_z_coefficient",
    "moe_z_loss_coeff": "model.moe.router_z_coefficient",
}
# Those whose number means something else here.
CONVERSIONS: Mapping[str, str] = {
    "router_aux_loss_coef": "of it x top_k / layers with experts: there it counts once for all layers and is top_k at balance",
}
SAME_NAME_CUTOFF = 0.6  # of difflib's ratio; `learing_rate` and `learning_rate` have 0.96


class ConfigError(ValueError):
    """What the user can mend in a config: all of it at once.

    problems: one line each: key, value, the rule, a value that would work.
    """

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = list(problems)
        self.source = source
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone, optional or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return next((found for arg in get_args(annotation) if (found := section_of(arg))), None)
    return None


def all_fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the config as (dotted path, field); the parts of a tuple are written `[0]`."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        inner = section_of(info.annotation)
        if inner is not None:
            item = "[0]" if get_origin(info.annotation) is tuple else ""
            yield from all_fields(inner, f"{prefix}{name}{item}.")


def dotted(loc: Sequence[str | int]) -> str:
    """("data", "mixture", 0, "path") -> data.mixture[0].path"""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def field_at(root: type[Section], loc: Sequence[str | int]) -> FieldInfo | None:
    """The field that a key means; None where the schema has none."""
    section: type[Section] | None = root
    info = None
    for part in loc:
        if isinstance(part, int):
            continue
        info = section.model_fields.get(part) if section else None
        section = section_of(info.annotation) if info else None
    return info


def unknown_key(root: type[Section], loc: Sequence[str | int]) -> str:
    """The line for a key that does not exist: the one that was meant, also when it belongs to another section."""
    *parents, key = loc
    key = str(key)
    paths = [path for path, _ in all_fields(root)]
    own_field = field_at(root, parents)
    own = section_of(own_field.annotation) if own_field else root
    own_names = list(own.model_fields) if own else []
    elsewhere = [path for path in paths if path.rsplit(".", 1)[-1] == key]
    near_own = difflib.get_close_matches(key, own_names, 1, SAME_NAME_CUTOFF)
    near_alias = difflib.get_close_matches(key, ALIASES, 1, 0.85)
    near_any = difflib.get_close_matches(key, [path.rsplit(".", 1)[-1] for path in paths], 1, SAME_NAME_CUTOFF)
    if elsewhere:
        hint = f"{key} belongs at {' or '.join(elsewhere)}"
    elif near_alias:
        hint = f"did you mean {ALIASES[near_alias[0]]}?"
        hint += f" ({CONVERSIONS[near_alias[0]]})" if near_alias[0] in CONVERSIONS else ""
    elif near_own:
        hint = f"did you mean {dotted([*parents, near_own[0]])}?"
    elif near_any:
        hint = f"did you mean {next(path for path in paths if path.rsplit('.', 1)[-1] == near_any[0])}?"
    else:
        hint = f"known here: {', '.join(own_names)}"
    return f"{dotted(loc)}: unknown key; {hint}"


def placeholder(info: FieldInfo) -> Any:
    """A value that passes the field's own rules."""
    if info.examples:
        return info.examples[0]
    if not info.is_required():
        return info.get_default(call_default_factory=True)
    inner = section_of(info.annotation)
    if inner is not None:
        return {name: placeholder(field) for name, field in inner.model_fields.items() if field.is_required()}
    if get_origin(info.annotation) is Literal:
        return get_args(info.annotation)[0]
    return 1


def _bound(info: FieldInfo) -> Any:
    for rule in info.metadata:
        if isinstance(rule, Ge):
            return rule.ge
        if isinstance(rule, Gt) and info.annotation is int:
            return int(str(rule.gt)) + 1
    return placeholder(info)


def _works(info: FieldInfo | None, error: Mapping[str, Any]) -> str:
    """`; try VALUE` for one pydantic error."""
    if info is None or section_of(info.annotation) is not None:
        return ""
    if error["type"] == "literal_error":
        options = [str(option) for option in get_args(info.annotation)]
        near = difflib.get_close_matches(str(error["input"]), options, 1, SAME_NAME_CUTOFF)
        return f"; try {near[0]}" if near else ""
    if info.annotation is bool:
        return "; try true or false"
    value = placeholder(info) if error["type"] == "missing" else _bound(info)
    return f"; try {'null' if value is None else value}"


def real_loc(tree: Any, loc: Sequence[Any], keep_last: bool) -> tuple[str | int, ...]:
    """Pydantic's location without the tags that it adds for the branches of a union."""
    kept: list[str | int] = []
    for i, part in enumerate(loc):
        inside = (isinstance(tree, dict) and part in tree) or (isinstance(tree, list) and isinstance(part, int) and part < len(tree))
        if inside:
            tree = tree[part]
        elif not (keep_last and i == len(loc) - 1):
            continue
        kept.append(part)
    return tuple(kept)


def translate(root: type[Section], tree: dict[str, Any], error: ValidationError) -> dict[tuple[str | int, ...], str]:
    """Location -> one line, for every violation that pydantic found."""
    found: dict[tuple[str | int, ...], list[str]] = {}
    lines: dict[tuple[str | int, ...], str] = {}
    for item in error.errors():
        loc = real_loc(tree, item["loc"], keep_last=item["type"] in ("missing", "extra_forbidden"))
        info = field_at(root, loc)
        if item["type"] == "extra_forbidden":
            lines[loc] = unknown_key(root, loc)
        elif item["type"] == "missing":
            lines[loc] = f"{dotted(loc)}: required, not given{_works(info, item)}"
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            lines[loc] = f"{dotted(loc)}: {item['input']!r} is not a section; give its keys, or leave it out"
        else:
            rules = found.setdefault(loc, [])
            rules.append(item["msg"].removeprefix("Input should be ").removeprefix("Value error, "))
            lines[loc] = f"{dotted(loc)}: {item['input']!r} is not allowed; must be {' or '.join(rules)}{_works(info, item)}"
            if item["type"] == "bool_as_value":
                lines[loc] = f"{dotted(loc)}: {item['input']!r} is not allowed; {item['msg']}{_works(info, item)}"
    return lines

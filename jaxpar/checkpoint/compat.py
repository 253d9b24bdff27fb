"""What else a checkpoint tells, and which part of the config must be the same to go on from it."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxpar.config.run import RunConfig
from jaxpar.core.words import versions

# Keys and sections that may change between a save and its resume. All others decide what the state means, or which sample comes next.
MAY_CHANGE = (
    *("name", "mesh", "rules", "sequence_parallel", "zero_stage", "num_microbatches", "pipeline", "context", "remat", "attention"),
    *("compute_dtype", "loss_chunk_tokens", "z_loss", "train", "checkpoint", "log", "run", "optimizer"),
    # Where the data lie; what they are is compared by fingerprint.
    *("data.path", "data.prefetch", "data.mixture.*.path"),
    # How tokens travel to experts, and what stops a run.
    *("model.moe.dispatch", "model.moe.ragged_buffer_factor", "model.moe.allow_overflow", "model.moe.max_drop_fraction"),
)
# Exceptions inside of sections that may change.
MUST_MATCH = ("optimizer.name",)

_ABSENT = object()


def make_meta(*, config: Mapping[str, Any], fingerprint: str, step: int, samples_seen: int) -> dict[str, Any]:
    """The JSON beside the arrays. config: as `model_dump(mode="json")` gives it. step: updates done."""
    return {
        "step": step,
        "samples_seen": samples_seen,
        "seed": config["seed"],
        "data_fingerprint": fingerprint,
        "versions": versions(),
        "config": dict(config),
    }


def config_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line, with both values, for each key that must be the same to resume and is not."""
    return [line for key, line in _changes(saved, current) if not _may_change(key)]


def config_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each key that differs and may: worth telling."""
    return [line for key, line in _changes(saved, current) if _may_change(key)]


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, str]]:
    old, new = _flat(_with_defaults(saved)), _flat(current)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if before != after:
            lines.append((key, f"{key}: the checkpoint has {_show(before)}, this run {_show(after)}"))
    return lines


def _with_defaults(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config saved by an older version, with the defaults of keys that it did not have: what they name was not there, or was so."""
    try:
        return RunConfig.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def _show(value: Any) -> str:
    return "nothing" if value is _ABSENT else repr(value)


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; elements of lists by their index. An empty section or list is a value."""
    if isinstance(node, Mapping) and node:
        parts = {str(key): value for key, value in node.items()}
    elif isinstance(node, list | tuple) and node:
        parts = {str(i): value for i, value in enumerate(node)}
    else:
        return {prefix: list(node) if isinstance(node, tuple) else node}
    return {name: leaf for key, value in parts.items() for name, leaf in _flat(value, f"{prefix}.{key}" if prefix else key).items()}


def _may_change(key: str) -> bool:
    return any(_below(key, rule) for rule in MAY_CHANGE) and not any(_below(key, rule) for rule in MUST_MATCH)


def _below(key: str, rule: str) -> bool:
    """True where `key` is `rule` (a * stands for one part) or lies in it."""
    parts, pattern = key.split("."), rule.split(".")
    return len(parts) >= len(pattern) and all(p in ("*", part) for part, p in zip(parts, pattern, strict=False))

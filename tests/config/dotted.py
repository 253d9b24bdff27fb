"""Configs by dotted changes."""

from collections.abc import Mapping
from typing import Any


def nested(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """{"model.moe.top_k": 2} -> {"model": {"moe": {"top_k": 2}}}, later changes over earlier ones; sections among the values are copied."""
    tree: dict[str, Any] = {}
    for change in changes:
        for key, value in change.items():
            *parents, last = key.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = dict(value) if isinstance(value, dict) else value
    return tree

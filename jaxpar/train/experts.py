"""What a row of metrics says of experts, and when too many dropped tokens stop a run."""

from collections.abc import Mapping

import numpy as np

from jaxpar.config.moe import MoeConfig
from jaxpar.core.records import Row
from jaxpar.train.errors import ExpertsError

DIGITS = 5  # of shares and fractions in a row


def table_row(tables: Mapping[str, np.ndarray]) -> Row:
    """Terms that are arrays, one number or a list for each block, as lists; and of load, drops and balance the worst block's number."""
    lists = {name: np.round(values.astype(np.float64), DIGITS).tolist() for name, values in tables.items()}
    worst: Row = {}
    for prefix in ("", "eval_"):
        if (load := tables.get(f"{prefix}moe_load")) is not None:
            worst[f"{prefix}moe_max_load"] = float(np.max(max_over_mean(load)))
        for name in ("moe_dropped", "moe_overflow", "moe_balance"):
            if (values := tables.get(f"{prefix}{name}")) is not None:
                worst[f"{prefix}{name}_worst"] = float(np.max(values))
    return {**lists, **worst}


def max_over_mean(load_LE: np.ndarray) -> np.ndarray:
    """Of each block, the load of its busiest expert / the mean; 0 where no token was routed."""
    mean_L = load_LE.mean(axis=1)
    return np.where(mean_L > 0, load_LE.max(axis=1) / np.where(mean_L > 0, mean_L, 1.0), 0.0)


def limits_error(moe: MoeConfig | None, step: int, tables: Mapping[str, np.ndarray]) -> ExpertsError | None:
    """What ends the run after a step: more dropped than `max_drop_fraction`, or a full buffer that was not allowed."""
    if moe is None:
        return None
    lines = []
    if moe.max_drop_fraction is not None and "moe_dropped" in tables:
        block = int(np.argmax(tables["moe_dropped"]))
        if (dropped := float(tables["moe_dropped"][block])) > moe.max_drop_fraction:
            text = f"block {block} dropped {dropped:.4f} of its choices, more than model.moe.max_drop_fraction={moe.max_drop_fraction}"
            lines.append(f"{text}; a larger model.moe.capacity_factor or balance_coefficient would drop fewer")
    if not moe.allow_overflow and "moe_overflow" in tables:
        block = int(np.argmax(tables["moe_overflow"]))
        if (lost := float(tables["moe_overflow"][block])) > 0:
            text = f"block {block} lost {lost:.4f} of its choices, for a device can receive model.moe.ragged_buffer_factor="
            text += f"{moe.ragged_buffer_factor} times what it would if all were balanced"
            lines.append(f"{text}; set it higher, or model.moe.allow_overflow=true to go on")
    return ExpertsError(f"step {step}: {'; '.join(lines)}") if lines else None

"""What a row of metrics says of experts, and when too many dropped tokens stop a run."""

from collections.abc import Mapping

import numpy as np

from jaxpar.config.moe import MoeConfig
from jaxpar.core.records import Row
from jaxpar.core.shares import entropy, over_mean
from jaxpar.core.words import percent, times
from jaxpar.train.errors import ExpertsError

DIGITS = 5  # of shares and fractions in a row
PREFIXES = ("", "eval_")  # of terms of a training step, and of an evaluation


def table_row(tables: Mapping[str, np.ndarray]) -> Row:
    """Terms that are arrays, one number or a list for each block, as lists; and the worst block's numbers."""
    return {**list_row(tables), **worst_row(tables)}


def list_row(tables: Mapping[str, np.ndarray]) -> Row:
    """Every term as a list, and how even its loads are."""
    lists = {name: np.round(values.astype(np.float64), DIGITS).tolist() for name, values in tables.items()}
    for prefix in PREFIXES:
        if (load := tables.get(f"{prefix}moe_load")) is not None:
            lists[f"{prefix}moe_load_entropy"] = np.round(entropy(load), DIGITS).tolist()
    return lists


def worst_row(tables: Mapping[str, np.ndarray]) -> Row:
    """Of load, drops and balance the worst block's number."""
    worst: Row = {}
    for prefix in PREFIXES:
        if (load := tables.get(f"{prefix}moe_load")) is not None:
            worst[f"{prefix}moe_max_load"] = float(np.nan_to_num(over_mean(load)).max())
        for name in ("moe_dropped", "moe_overflow", "moe_balance"):
            if (values := tables.get(f"{prefix}{name}")) is not None:
                worst[f"{prefix}{name}_worst"] = float(np.max(values))
    return worst


def experts_note(row: Row, prefix: str = "") -> str:
    """What a person should see of a row's experts: "busiest expert 2.10 x the mean, 24.1 % dropped"; "" without any."""
    if (busiest := row.get(f"{prefix}moe_max_load")) is None:
        return ""
    dropped = row.get(f"{prefix}moe_dropped_worst", 0.0)
    return f"busiest expert {times(busiest)} x the mean" + (f", {percent(dropped)} dropped" if dropped else "")


def limits_error(moe: MoeConfig | None, where: str, tables: Mapping[str, np.ndarray], prefix: str = "") -> ExpertsError | None:
    """What ends a run: more dropped than `max_drop_fraction`, or a full buffer that was not allowed. where: "step 7"."""
    if moe is None:
        return None
    dropped, lost = (_worst(tables, f"{prefix}{name}") for name in ("moe_dropped", "moe_overflow"))
    lines = []
    if dropped is not None and moe.max_drop_fraction is not None and dropped[1] > moe.max_drop_fraction:
        text = (
            "block {} dropped {:.4f} of its choices, ".format(*dropped) + f"more than model.moe.max_drop_fraction={moe.max_drop_fraction}"
        )
        lines.append(f"{text}; a larger model.moe.capacity_factor or balance_coefficient would drop fewer")
    lossy = False
    if lost is not None and lost[1] > 0 and not moe.allow_overflow:
        lossy = True
        text = "block {} lost {:.4f} of its choices, ".format(*lost)
        text += (
            f"for a device can receive model.moe.ragged_buffer_factor={moe.ragged_buffer_factor} times what it would if all were balanced"
        )
        lines.append(f"{text}; set it higher, or model.moe.allow_overflow=true to go on")
    return ExpertsError(f"{where}: {'; '.join(lines)}", lossy=lossy) if lines else None


def _worst(tables: Mapping[str, np.ndarray], name: str) -> tuple[int, float] | None:
    """(block, fraction) of the largest."""
    if name not in tables:
        return None
    block = int(np.argmax(tables[name]))
    return block, float(tables[name][block])

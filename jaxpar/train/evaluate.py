"""Evaluation on a fixed set: sums and weights are added over batches and divided once, so short or padded batches weigh what they hold."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpar.build import Parts
from jaxpar.core.typing import Params
from jaxpar.step.eval_step import EvalFn


def evaluate(
    parts: Parts, params: Params, *, step: EvalFn | None = None, give_up: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Mean of every loss term over the first `train.eval_batches` batches of the held-out set, nats a token for "loss".

    Arrays for terms that have a number a block. step: the compiled evaluation step, where it is at hand. Reads nothing that training
    changes and changes nothing that training reads. None when `give_up()` turned true between batches.
    """
    sums: dict[str, Any] = {}
    weights: dict[str, Any] = {}

    def add(result: tuple[dict[str, jax.Array], dict[str, jax.Array]]) -> None:
        for totals, part in zip((sums, weights), jax.device_get(result), strict=True):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)

    step = step or parts.eval_step
    running = None
    for rows in parts.eval_data.eval_batches(limit=parts.config.train.eval_batches):
        if give_up():
            return None
        batch = parts.feed.place(rows, parts.config.num_microbatches)
        previous, running = running, step(params, batch)
        if previous is not None:
            add(previous)
    if running is not None:
        add(running)
    return {name: _mean(total, weights[name]) for name, total in sums.items()}


def _mean(total: np.ndarray, weight: np.ndarray) -> Any:
    """0 where nothing counts; a number, or an array where a term is one."""
    mean = np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), 0.0)
    return mean if mean.ndim else float(mean)

"""Steps whose loss or gradient is not a number: which tensor was first, and whether to go on.

The step itself keeps parameters and optimizer state as they were. Under `stop` it also halts: its counter turns negative
(-1 - n after n good updates), and every later step, one of which is already running when the loop learns of it, does nothing.
"""

import math
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxpar.config.train import TrainConfig
from jaxpar.step.state import TrainState
from jaxpar.train.errors import NonFiniteError

NAMED = 8  # bad tensors named in a message


@dataclass
class NonFinitePolicy:
    """Looks at the numbers of each step in turn."""

    config: TrainConfig
    leaf_names: list[str]  # in the order of `leaf_norms`
    skipped_in_a_row: int = 0

    def is_bad(self, numbers: dict[str, float]) -> bool:
        """Count this step; True where it changed nothing."""
        bad = not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"]))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if bad else 0
        return bad

    def error(self, step: int, numbers: dict[str, float], leaf_norms: np.ndarray) -> NonFiniteError | None:
        """What ends the run after a bad step; None: go on."""
        if self.config.on_nonfinite == "skip" and self.skipped_in_a_row <= self.config.max_skipped:
            return None
        facts = f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}; {self._tensors(leaf_norms)}"
        if self.config.on_nonfinite == "stop":
            advice = "lower optimizer.lr, look at the data of this step, or train.on_nonfinite=skip leaves such steps out"
        else:
            advice = f"{self.skipped_in_a_row} such steps in a row, train.max_skipped={self.config.max_skipped}: lower optimizer.lr"
        return NonFiniteError(f"{facts}. {advice}")

    def _tensors(self, leaf_norms: np.ndarray) -> str:
        bad = [name for name, norm in zip(self.leaf_names, leaf_norms, strict=True) if not np.isfinite(norm)]
        if not bad:
            return "every single gradient is finite" if self.leaf_names else "no gradients"
        rest = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        return f"first bad gradient {bad[0]} ({len(bad)} of {len(self.leaf_names)}: {', '.join(bad[:NAMED])}{rest})"


def last_good(state: TrainState) -> tuple[TrainState, int]:
    """The state before the step that halted, with its counter set right; a state that did not halt as it is."""
    counter = int(state.step)
    if counter >= 0:
        return state, counter
    done = -1 - counter
    step = jax.device_put(np.asarray(done, state.step.dtype), state.step.sharding)
    return replace(state, step=step), done

"""What a step changes: parameters, optimizer state, number of updates done."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.core.typing import Params, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a checkpoint holds; randomness is a function of the seed and `step`."""

    params: Params
    opt_state: PyTree
    step: Any  # int32 array: optimizer steps taken, counting skipped ones

"""Optax chains: the rule by name, decay by dim names, the learning rate as a function of the step."""

from jaxpar.optim.build import RULES, build_optimizer, clip_factor, describe_decay
from jaxpar.optim.names import decays, matrix_dims
from jaxpar.optim.schedule import learning_rate
from jaxpar.optim.specs import state_specs
from jaxpar.optim.update import guarded_update

__all__ = [
    "RULES",
    "build_optimizer",
    "clip_factor",
    "decays",
    "describe_decay",
    "guarded_update",
    "learning_rate",
    "matrix_dims",
    "state_specs",
]

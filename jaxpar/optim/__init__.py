"""Optax chains: the rule by name, decay by dim names, the learning rate as a function of the step."""

from jaxpar.optim.build import RULES, build_optimizer, clip_factor, describe_decay
from jaxpar.optim.names import decays, matrix_dims
from jaxpar.optim.schedule import learning_rate
from jaxpar.optim.specs import state_specs

__all__ = ["RULES", "build_optimizer", "clip_factor", "decays", "describe_decay", "learning_rate", "matrix_dims", "state_specs"]

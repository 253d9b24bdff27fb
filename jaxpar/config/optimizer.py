"""`optimizer:` which update, and the learning rate as a function of the step alone."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxpar.config.base import Section


class OptimizerConfig(Section):
    """Clip by global norm, rule, decay (matrices and tables only), learning rate: in this order, whatever the rule."""

    name: Literal["adamw", "lion", "sgd", "adafactor", "muon"] = "adamw"
    lr: PositiveFloat = Field(examples=[4e-3])
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None  # wsd: length of the final decay; None: a tenth of the run
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)  # final learning rate / lr
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)  # sgd (None: 0, no state) and muon (None: 0.95)
    max_grad_norm: PositiveFloat | None = 1.0  # None: no clipping

"""`train:`, `checkpoint:`, `log:`, `remat:`, `context:`, `run:` sections."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from jaxpar.config.base import Section

# Values that a block names for `jax.ad_checkpoint.checkpoint_name`.
REMAT_NAMES = ("query", "key", "value", "attention", "mlp_hidden", "latent")


class TrainConfig(Section):
    """The loop."""

    steps: PositiveInt = Field(examples=[120])
    eval_every: NonNegativeInt = 0  # 0: only at the end
    eval_batches: PositiveInt = 8
    log_every: PositiveInt = 1
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a step with a non-finite loss or gradient never changes the state
    max_skipped: PositiveInt = 10  # skip: consecutive skipped steps before the run stops
    sample_tokens: NonNegativeInt = 120  # length of the sample shown at the end; 0: none
    sample_prompt: str = "def "


class CheckpointConfig(Section):
    """What is saved, what is kept, and whether a run goes on where it was."""

    save_every: NonNegativeInt = 100  # steps; 0: only at the end
    keep_last: int = Field(default=2, ge=-1)  # newest steps that are kept; -1: all
    keep_every: NonNegativeInt = 0  # steps that are multiples of this are never deleted
    resume: str = "auto"  # auto | never | path of another run's checkpoints

    @field_validator("keep_last")
    @classmethod
    def _keep_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 would delete every checkpoint as soon as it is saved: keep at least 1, or -1 for all")
        return value


class LogConfig(Section):
    """Records beside metrics.jsonl."""

    tensorboard: bool = True


class RematConfig(Section):
    """What a layer recomputes in the backward pass."""

    policy: Literal["none", "full", "selective"] = "none"
    # selective: names that are saved (jax.ad_checkpoint.checkpoint_name), everything else is recomputed
    save: tuple[str, ...] = REMAT_NAMES


class ContextConfig(Section):
    """How attention sees a sequence that is split over the `context` axis."""

    method: Literal["ring", "all_gather", "ulysses"] = "ring"


class RunSection(Section):
    """The folder of the run."""

    dir: str | None = None  # None: runs/<name of the config file>

"""`pipeline:` which schedule the stages of `mesh.pipe` follow, and what each of them holds and keeps."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from jaxpar.config.base import Section


class PipelineConfig(Section):
    """Has an effect where mesh.pipe > 1; `num_microbatches` is what flows through it."""

    # gpipe | 1f1b | interleaved | zb_h1 | zb_h2 | zb_v | dualpipe_v | path of a .csv (`jaxpar schedule NAME --csv FILE` writes one)
    schedule: str = Field(default="1f1b", examples=["1f1b"])
    chunks_per_stage: PositiveInt | None = None  # interleaved (None: 2); the other schedules have a number of their own
    # Layers (blocks of model.moe.every layers) of each virtual stage in the order in which a microbatch passes them. balance: such that
    # neither the output head, which the last stage has on top, nor the first one's leading dense layers (model.moe.leading_dense), which
    # are no part of this list, hold anybody up. None: equal where they divide, else balance
    layers_per_stage: tuple[int, ...] | Literal["balance"] | None = None
    stash: Literal["residuals", "inputs"] = "residuals"  # what waits for the backward pass; inputs: the stage is computed again

    @field_validator("layers_per_stage", mode="before")
    @classmethod
    def _word_or_numbers(cls, value: Any) -> Any:
        # In pydantic's words each branch of the union has a complaint of its own.
        numbers = isinstance(value, list | tuple) and all(type(count) is int for count in value)
        if value is not None and value != "balance" and not numbers:
            raise ValueError("balance, null or a list of whole numbers, one for each stage")
        return value

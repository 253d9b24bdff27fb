"""The whole config: the sections together. Cross-checks are in `checks.py`, loading in `load.py`."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from jaxpar.config.base import Section
from jaxpar.config.data import DataConfig
from jaxpar.config.mesh import MeshConfig
from jaxpar.config.model import ModelConfig
from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.config.pipeline import PipelineConfig
from jaxpar.config.train import CheckpointConfig, ContextConfig, LogConfig, RematConfig, RunSection, TrainConfig


class RunConfig(Section):
    """Everything that decides a run."""

    name: str = "run"  # the config file's stem
    seed: NonNegativeInt = 0
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    rules: dict[str, str | tuple[str, ...] | None] = Field(
        default_factory=dict
    )  # dim -> mesh axes, over `layout.DEFAULT_RULES`; null: not split
    sequence_parallel: bool = True  # `tensor` also splits the sequence at block boundaries
    zero_stage: Literal[0, 1, 2, 3] = 1
    num_microbatches: PositiveInt = 1
    pipeline: PipelineConfig = PipelineConfig()
    context: ContextConfig = ContextConfig()
    remat: RematConfig = RematConfig()
    attention: Literal["auto", "xla", "cudnn", "reference"] = "auto"
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    param_dtype: Literal["float32", "float64"] = "float32"
    loss_chunk_tokens: PositiveInt = 1024  # tokens whose logits exist at once on a device
    z_loss: NonNegativeFloat = 0.0  # coefficient of mean(logsumexp(logits)^2) (PaLM, section 5)
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    run: RunSection = RunSection()

"""The schedule that a checked config means, and the blocks of each of its stages."""

from jaxpar.config.flops import forward_flops_per_token, head_flops_per_token, leading_flops_per_token
from jaxpar.config.run import RunConfig
from jaxpar.config.stages import Stages, balanced_layers
from jaxpar.schedule.actions import Schedule, Shape
from jaxpar.schedule.library import build_schedule


def schedule_of(config: RunConfig, pipe: int) -> Schedule:
    """The schedule of a config without problems."""
    return build_schedule(config.pipeline.schedule, pipe, config.num_microbatches, config.pipeline.chunks_per_stage)


def stages_of(config: RunConfig, pipe: int) -> Stages | None:
    """Which layers each stage holds, of a config without problems; None without a pipeline."""
    if pipe == 1:
        return None
    shape = schedule_of(config, pipe).shape
    return Stages(shape, layers_per_stage(config, shape))


def layers_per_stage(config: RunConfig, shape: Shape) -> tuple[int, ...]:
    """Layers of each virtual stage (blocks of model.moe.every layers, where there are such): as the config says.

    If it says nothing, equal where they divide, else balanced with the head and the dense layers of the embedding.
    """
    asked, num_blocks = config.pipeline.layers_per_stage, config.model.num_blocks
    if isinstance(asked, tuple):
        return asked
    if asked is None and num_blocks % shape.num_virtual == 0:
        return balanced_layers(num_blocks, shape.num_virtual, 0.0)
    return balanced_layers(num_blocks, shape.num_virtual, head_cost_in_layers(config), leading_cost_in_layers(config))


def head_cost_in_layers(config: RunConfig) -> float:
    """FLOPs of the output head / FLOPs of one block."""
    return head_flops_per_token(config.model) / _block_flops(config)


def leading_cost_in_layers(config: RunConfig) -> float:
    """FLOPs of the dense layers before the first block / FLOPs of one block."""
    return leading_flops_per_token(config.model, config.data.seq_len) / _block_flops(config)


def _block_flops(config: RunConfig) -> float:
    model, seq_len = config.model, config.data.seq_len
    ends = head_flops_per_token(model) + leading_flops_per_token(model, seq_len)
    return (forward_flops_per_token(model, seq_len) - ends) / model.num_blocks

"""The schedule that a checked config means, and the layers of each of its stages."""

from jaxpar.config.run import RunConfig
from jaxpar.config.sizes import forward_flops_per_token
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
    """Layers of each virtual stage: as the config says; if it says nothing, equal where they divide, else balanced with the head."""
    asked, num_layers = config.pipeline.layers_per_stage, config.model.num_layers
    if isinstance(asked, tuple):
        return asked
    even = asked is None and num_layers % shape.num_virtual == 0
    return balanced_layers(num_layers, shape.num_virtual, 0.0 if even else head_cost_in_layers(config))


def head_cost_in_layers(config: RunConfig) -> float:
    """FLOPs of the output head / FLOPs of one layer."""
    model = config.model
    head = 2 * model.embed_dim * model.vocab_size
    return head / ((forward_flops_per_token(model, config.data.seq_len) - head) / model.num_layers)

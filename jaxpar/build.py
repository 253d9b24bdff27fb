"""The composition root: the only place where a string of the config becomes a callable."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpar.checkpoint.store import CheckpointStore
from jaxpar.config.checks import layout_of
from jaxpar.config.depth import schedule_of
from jaxpar.config.layout import Layout
from jaxpar.config.moe import MoeConfig
from jaxpar.config.run import RunConfig
from jaxpar.core.protocols import Model
from jaxpar.core.typing import Array
from jaxpar.data.cache import Progress
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.sources import Split
from jaxpar.mesh.build import Device, build_mesh
from jaxpar.models.init import init_params, param_names, param_shapes
from jaxpar.models.transformer import Transformer
from jaxpar.ops.attention import AttentionSpec, choose_kernel
from jaxpar.optim.build import build_optimizer, clip_factor
from jaxpar.optim.schedule import learning_rate
from jaxpar.parallel.context.select import select
from jaxpar.parallel.ctx import AttendFn, DispatchFn
from jaxpar.parallel.dispatch.all_to_all import all_to_all
from jaxpar.parallel.dispatch.local import Local
from jaxpar.parallel.dispatch.ragged import Ragged
from jaxpar.parallel.forward import Forward
from jaxpar.parallel.lint import check_reductions
from jaxpar.parallel.vocab import LossSpec
from jaxpar.schedule.lower import lower
from jaxpar.schedule.ticks import TickTable
from jaxpar.step.eval_step import make_eval_step
from jaxpar.step.feed import Feed
from jaxpar.step.natural import NaturalOrder
from jaxpar.step.placement import Placement, place
from jaxpar.step.sample_step import SampleFn, make_sample_step
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import make_train_step


@dataclass
class Parts:
    """Everything a run is made of, to look at or to call; `build` takes a model and an optimizer of your own.

    `learning_rate` (of the number of updates done) may be replaced before `fit`. Data, steps and checkpoints are made when first asked
    for; `train_step`, `eval_step` and `sample_step` are jitted functions of `step.*`.
    """

    config: RunConfig
    layout: Layout
    mesh: Mesh
    model: Model
    forward: Forward
    placement: Placement
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[Array], Array]
    feed: Feed
    attention: str  # which kernel runs, in words
    progress: Progress | None = None  # told the source and the tokens so far while text is tokenised

    @property
    def run_dir(self) -> Path:
        """Where config, metrics and checkpoints go."""
        return Path(self.config.run.dir or f"runs/{self.config.name}")

    @cached_property
    def init_state(self) -> Callable[[], TrainState]:
        """Makes the state at step 0, sharded from the start."""
        return jax.jit(self._initial, out_shardings=self.placement.state_shardings)

    def _initial(self) -> TrainState:
        stages = self.layout.stages
        params = init_params(self.model, self.config.seed, self.config.param_dtype, stages and stages.layer_of_row)
        return TrainState(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    @cached_property
    def train_step(self) -> jax.stages.Wrapped:
        """jit of the pure step; the state is donated."""
        max_norm = self.config.optimizer.max_grad_norm
        clip = partial(clip_factor, max_norm=max_norm) if max_norm else jnp.ones_like
        halt = self.config.train.on_nonfinite == "stop"
        step = make_train_step(
            self.forward, self.placement, self.optimizer, self.learning_rate, clip, self.config.seed, halt_on_nonfinite=halt
        )
        return jax.jit(step, donate_argnums=0, out_shardings=(self.placement.state_shardings, self.placement.replicated))

    @cached_property
    def eval_step(self) -> jax.stages.Wrapped:
        """jit of (params, batch) -> (sums, weights) of every term."""
        return jax.jit(make_eval_step(self.forward, self.placement))

    @cached_property
    def sample_step(self) -> SampleFn:
        """jit of the sampler; `train.sample` is the friendlier form."""
        dispatch = self.forward.dispatch
        if isinstance(dispatch, Ragged):  # all rows have one prompt, and so the same experts: far from balanced
            dispatch = replace(dispatch, buffer_factor=None)
        forward = replace(self.forward, dispatch=dispatch)
        return jax.jit(make_sample_step(forward, self.placement, jnp.asarray(self.feed.order), self.config.seed))

    @cached_property
    def train_data(self) -> Dataset:
        """Any row of any step; text is tokenised here, once, and kept under the run folder."""
        return self._open("train")

    @cached_property
    def eval_data(self) -> Dataset:
        """The held-out set."""
        return self._open("eval")

    def _open(self, split: Split) -> Dataset:
        c = self.config
        cache_dir = self.run_dir / "data_index"
        return open_dataset(c.data, seed=c.seed, vocab_size=c.model.vocab_size, split=split, cache_dir=cache_dir, progress=self.progress)

    @cached_property
    def natural(self) -> NaturalOrder:
        """Between the state of the run and that of its checkpoints."""
        return NaturalOrder(self.placement)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        """What is saved of this run."""
        return CheckpointStore(self.run_dir / "checkpoints", self.config.checkpoint)


def build(
    config: RunConfig,
    *,
    model: Model | None = None,
    optimizer: optax.GradientTransformation | None = None,
    devices: list[Device] | None = None,
) -> Parts:
    """Parts of a run on these devices (default: all). model, optimizer: of your own, in place of what the config names.

    An optimizer gives the direction d of p - lr d: no learning rate and no minus sign in it (optax's `scale_by_*` rules are such).
    A model of your own is traced once more, abstractly: a reduction that it forgets is an error that names the dim.
    Raises ValueError with everything that does not fit, before any array is made.
    """
    if jax.dtypes.canonicalize_dtype(config.param_dtype).name != config.param_dtype:
        raise ValueError(f"param_dtype: {config.param_dtype} needs 64-bit types: call jaxpar.prepare_devices(config) before jaxpar.build")
    devices = jax.devices() if devices is None else devices
    layout = layout_of(config, len(devices))
    mesh = build_mesh(layout, devices)
    own, model = model is not None, Transformer(config.model) if model is None else model
    attend, attention = build_attention(config, layout, devices[0].platform)
    optimizer = build_optimizer(config.optimizer, config.train.steps, param_names(model)) if optimizer is None else optimizer
    stages = layout.stages
    if stages is not None and sum(stages.layers_per_stage) != model.num_layers:
        text = f"model.num_layers: {config.model.num_blocks} repeating blocks in the config, {model.num_layers} in the model"
        raise ValueError(f"{text}; a pipeline divides the blocks by the config: set model.num_layers={model.num_layers}")
    shapes = param_shapes(model, config.param_dtype, stages and stages.layer_of_row)
    placement = place(layout, mesh, param_names(model), shapes, optimizer)
    ticks = None if stages is None else build_ticks(config, stages.shape.num_stages)
    forward = Forward(
        model=model,
        layout=layout,
        plans=placement.plans,
        attend=attend,
        dispatch=build_dispatch(config.model.moe, devices[0].platform),
        context_method=config.context.method,
        loss=loss_spec(config, ticks),
        remat=config.remat,
        compute_dtype=jnp.dtype(config.compute_dtype),
        seq_len=config.data.seq_len,
        attention_dropout=config.model.attention_dropout,
        ticks=ticks,
    )
    feed = Feed(layout, mesh, config.context.method, config.data.seq_len, config.data.isolate_documents, config.param_dtype)
    if own:
        check_reductions(forward, mesh, feed.abstract(config.data.global_batch_size, config.num_microbatches))
    rate = learning_rate(config.optimizer, config.train.steps)
    return Parts(config, layout, mesh, model, forward, placement, optimizer, rate, feed, attention)


def loss_spec(config: RunConfig, ticks: TickTable | None) -> LossSpec:
    """The loss of a config; schedules with W want its weight gradient as one product."""
    one_product = ticks is not None and "W" in ticks.kinds
    return LossSpec(config.model.vocab_size, config.loss_chunk_tokens, config.z_loss, config.model.logits_softcap, one_product)


def build_ticks(config: RunConfig, num_stages: int) -> TickTable:
    """What the stages of a pipeline run, tick by tick."""
    return lower(schedule_of(config, num_stages), keep_inputs=config.pipeline.stash == "inputs")


def build_dispatch(moe: MoeConfig | None, platform: str) -> DispatchFn:
    """How tokens travel to experts and back; a model without experts of ours may have some of its own."""
    native = platform != "cpu"
    if moe is None or moe.dispatch == "local":
        return Local(native)
    return Ragged(moe.ragged_buffer_factor, native) if moe.dispatch == "ragged" else all_to_all


def build_attention(config: RunConfig, layout: Layout, platform: str) -> tuple[AttendFn, str]:
    """The attention function of a layout, and which kernel it runs, in words."""
    m = config.model
    spec = AttentionSpec(causal=True, window=m.sliding_window, softcap=m.attention_softcap, dropout=m.attention_dropout)
    dtype = jnp.dtype(config.compute_dtype)
    kernel, words = choose_kernel(config.attention, platform, dtype, m.head_size, spec, segments=config.data.isolate_documents)
    axes = layout.context_axes
    ways = layout.size(axes)
    words = f"{words}, {config.context.method} over context={ways}" if axes else words
    return partial(
        select(config.context.method, ways, staged=layout.stages is not None), kernel=kernel, spec=spec, axis="".join(axes), ways=ways
    ), words

"""Bytes of state and of what weight gradients wait for, from the config alone."""

import math
from dataclasses import dataclass, replace

from jaxpar.config.axes import BATCH_AXES
from jaxpar.config.layout import Layout, plan_leaf
from jaxpar.config.mla import MlaConfig
from jaxpar.config.moe import MoeConfig
from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.config.parameters import Leaf, parameter_table
from jaxpar.config.run import RunConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
MIN_FACTORED = 128  # Adafactor: smaller dims are not factored (optax `scale_by_factored_rms`)


@dataclass(frozen=True)
class StateBytes:
    """Bytes a device holds between steps (parameters, optimizer) and at the end of the backward pass (gradients)."""

    parameters: int
    gradients: int
    optimizer: int
    replicated: tuple[Leaf, ...]  # leaves that ZeRO cannot shard: norms, biases

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes_per_device(config: RunConfig, layout: Layout) -> StateBytes:
    """Exact bytes of parameters, gradient accumulators and optimizer state on one device.

    Each leaf: elements / (axes of its dims) and, from ZeRO stage 1 (optimizer), 2 (gradients), 3 (parameters) on, also / (data x
    expert x context) where a free dim divides (experts: data x context, for `expert` splits them), and / pipe what is not stacked over
    layers. A pipeline of uneven depth stores rows that belong to no layer: they count. Its gradients of embedding and head are whole
    while microbatches pass, whatever the stage: that is working memory, and does not. Gradients and moments have the parameters' dtype
    (Rajbhandari et al. 2020, section 5).
    """
    width = DTYPE_BYTES[config.param_dtype]
    totals = {"parameters": 0, "gradients": 0, "optimizer": 0}
    from_stage = {"optimizer": 1, "gradients": 2, "parameters": 3}
    replicated = []
    for leaf in parameter_table(config.model):
        leaf = replace(leaf, shape=layout.stored_shape(leaf.names, leaf.shape))
        plan = plan_leaf(layout, leaf.path, leaf.names, leaf.shape)
        if plan.zero_dim is None and (layout.free_zero_axes(plan.axes) or (layout.pipe_axes and "layers" not in leaf.names)):
            replicated.append(leaf)
        for kind in totals:
            spec = plan.spec(sharded=layout.zero_stage >= from_stage[kind])
            shape = tuple(size // layout.size(axes) for size, axes in zip(leaf.shape, spec, strict=True))
            elements = optimizer_elements(config.optimizer, leaf, math.prod(shape)) if kind == "optimizer" else math.prod(shape)
            totals[kind] += width * elements
    return StateBytes(**totals, replicated=tuple(replicated))


def optimizer_elements(optimizer: OptimizerConfig, leaf: Leaf, local: int) -> int:
    """Floats of optimizer state beside `local` elements of a parameter (a few scalars of the whole chain left out).

    AdamW two moments, Lion one, SGD one with momentum. Muon one on matrices, else Adam's two. Adafactor, a layer at a time:
    rows and columns of the two largest dims where both reach 128, on every device whole; else one moment.
    """
    if optimizer.name == "muon":
        return local * (1 if leaf.path.endswith(".kernel") and "vocab" not in leaf.names else 2)
    if optimizer.name == "adafactor":
        layers = leaf.shape[0] if leaf.names[0] == "layers" else 1
        dims = sorted(leaf.shape[1:] if leaf.names[0] == "layers" else leaf.shape)
        if len(dims) >= 2 and dims[-2] >= MIN_FACTORED:
            one = math.prod(dims)
            return layers * (one // dims[-1] + one // dims[-2] + 1)  # optax keeps one element for each part not used
        return local + 2 * layers
    return local * {"adamw": 2, "lion": 1, "sgd": 1 if optimizer.momentum else 0}[optimizer.name]


def operand_bytes(config: RunConfig) -> float:
    """Inputs and output gradients of a block's matrices for one microbatch on one device, in the dtype of the computation.

    Those of width embed_dim are whole on every device of `tensor`. An axis of unknown size (-1) counts as 1. Of a layer with experts,
    approximate: full buffers, and the router as if it computed in the same dtype.
    """
    model = config.model
    every = model.moe.every if model.moe else 1
    numbers = (every - 1 if model.moe else 1) * _layer_operands(config, model.mlp_dim)
    if model.moe is not None:
        numbers += _moe_layer_operands(config, model.moe)
    return DTYPE_BYTES[config.compute_dtype] * numbers * _microbatch_tokens(config)


def _layer_operands(config: RunConfig, *widths: int) -> float:
    """Numbers a token: attention, and feed-forward layers of these widths beside each other, which share their input."""
    model = config.model
    attention = _attention_operands(config) if model.mla is None else _latent_attention_operands(config, model.mla)
    return attention + model.embed_dim + sum(model.embed_dim + _hidden(config, width) for width in widths)


def _attention_operands(config: RunConfig) -> float:
    model, tensor = config.model, max(config.mesh.tensor, 1)
    kv_heads = model.kv_heads if model.kv_heads % tensor else model.kv_heads / tensor
    return 2 * model.embed_dim + 2 * model.num_heads * model.head_size / tensor + 2 * kv_heads * model.head_size


def _latent_attention_operands(config: RunConfig, mla: MlaConfig) -> float:
    """Those of the down maps are of a device's own tokens at a block boundary, those of the up maps of all that its heads work on."""
    embed, heads = config.model.embed_dim, config.model.num_heads / max(config.mesh.tensor, 1)
    own = max(config.mesh.tensor, 1) if config.sequence_parallel else 1
    rank, latents = mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    boundary = (embed + latents) / own
    inside = mla.kv_lora_rank + (embed if rank is None else rank) + embed
    return boundary + inside + heads * (mla.qk_head_dim + mla.qk_nope_head_dim + 2 * mla.v_head_dim)


def _moe_layer_operands(config: RunConfig, moe: MoeConfig) -> float:
    model = config.model
    shared = [moe.shared_experts * model.expert_dim] if moe.shared_experts else []
    numbers = _layer_operands(config, *shared, *([model.mlp_dim] if moe.residual else []))
    numbers += moe.num_experts + moe.shared_gate + 2 * moe.residual
    return numbers + buffer_rows_per_token(moe) * (2 * model.embed_dim + _hidden(config, model.expert_dim))


def _hidden(config: RunConfig, width: int) -> float:
    """Numbers of the hidden width: gradients of gate and up, input of down."""
    return (3 if config.model.activation == "swiglu" else 2) * width / max(config.mesh.tensor, 1)


def buffer_rows_per_token(moe: MoeConfig) -> float:
    """Rows of the experts' buffers on a device / its tokens. Rounding up of a capacity, min_capacity and padding are left out."""
    if moe.dispatch == "ragged":
        return moe.mean_choices * moe.ragged_buffer_factor
    if moe.dispatch == "local":  # sorted choices, those that are dropped among them
        return moe.mean_choices
    return moe.num_experts if moe.capacity_factor is None else min(moe.top_k * moe.capacity_factor, moe.num_experts)


def head_operand_bytes(config: RunConfig) -> float:
    """The same of the output head. Gradients of logits in one chunk (`loss_chunk_tokens`) are float32 at least."""
    width, tokens = DTYPE_BYTES[config.compute_dtype], _microbatch_tokens(config)
    chunk = min(config.loss_chunk_tokens, tokens)
    logit = max(width, DTYPE_BYTES["float32"]) if chunk == tokens else width
    columns = config.model.padded_vocab_size / max(config.mesh.tensor, 1)
    return (width * config.model.embed_dim + logit * columns) * math.ceil(tokens / chunk) * chunk  # the last chunk is filled up


def _microbatch_tokens(config: RunConfig) -> float:
    """Tokens of a microbatch on one device."""
    ways = math.prod(max(config.mesh.sizes[axis], 1) for axis in (*BATCH_AXES, "context"))
    return config.data.global_batch_size * config.data.seq_len / config.num_microbatches / ways

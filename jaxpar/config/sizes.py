"""Parameters, FLOPs, bytes of state and of what weight gradients wait for, from the config alone.

FLOP convention: 2 a multiply-add, matrix products only (no embedding lookup, norms, softmax, recomputation, padded
vocabulary); training is 3 x the forward pass (Kaplan et al. 2020, section 2.1; PaLM, appendix B). Attention counts scores and
weighted sum, 2 products of seq_len x head_dim a head; `causal` counts the half that a causal mask keeps.
"""

import math
from dataclasses import dataclass, replace

from jaxpar.config.axes import BATCH_AXES
from jaxpar.config.layout import Layout, plan_leaf
from jaxpar.config.model import ModelConfig
from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.config.run import RunConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
MIN_FACTORED = 128  # Adafactor: smaller dims are not factored (optax `scale_by_factored_rms`)


@dataclass(frozen=True)
class Leaf:
    """One parameter: its path in the tree, dim names and global shape."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameter_table(model: ModelConfig) -> list[Leaf]:
    """Every parameter in the tree's order; blocks are stacked on a leading `layers` dim. The vocabulary is as stored (padded)."""
    if model.positions == "learned" and model.max_positions is None:
        raise ValueError("model.max_positions: required with positions: learned")
    dims = {
        "layers": model.num_layers,
        "vocab": model.padded_vocab_size,
        "embed": model.embed_dim,
        "heads": model.num_heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "mlp": model.mlp_dim,
        "positions": model.max_positions or 0,
    }
    rows: list[tuple[str, tuple[str, ...]]] = [("embed.tokens.table", ("vocab", "embed"))]
    if model.positions == "learned":
        rows.append(("embed.positions.table", ("positions", "embed")))
    rows += [(f"blocks.{path}", ("layers", *names)) for path, names in _block_rows(model)]
    rows += _norm_rows(model, "head.norm")
    if not model.tied_embeddings:
        rows.append(("head.out.kernel", ("embed", "vocab")))
    return [Leaf(path, names, tuple(dims[name] for name in names)) for path, names in rows]


def _norm_rows(model: ModelConfig, path: str) -> list[tuple[str, tuple[str, ...]]]:
    scale = [(f"{path}.scale", ("embed",))]
    return [*scale, (f"{path}.bias", ("embed",))] if model.norm == "layernorm" else scale


def _block_rows(model: ModelConfig) -> list[tuple[str, tuple[str, ...]]]:
    attention = {
        "query": ("embed", "heads", "head_dim"),
        "key": ("embed", "kv_heads", "head_dim"),
        "value": ("embed", "kv_heads", "head_dim"),
        "out": ("heads", "head_dim", "embed"),
    }
    mlp = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    if model.activation == "swiglu":
        mlp = {"gate": ("embed", "mlp"), **mlp}

    def linear(path: str, names: tuple[str, ...], num_in: int) -> list[tuple[str, tuple[str, ...]]]:
        return [(f"{path}.kernel", names)] + ([(f"{path}.bias", names[num_in:])] if model.bias else [])

    rows = _norm_rows(model, "attention_norm")
    for name, names in attention.items():
        rows += linear(f"attention.{name}", names, 2 if name == "out" else 1)
    if model.qk_norm:
        rows += [("attention.query_norm.scale", ("head_dim",)), ("attention.key_norm.scale", ("head_dim",))]
    rows += _norm_rows(model, "mlp_norm")
    for name, names in mlp.items():
        rows += linear(f"mlp.{name}", names, 1)
    return rows


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the model as published: vocabulary not padded, tied embeddings once."""
    return sum(leaf.size for leaf in parameter_table(model.model_copy(update={"vocab_multiple": 1})))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that a token is multiplied with: kernels, and the output head also when it is the tied table."""
    untied = model.model_copy(update={"vocab_multiple": 1, "tied_embeddings": False})
    return sum(leaf.size for leaf in parameter_table(untied) if leaf.path.endswith(".kernel"))


def forward_flops_per_token(model: ModelConfig, seq_len: int, causal: bool = True) -> int:
    """FLOPs of the forward pass a token: 2 x matmul parameters + layers x 4 x keys x heads x head_dim.

    keys a token sees: seq_len (causal=False, what a kernel without a mask computes), seq_len / 2 (causal), and with a
    sliding window w < seq_len, w - w^2 / (2 seq_len): the area that the mask keeps.
    """
    window = min(model.sliding_window or seq_len, seq_len)
    twice_keys_by_seq = 2 * window * seq_len - window * window if causal else 2 * seq_len * seq_len  # a whole number
    attention = 4 * model.num_layers * model.num_heads * model.head_size * twice_keys_by_seq // (2 * seq_len)
    return 2 * matmul_parameters(model) + attention


def train_flops_per_token(model: ModelConfig, seq_len: int, causal: bool = True) -> int:
    """FLOPs of a training step a token: forward, and twice as much backward. Recomputation (remat) does not count."""
    return 3 * forward_flops_per_token(model, seq_len, causal)


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
    expert x context) where a free dim divides, and / pipe what is not stacked over layers. A pipeline of uneven depth stores rows that
    belong to no layer: they count. Its gradients of embedding and head are whole while microbatches pass, whatever the stage: that is
    working memory, and does not. Gradients and moments have the parameters' dtype (Rajbhandari et al. 2020, section 5).
    """
    width = DTYPE_BYTES[config.param_dtype]
    totals = {"parameters": 0, "gradients": 0, "optimizer": 0}
    from_stage = {"optimizer": 1, "gradients": 2, "parameters": 3}
    replicated = []
    for leaf in parameter_table(config.model):
        leaf = replace(leaf, shape=layout.stored_shape(leaf.names, leaf.shape))
        plan = plan_leaf(layout, leaf.path, leaf.names, leaf.shape)
        if plan.zero_dim is None and (layout.zero_axes or layout.pipe_axes):
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
    """Inputs and output gradients of a layer's matrices for one microbatch on one device, in the dtype of the computation.

    Those of width embed_dim are whole on every device of `tensor`. An axis of unknown size (-1) counts as 1.
    """
    model, tensor = config.model, max(config.mesh.tensor, 1)
    split = 2 * model.num_heads * model.head_size + (3 if model.activation == "swiglu" else 2) * model.mlp_dim
    kv_heads = model.kv_heads if model.kv_heads % tensor else model.kv_heads / tensor
    numbers = 4 * model.embed_dim + split / tensor + 2 * kv_heads * model.head_size
    return DTYPE_BYTES[config.compute_dtype] * numbers * _microbatch_tokens(config)


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

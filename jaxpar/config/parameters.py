"""Every parameter of a model, and how many there are: stored, published, and met by one token."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxpar.config.mla import MlaConfig
from jaxpar.config.model import ModelConfig

Dim = tuple[str, int]  # name, size


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
    """Every parameter; blocks are stacked on a leading `layers` dim. The vocabulary is as stored (padded)."""
    if model.positions == "learned" and model.max_positions is None:
        raise ValueError("model.max_positions: required with positions: learned")
    vocab, embed = ("vocab", model.padded_vocab_size), ("embed", model.embed_dim)
    leaves = [_leaf("embed.tokens.table", vocab, embed)]
    if model.positions == "learned":
        leaves.append(_leaf("embed.positions.table", ("positions", model.max_positions or 0), embed))
    for i in range(model.leading_dense):
        leaves += _under(f"embed.layers.{i}", layer_leaves(model, experts=False))
    leaves += [Leaf(f"blocks.{leaf.path}", ("layers", *leaf.names), (model.num_blocks, *leaf.shape)) for leaf in block_leaves(model)]
    leaves += _norm(model, "head.norm")
    if not model.tied_embeddings:
        leaves.append(_leaf("head.out.kernel", embed, vocab))
    return leaves


def block_leaves(model: ModelConfig) -> list[Leaf]:
    """Parameters of one block: of its only layer, or of `layers.0`, `layers.1`, ... of which the last has the experts."""
    if model.moe is None or model.moe.every == 1:
        return layer_leaves(model, experts=model.moe is not None)
    last = model.moe.every - 1
    return [leaf for i in range(last + 1) for leaf in _under(f"layers.{i}", layer_leaves(model, experts=i == last))]


def layer_leaves(model: ModelConfig, *, experts: bool) -> list[Leaf]:
    """Parameters of one layer, with experts or dense."""
    attention = _attention(model) if model.mla is None else _latent_attention(model, model.mla)
    leaves = _norm(model, "attention_norm") + attention + _norm(model, "mlp_norm")
    return leaves + (_moe(model) if experts else _mlp(model, "mlp", model.mlp_dim, model.bias))


def _attention(model: ModelConfig) -> list[Leaf]:
    embed, head_dim = [("embed", model.embed_dim)], ("head_dim", model.head_size)
    heads, kv_heads = [("heads", model.num_heads), head_dim], [("kv_heads", model.kv_heads), head_dim]
    leaves = []
    for name, inputs, outputs in [("query", embed, heads), ("key", embed, kv_heads), ("value", embed, kv_heads), ("out", heads, embed)]:
        leaves += _linear(f"attention.{name}", inputs, outputs, model.bias)
    if model.qk_norm:
        leaves += [_leaf("attention.query_norm.scale", head_dim), _leaf("attention.key_norm.scale", head_dim)]
    return leaves


def _latent_attention(model: ModelConfig, mla: MlaConfig) -> list[Leaf]:
    embed = ("embed", model.embed_dim)

    def heads(width: int) -> list[Dim]:
        return [("heads", model.num_heads), ("head_dim", width)]

    def latent(width: int) -> Dim:
        return ("latent", width)

    rank, kv_rank, queries = mla.q_lora_rank, mla.kv_lora_rank, heads(mla.qk_head_dim)
    down = []
    if rank is not None:
        down = [_leaf("attention.q_down.kernel", embed, latent(rank)), _leaf("attention.q_norm.scale", latent(rank))]
    return [
        *down,
        _leaf("attention.q_up.kernel", embed if rank is None else latent(rank), *queries),
        _leaf("attention.kv_down.kernel", embed, latent(kv_rank + mla.qk_rope_head_dim)),
        _leaf("attention.kv_norm.scale", latent(kv_rank)),
        _leaf("attention.kv_up.kernel", latent(kv_rank), *heads(mla.qk_nope_head_dim + mla.v_head_dim)),
        _leaf("attention.out.kernel", *heads(mla.v_head_dim), embed),
    ]


def _mlp(model: ModelConfig, path: str, width: int, bias: bool) -> list[Leaf]:
    return [leaf for name, inputs, outputs in _maps(model, width) for leaf in _linear(f"{path}.{name}", [inputs], [outputs], bias)]


def _maps(model: ModelConfig, width: int) -> list[tuple[str, Dim, Dim]]:
    """(name, input, output) of the linear maps of a feed-forward layer or an expert."""
    embed, mlp = ("embed", model.embed_dim), ("mlp", width)
    gate = [("gate", embed, mlp)] if model.activation == "swiglu" else []
    return [*gate, ("up", embed, mlp), ("down", mlp, embed)]


def _moe(model: ModelConfig) -> list[Leaf]:
    """None of its maps has a bias, whatever model.bias says."""
    moe, embed, width = model.moe, ("embed", model.embed_dim), model.expert_dim
    assert moe is not None
    experts, router = ("experts", moe.num_experts), ("router", moe.num_experts)
    leaves = [_leaf("moe.router.kernel", embed, router)] if moe.learns else []
    if moe.has_bias:
        leaves.append(_leaf("moe.router.bias", router))
    if moe.keeps_load:
        leaves.append(_leaf("moe.router.last_load", router))
    leaves += [_leaf(f"moe.experts.{name}.kernel", experts, inputs, outputs) for name, inputs, outputs in _maps(model, width)]
    if moe.shared_experts:
        leaves += _mlp(model, "moe.shared", moe.shared_experts * width, bias=False)
    if moe.shared_gate:
        leaves.append(_leaf("moe.shared_gate.kernel", embed, ("router", 1)))
    if moe.residual:
        leaves += _mlp(model, "moe.residual", model.mlp_dim, bias=False)
        leaves.append(_leaf("moe.residual_mix.kernel", embed, ("router", 2)))
    return leaves


def _norm(model: ModelConfig, path: str) -> list[Leaf]:
    embed = ("embed", model.embed_dim)
    scale = _leaf(f"{path}.scale", embed)
    return [scale, _leaf(f"{path}.bias", embed)] if model.norm == "layernorm" else [scale]


def _linear(path: str, inputs: list[Dim], outputs: list[Dim], bias: bool) -> list[Leaf]:
    kernel = _leaf(f"{path}.kernel", *inputs, *outputs)
    return [kernel, _leaf(f"{path}.bias", *outputs)] if bias else [kernel]


def _leaf(path: str, *dims: Dim) -> Leaf:
    return Leaf(path, tuple(name for name, _ in dims), tuple(size for _, size in dims))


def _under(path: str, leaves: Iterable[Leaf]) -> list[Leaf]:
    return [replace(leaf, path=f"{path}.{leaf.path}") for leaf in leaves]


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the model as published: vocabulary not padded, tied embeddings once, all experts, no counters."""
    return sum(leaf.size for leaf in _published(model))


def active_parameter_count(model: ModelConfig) -> int:
    """Of `parameter_count`, those that one token meets: top_k experts in place of all (expert_choice: on average)."""
    return sum(active_size(model, leaf) for leaf in _published(model))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that a token is multiplied with: kernels (of top_k experts), and the output head also when it is the tied table."""
    untied = model.model_copy(update={"tied_embeddings": False})
    return sum(active_size(model, leaf) for leaf in _published(untied) if leaf.path.endswith(".kernel"))


def active_size(model: ModelConfig, leaf: Leaf) -> int:
    """Elements of a parameter that one token meets."""
    return leaf.size // model.moe.num_experts * model.moe.top_k if model.moe and "experts" in leaf.names else leaf.size


def _published(model: ModelConfig) -> list[Leaf]:
    table = parameter_table(model.model_copy(update={"vocab_multiple": 1}))
    return [leaf for leaf in table if not leaf.path.endswith(".last_load")]  # what the last step counted, kept beside the parameters

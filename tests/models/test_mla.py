"""Latent attention against equations written out from DeepSeek's papers, in their column order; what its tensor parallelism moves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.build import Parts
from jaxpar.config.mla import MlaConfig
from jaxpar.mesh.specs import batch_spec
from jaxpar.models.init import is_spec
from jaxpar.models.mla import LatentAttention
from jaxpar.models.nnx_model import Part
from tests.equivalence.harness import FLOAT32, config, packed_rows, parts_of
from tests.programs import Collective, collectives

HEADS, EMBED, ROWS, SEQ = 4, 20, 6, 24
Weights = dict[str, Any]

WIDTHS: dict[str, dict[str, int | None]] = {
    "v narrower": {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    "v as wide": {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    "no latent of queries": {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 6, "v_head_dim": 6},
}


@dataclass(frozen=True)
class Rules:
    """What the reference does; a change makes a wrong one."""

    scale_by: str = "nope + rope"
    norms: tuple[str, ...] = ("q_norm", "kv_norm")
    interleaved: bool = True
    theta: float = 10_000.0
    shared_key: bool = True
    value_from: int = 0  # where a head's values begin after its keys


def reference(w: Weights, x_bSD: Any, positions_bS: Any, segments_bS: Any, mla: MlaConfig, rules: Rules) -> Any:
    """DeepSeek-V2, equations 9-19 (V3: 1-11), a head at a time, with the weights of a DeepSeek checkpoint."""
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank

    def norm(name: str, c: Any) -> Any:
        size = jnp.sqrt(jnp.mean(c * c, axis=-1, keepdims=True) + 1e-5)
        return (c / size if name in rules.norms else c) * w[name]["scale"]

    def turn(x_bSR: Any) -> Any:
        phase_bSk = jnp.asarray(positions_bS[..., None] * rules.theta ** (-2 * np.arange(rope // 2) / rope))
        even, odd = (x_bSR[..., 0::2], x_bSR[..., 1::2]) if rules.interleaved else jnp.split(x_bSR, 2, axis=-1)
        turned = jax.lax.complex(even, odd) * jax.lax.complex(jnp.cos(phase_bSk), jnp.sin(phase_bSk))
        return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x_bSR.shape)

    down_bSL = x_bSD @ w["kv_down"]["kernel"]
    c_kv, k_rope = norm("kv_norm", down_bSL[..., :rank]), turn(down_bSL[..., rank:])
    c_q = x_bSD if mla.q_lora_rank is None else norm("q_norm", x_bSD @ w["q_down"]["kernel"])
    sees_bST = (segments_bS[:, :, None] == segments_bS[:, None, :]) & (segments_bS != 0)[:, None, :]
    sees_bST = sees_bST & (np.arange(x_bSD.shape[1])[:, None] >= np.arange(x_bSD.shape[1])[None, :])
    out = jnp.zeros_like(x_bSD)
    for head in range(HEADS):
        q, kv = c_q @ w["q_up"]["kernel"][:, head], c_kv @ w["kv_up"]["kernel"][:, head]
        key_rope = k_rope if rules.shared_key else k_rope * (1 + head)
        scores = q[..., :nope] @ kv[..., :nope].swapaxes(1, 2) + turn(q[..., nope:]) @ key_rope.swapaxes(1, 2)
        e = jnp.where(sees_bST, jnp.exp(scores / np.sqrt(nope + rope if rules.scale_by == "nope + rope" else nope)), 0.0)
        total = jnp.sum(e, axis=-1, keepdims=True)
        values = kv[..., nope:] if rules.value_from == 0 else jnp.roll(kv, rules.value_from, axis=-1)[..., nope:]
        out += (e / jnp.where(total == 0, 1.0, total)) @ values @ w["out"]["kernel"][head]
    return out


def as_deepseek(w: Weights, mla: MlaConfig) -> Weights:
    """Our weights in the order of a DeepSeek checkpoint: rotary pairs side by side."""
    half = mla.qk_rope_head_dim // 2

    def pairs(kernel: Any, start: int) -> Any:
        rotary = kernel[..., start:]
        mixed = jnp.stack([rotary[..., :half], rotary[..., half:]], axis=-1).reshape(rotary.shape)
        return jnp.concatenate([kernel[..., :start], mixed], axis=-1)

    starts = {"q_up": mla.qk_nope_head_dim, "kv_down": mla.kv_lora_rank}
    return w | {name: {"kernel": pairs(w[name]["kernel"], start)} for name, start in starts.items()}


def parts(mla: Mapping[str, Any], *changes: Mapping[str, Any]) -> Parts:
    model = {"num_layers": 1, "embed_dim": EMBED, "num_heads": HEADS, "mla": mla}
    return parts_of(config({"model": model, "data": {"seq_len": SEQ, "global_batch_size": ROWS}}, *changes))


def random_weights(specs: Any) -> Weights:
    """Large enough that attention is far from even; norm scales are not 1."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda spec: rng.standard_normal(spec.shape) * 2 / spec.shape[0] ** 0.5, specs, is_leaf=is_spec)


def pulled(layer: Callable[[Weights, Any], Any], w: Weights) -> dict[str, np.ndarray]:
    """The layer's output, and the gradients of a random projection of it, by name."""
    x_bSD, project_bSD = np.random.default_rng(6).standard_normal((2, ROWS, SEQ, EMBED))
    out, pull = jax.vjp(jax.jit(layer), w, jnp.asarray(x_bSD))
    leaves = jax.tree_util.tree_leaves_with_path({"out": out, "gradients": pull(jnp.asarray(project_bSD))})
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def layer_of(widths: str, kernel: str) -> tuple[Parts, Part, dict[str, np.ndarray]]:
    p = parts(WIDTHS[widths], {"attention": kernel})
    return p, Part(LatentAttention(p.config.model)), packed_rows(ROWS, SEQ, 50)


@cache
def ours(widths: str, kernel: str) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        p, part, rows = layer_of(widths, kernel)
        ctx = p.forward.context(jax.tree.map(jnp.asarray, rows), None)
        return pulled(lambda w, x_bSD: part.bind(w)(x_bSD, ctx), random_weights(part.specs))


@cache
def theirs(widths: str, rules: Rules) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        p, part, rows = layer_of(widths, "reference")
        mla = p.config.model.mla
        assert mla is not None

        def layer(w: Weights, x_bSD: Any) -> Any:
            return reference(as_deepseek(w, mla), x_bSD, rows["positions"], rows["segments"], mla, rules)

        return pulled(layer, random_weights(part.specs))


def worst(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    """Largest relative L2 error over the output and all gradients."""
    assert got.keys() == want.keys()
    assert all(np.linalg.norm(leaf) > 0 for leaf in want.values())
    return max(float(np.linalg.norm(got[name] - leaf) / np.linalg.norm(leaf)) for name, leaf in want.items())


@pytest.mark.parametrize("kernel", ["reference", "xla"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_layer_and_its_gradients_equal_the_papers(widths: str, kernel: str) -> None:
    assert worst(ours(widths, kernel), theirs(widths, Rules())) < 1e-12


WRONG = {
    "scale": Rules(scale_by="nope"),
    "no norm of queries": Rules(norms=("kv_norm",)),
    "no norm of keys and values": Rules(norms=("q_norm",)),
    "pairs": Rules(interleaved=False),
    "angles": Rules(theta=10_100.0),
    "a rotary key for each head": Rules(shared_key=False),
    "columns of values": Rules(value_from=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_gate_notices_a_wrong_rule(name: str) -> None:
    assert worst(ours("v narrower", "reference"), theirs("v narrower", WRONG[name])) > 1e-6


# Tensor parallelism.


def gathered(p: Parts) -> tuple[int, int]:
    """(arrays, bytes) that all-gathers over `tensor` make in the forward pass."""
    specs, placement = batch_spec(p.layout, microbatched=False), p.placement
    batch = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in p.feed.abstract(ROWS, 1).items()}
    mapped = jax.shard_map(
        p.forward.logits,
        mesh=placement.mesh,
        in_specs=(placement.param_specs, {name: specs[name] for name in batch}),
        out_specs=P(None, None, p.layout.split("vocab") or None),
    )
    arrays, moved = collectives(jax.jit(mapped).trace(placement.shapes, batch).jaxpr.jaxpr)
    key = Collective("all_gather", ("tensor",))
    return arrays[key], moved[key]


@pytest.mark.parametrize("rank", [14, None])
def test_latents_enter_and_not_the_tokens(rank: int | None) -> None:
    """With a latent of queries a layer gathers only latents for its attention, in one message; beside it the MLP's input and the head's."""
    p = parts(WIDTHS["v narrower"] | {"q_lora_rank": rank}, {"mesh": {"tensor": 2}, "zero_stage": 0}, FLOAT32)
    kv_and_key = 10 + 4
    numbers = kv_and_key + (EMBED if rank is None else rank) + 2 * EMBED
    assert gathered(p) == (4 if rank is None else 3, ROWS * SEQ * numbers * 4)

"""A model that forgets a reduction is told which dim, at build, with and without sequence parallelism."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jaxpar.build import Parts
from jaxpar.config.model import ModelConfig
from jaxpar.core.protocols import Context
from jaxpar.core.typing import Array, Terms
from jaxpar.models.attention import Attention
from jaxpar.models.layers import Linear
from jaxpar.models.mlp import Mlp
from jaxpar.models.transformer import Embedding, Head, Layer, Transformer
from jaxpar.parallel.lint import ReductionError, check_reductions, split_dims
from tests.equivalence import harness

SIZES = {"model": {"num_layers": 2, "num_kv_heads": 4, "vocab_size": 64}} | harness.FLOAT32
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MESH = {"mesh": {"data": 2, "context": 2, "tensor": 2}}


class MlpWithoutLeave(Mlp):
    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        return self.down(jax.nn.relu(self.up(ctx.enter(x_bSD, "mlp"))))


class MlpWithoutEnter(Mlp):
    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        return ctx.leave(self.down(jax.nn.relu(self.up(x_bSD))), "mlp")


class MlpWithNeither(Mlp):
    """Under sequence parallelism every shape fits, and the step would train on wrong numbers."""

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:  # noqa: ARG002
        return self.down(jax.nn.relu(self.up(x_bSD)))


class MlpInALoop(Mlp):
    """Two steps of one residual map: the partial sum meets the loop's carry, not the block's output."""

    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        def step(y_bSD: Array, _: None) -> tuple[Array, None]:
            return y_bSD + self.down(jax.nn.relu(self.up(ctx.enter(y_bSD, "mlp")))), None

        return lax.scan(step, x_bSD, None, length=2)[0]


class AttentionWithoutLeave(Attention):
    def __call__(self, x_bSD: Array, ctx: Context) -> Array:
        x_bSD = ctx.enter(x_bSD, "heads")
        return self.out(ctx.attend(self.query(x_bSD), self.key(x_bSD), self.value(x_bSD)))


class EmbeddingOfItsOwn(Embedding):
    def __call__(self, tokens_bS: Array, ctx: Context) -> Array:
        return ctx.at_block_boundary(self.tokens.rows(tokens_bS))


class LossOfItsOwn(Head):
    """The log-sum-exp of this device's columns only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.out = Linear({"embed": config.embed_dim}, {"vocab": config.padded_vocab_size}, std=0.02)

    def __call__(self, x_bSD: Array, targets_bS: Array, weights_bS: Array, embed: Embedding, ctx: Context) -> Terms:  # noqa: ARG002
        assert self.out is not None
        lse_bS = jax.nn.logsumexp(self.out(ctx.enter(self.norm(x_bSD), "vocab")), axis=-1)
        return {"loss": (jnp.sum(lse_bS * weights_bS), jnp.sum(weights_bS))}


def block_with(name: str, part: Callable[[ModelConfig], nnx.Module]) -> type[Layer]:
    class Changed(Layer):
        def __init__(self, config: ModelConfig) -> None:
            super().__init__(config)
            setattr(self, name, part(config))

    return Changed


class BlockWithoutEither(Layer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.attention, self.mlp = AttentionWithoutLeave(config), MlpWithoutLeave(config)


class Model(Transformer):
    """The transformer with one part exchanged."""

    def __init__(self, config: ModelConfig, *, embed: type = Embedding, block: type = Layer, head: type = Head) -> None:
        super(Transformer, self).__init__(embed=embed(config), block=block(config), head=head(config), num_layers=config.num_layers)
        self.config = config


def built(*changes: dict, **parts: type) -> Parts:
    run = harness.config(SIZES, *changes)
    return harness.parts_of(run, Model(run.model, **parts))


WRONG = [
    (
        {"block": block_with("mlp", MlpWithoutLeave)},
        [r"block: dim 'mlp' is split over mesh axis 'tensor'.*ctx\.leave\(y, 'mlp'\) is missing"],
    ),
    (
        {"block": block_with("mlp", MlpWithNeither)},
        [r"block: dim 'mlp' is split over mesh axis 'tensor'.*ctx\.leave\(y, 'mlp'\) is missing"],
    ),
    ({"block": block_with("mlp", MlpWithoutEnter)}, [r"block: ctx\.leave\(y, 'mlp'\) without ctx\.enter\(x, 'mlp'\)"]),
    (
        {"block": block_with("mlp", MlpInALoop)},
        [r"dim 'mlp' is split over mesh axis 'tensor'.*ctx\.leave\(y, 'mlp'\) is missing inside a loop"],
    ),
    (
        {"block": block_with("attention", AttentionWithoutLeave)},
        [r"block: dim 'heads' is split over mesh axis 'tensor'.*ctx\.leave\(y, 'heads'\)"],
    ),
    ({"block": BlockWithoutEither}, [r"block: dim 'heads' is split.*", r"block: dim 'mlp' is split.*"]),
    ({"embed": EmbeddingOfItsOwn}, [r"embed: dim 'vocab' is split over mesh axis 'tensor'.*ctx\.embed"]),
    ({"head": LossOfItsOwn}, [r"head: dim 'vocab' is split over mesh axis 'tensor'.*term 'loss' is a partial sum; ctx\.cross_entropy"]),
]


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("parts", "lines"), WRONG, ids=lambda value: "-".join(t.__name__ for t in value.values()) if isinstance(value, dict) else ""
)
def test_forgotten_reduction_is_named(parts: dict[str, type], lines: list[str], sequence_parallel: bool) -> None:
    with pytest.raises(ReductionError) as caught:
        built(MESH, {"sequence_parallel": sequence_parallel}, **parts)
    found = str(caught.value).splitlines()
    assert len(found) == len(lines)
    for text, pattern in zip(found, lines, strict=True):
        assert re.search(pattern, text), text


@pytest.mark.parametrize(("parts", "lines"), WRONG, ids=lambda _: "")
def test_on_one_device_nothing_is_forgotten(parts: dict[str, type], lines: list[str]) -> None:  # noqa: ARG001
    built(harness.ONE_DEVICE, **parts)
    built({"mesh": {"data": 8}}, **parts)


RIGHT = [
    MESH,
    {"mesh": {"data": 1, "tensor": 8}, "model": {"num_kv_heads": 2}},
    {"mesh": {"data": 2, "tensor": 4}, "sequence_parallel": False, "zero_stage": 3, "num_microbatches": 2},
    MESH
    | {"context": {"method": "ulysses"}, "model": {"tied_embeddings": True, "positions": "learned", "max_positions": 32, "bias": True}},
    MESH | {"context": {"method": "all_gather"}, "z_loss": 1e-3, "model": {"norm": "layernorm", "activation": "gelu", "dropout": 0.1}},
    MESH | {"model": {"num_kv_heads": None, "mla": LATENT}},
    MESH | {"model": {"num_kv_heads": None, "mla": LATENT | {"q_lora_rank": None}}, "sequence_parallel": False},
    {"mesh": {"data": 4, "tensor": 2}, "rules": {"mlp": None, "vocab": None}, "sequence_parallel": False},
]


@pytest.mark.parametrize("change", RIGHT)
def test_transformer_passes(change: dict) -> None:
    parts = built(change)
    assert split_dims(parts.forward)
    check_reductions(parts.forward, parts.mesh, parts.feed.abstract(16, parts.config.num_microbatches))


def test_a_mistake_of_another_kind_stays_itself() -> None:
    class Broken(Mlp):
        def __call__(self, x_bSD: Array, ctx: Context) -> Array:
            return ctx.leave(self.down.product(self.up(ctx.enter(x_bSD, "mlp"))[..., 1:]), "mlp")

    with pytest.raises(TypeError, match="contract"):
        built(MESH, block=block_with("mlp", Broken))

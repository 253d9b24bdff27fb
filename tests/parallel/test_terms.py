"""Terms of a model's own: one that would hide another, or that is asked for and not returned, is an error that names it."""

import jax.numpy as jnp
import pytest

from jaxpar.core.protocols import Context
from jaxpar.core.typing import Array, Params, Terms
from jaxpar.models.transformer import Transformer
from tests.equivalence import harness


class BlocksReturnALoss(Transformer):
    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        x_bSD, _ = super().block(params_block, x_bSD, ctx)
        return x_bSD, {"loss": (jnp.sum(x_bSD), jnp.ones(()))}


class NoSuchTerm(Transformer):
    @property
    def loss_terms(self) -> dict[str, float]:
        return {"loss": 1.0, "balance": 0.01}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (BlocksReturnALoss, "blocks and head both return a term 'loss'"),
        (NoSuchTerm, "no term 'balance': found 'loss'"),
    ],
)
def test_terms_are_told_apart(model: type[Transformer], words: str) -> None:
    run = harness.config({"model": {"num_layers": 2}} | harness.FLOAT32, harness.ONE_DEVICE)
    parts = harness.parts_of(run, model(run.model))
    with pytest.raises(ValueError, match=words):
        parts.train_step.trace(parts.placement.state, parts.feed.abstract(run.data.global_batch_size, run.num_microbatches))

"""Numbers that are not finite: the state stays, the first bad tensor is named, the policy decides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.build import Parts
from jaxpar.config.load import load_config
from jaxpar.core.protocols import Context
from jaxpar.core.records import read_records
from jaxpar.core.typing import Array, Params, Terms
from jaxpar.models.transformer import Transformer
from jaxpar.train.display import Quiet
from jaxpar.train.errors import NonFiniteError
from jaxpar.train.loop import Result, fit
from tests.train.tiny import write_texts

Make = Callable[..., Parts]
Run = Callable[..., Result]


class Fragile(Transformer):
    """Its loss is not a number for batches that hold the byte "X": data can do that to a model."""

    def head(self, params_head: Params, params_embed: Params, x_bSD: Array, targets_bS: Array, weights_bS: Array, ctx: Context) -> Terms:
        terms = super().head(params_head, params_embed, x_bSD, targets_bS, weights_bS, ctx)
        total, weight = terms["loss"]
        bad = jnp.any(targets_bS == ord("X"))
        return terms | {"loss": (total * jnp.where(bad, jnp.nan, jnp.ones_like(total)), weight)}


class FragileRouter(Transformer):
    """The weights of its routers are not numbers on devices whose rows hold the byte "X"."""

    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        moe = params_block["moe"]
        kernel = moe["router"]["kernel"]
        kernel = jnp.where(jnp.any(ctx.tokens_bS == ord("X")), jnp.asarray(jnp.nan, kernel.dtype), kernel)
        return super().block(params_block | {"moe": moe | {"router": moe["router"] | {"kernel": kernel}}}, x_bSD, ctx)


@pytest.fixture
def poisoned(make: Make, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Parts]:
    """Parts of a run in whose texts few batches hold an X."""
    texts = write_texts(tmp_path_factory.mktemp("poisoned"))
    file = texts / "36.txt"  # its X comes in the sixth batch
    file.write_text("X" + file.read_text()[1:])
    common = ("train.steps=12", "data.eval_fraction=0", f"data.path={texts}", "checkpoint.save_every=1", "checkpoint.keep_last=100")

    def parts(*overrides: str, kind: type[Transformer] = Fragile, **options: Any) -> Parts:
        return make(*common, *overrides, model=kind(load_config(tiny, list(overrides)).model), **options)

    return parts


def bad_steps(parts: Parts, where: str = "targets") -> list[int]:
    return [step + 1 for step in range(12) if (parts.train_data.batch(step)[where] == ord("X")).any()]


def test_skip_leaves_the_step_out_and_goes_on(poisoned: Callable[..., Parts]) -> None:
    parts = poisoned("train.on_nonfinite=skip", "mesh.data=2", devices=2)
    bad = bad_steps(parts)
    assert 0 < len(bad) < 12
    assert bad[0] > 1
    result = fit(parts, display=Quiet())
    rows = read_records(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("skipped")] == bad
    assert [i + 1 for i, loss in enumerate(result.losses) if not np.isfinite(loss)] == bad
    for step in bad:
        assert rows[step - 1]["param_norm"] == rows[step - 2]["param_norm"]
    assert result.step == 12


def test_stop_names_step_and_tensor_and_keeps_the_last_good_state(poisoned: Callable[..., Parts]) -> None:
    skipping = poisoned("train.on_nonfinite=skip", folder="skipping")
    first = bad_steps(skipping)[0]
    fit(skipping, display=Quiet())
    parts = poisoned("checkpoint.save_every=0", "mesh.data=2", devices=2)
    with pytest.raises(
        NonFiniteError, match=rf"step {first}: loss nan, gradient norm nan; first bad gradient blocks\.attention\.key\.kernel"
    ):
        fit(parts, display=Quiet())
    assert parts.checkpoints.steps() == [first - 1]
    good, _ = parts.checkpoints.restore(None, parts.placement.state)
    same, _ = skipping.checkpoints.restore(first - 1, skipping.placement.state)
    assert int(good.step) == first - 1
    for a, b in zip(jax.tree.leaves(good.params), jax.tree.leaves(same.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    with pytest.raises(NonFiniteError, match=f"step {first}:"):  # the same command stops at the same step
        fit(poisoned("checkpoint.save_every=0", folder="run"), display=Quiet())


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
def test_a_router_that_is_not_a_number_stops_the_run_with_the_last_good_state(poisoned: Callable[..., Parts], dispatch: str) -> None:
    """On one of the devices that exchange tokens, whose choices then mean nothing: the others do not wait for it."""
    moe = ("model.moe.num_experts=4", "model.moe.expert_dim=32", f"model.moe.dispatch={dispatch}", "checkpoint.save_every=0")
    moe = (*moe, "optimizer.schedule=constant", "mesh.expert=2")
    parts = poisoned(*moe, kind=FragileRouter, devices=2)
    first = bad_steps(parts, "tokens")[0]
    assert first > 1
    with pytest.raises(NonFiniteError, match=rf"step {first}: loss nan, gradient norm nan; first bad gradient .*blocks\..*\.kernel"):
        fit(parts, display=Quiet())
    assert parts.checkpoints.steps() == [first - 1]
    saved, _ = parts.checkpoints.restore(None, parts.placement.state)
    good = fit(poisoned(*moe, f"train.steps={first - 1}", devices=2, folder="good"), display=Quiet())
    for a, b in zip(jax.tree.leaves(saved.params), jax.tree.leaves(good.state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_overflow_ends_the_run_after_max_skipped(run: Run) -> None:
    huge = ("optimizer.lr=3e38", "optimizer.warmup_steps=0", "optimizer.max_grad_norm=null", "optimizer.schedule=constant")
    with pytest.raises(NonFiniteError, match=r"such steps in a row, train.max_skipped=3"):
        run(*huge, "train.on_nonfinite=skip", "train.max_skipped=3")
    with pytest.raises(NonFiniteError, match=r"lower optimizer.lr"):
        run(*huge, folder="stop")

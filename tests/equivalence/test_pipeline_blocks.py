"""Models of a user's own on a pipeline: terms that blocks return are counted once, and bubbles run no block."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.run import RunConfig
from jaxpar.core.protocols import Context
from jaxpar.core.typing import Array, Params, Terms
from jaxpar.models.transformer import Transformer
from tests.equivalence.harness import FLOAT32, FLOAT64_GATE, ONE_DEVICE, config, gradients, leaf_errors, num_devices, parts_of, rows_of


class Balanced(Transformer):
    """Its blocks return a term that is minimised and one that is told only."""

    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        y_bSD, _ = super().block(params_block, x_bSD, ctx)
        assert ctx.segments_bS is not None
        valid_bS = (ctx.at_block_boundary(ctx.segments_bS) > 0).astype(y_bSD.dtype)
        count = jnp.sum(valid_bS)
        square = jnp.sum(jnp.square(y_bSD) * valid_bS[..., None])
        size = jnp.sum(jnp.abs(x_bSD) * valid_bS[..., None])
        return y_bSD, {"balance": (square, count), "size": (size, 2 * count)}

    @property
    def loss_terms(self) -> Mapping[str, float]:
        return {"loss": 1.0, "balance": 0.01}


TENSOR, WITHOUT_SP, DATA = {"mesh": {"tensor": 2}}, {"mesh": {"tensor": 2}, "sequence_parallel": False}, {"mesh": {"data": 2}}
TERMS: dict[str, tuple[dict[str, Any], ...]] = {
    "1f1b-tensor-no_sp": ({"pipeline": {"schedule": "1f1b"}}, WITHOUT_SP),
    "zb_v-tensor": ({"pipeline": {"schedule": "zb_v"}}, TENSOR),
    "interleaved-data": ({"pipeline": {"schedule": "interleaved"}}, DATA),
    "1f1b-inputs-tensor": ({"pipeline": {"schedule": "1f1b", "stash": "inputs"}}, TENSOR),
    "1f1b-data": ({"pipeline": {"schedule": "1f1b"}, "zero_stage": 2}, DATA),
    "zb_v-tensor-no_sp": ({"pipeline": {"schedule": "zb_v", "stash": "inputs"}}, WITHOUT_SP),
    "zb_v-data": ({"pipeline": {"schedule": "zb_v"}, "zero_stage": 3}, DATA),
    "interleaved-tensor": ({"pipeline": {"schedule": "interleaved"}}, TENSOR),
    "tensor": ({"mesh": {"pipe": 1}, "num_microbatches": 1}, TENSOR),
}
FAST = ("zb_v-tensor",)
SMALL: dict[str, Any] = {"model": {"num_layers": 5}, "data": {"global_batch_size": 8}, "z_loss": 1e-2}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in FAST else [pytest.mark.slow]) for c in TERMS])
def test_terms_of_blocks_equal_one_device(case: str) -> None:
    """Five layers: stages of unequal depth."""
    single = config(SMALL, ONE_DEVICE)
    run = config(SMALL, {"mesh": {"pipe": 2}, "num_microbatches": 4}, *TERMS[case])
    rows = rows_of(run, 0)
    want_means, want = gradients(single, rows, model=Balanced(single.model))
    means, grads = gradients(run, rows, model=Balanced(run.model))
    assert means.keys() == want_means.keys() >= {"loss", "balance", "size"}
    for name, value in want_means.items():
        assert abs(means[name] - value) <= FLOAT64_GATE * max(abs(value), 1.0), (name, means[name], value)
    errors = leaf_errors(grads, want)
    assert max(errors.values()) <= FLOAT64_GATE, errors
    _, without = gradients(single, rows)
    assert max(leaf_errors(without, want).values()) > 1e-4  # the term takes part


def test_terms_of_blocks_in_evaluation_equal_one_device() -> None:
    def sums(*change: dict[str, Any]) -> dict[str, float]:
        run = config(SMALL, *change)
        with jax.enable_x64(True):
            parts = parts_of(run, Balanced(run.model))
            total, weight = parts.eval_step(parts.init_state().params, parts.feed.place(rows_of(run, 0), run.num_microbatches))
            return {name: float(total[name]) / float(weight[name]) for name in total} | {f"{n} weight": float(w) for n, w in weight.items()}

    want = sums(ONE_DEVICE)
    got = sums({"mesh": {"pipe": 2, "tensor": 2}, "num_microbatches": 4, "pipeline": {"schedule": "zb_v"}})
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert abs(got[name] - value) <= FLOAT64_GATE * max(abs(value), 1.0), (name, got[name], value)


class Counted(Transformer):
    """Tells the host of every forward pass through a block, with the layer that the block was told it is."""

    layers: list[int]

    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        return super().block(params_block, self.counted(x_bSD, jnp.asarray(ctx.layer)), ctx)

    def counted(self, x: Array, layer: Array) -> Array:
        def tell(layer: np.ndarray, _: np.ndarray) -> np.ndarray:
            self.layers.append(int(layer))
            return np.zeros((), x.dtype)

        @jax.custom_vjp
        def count(x: Array, layer: Array) -> Array:
            # The result is used, so that no pass over the program drops the call; zero, so that it changes nothing.
            return x + jax.pure_callback(tell, jax.ShapeDtypeStruct((), x.dtype), layer, x[0, 0, 0])

        count.defvjp(lambda x, layer: (count(x, layer), None), lambda _, dy: (dy, None))
        return count(x, layer)


def executed(run: RunConfig) -> Iterator[int]:
    """Layers whose forward pass ran in one step, on any device."""
    model = Counted(run.model)
    model.layers = []
    parts = parts_of(run, model)
    state = parts.init_state()
    batch = parts.feed.place(rows_of(run, 0), run.num_microbatches)
    state, metrics = parts.train_step(state, batch)
    jax.block_until_ready((state, metrics))
    jax.effects_barrier()
    assert np.isfinite(float(metrics["loss"]))
    return iter(model.layers)


COUNTS: dict[str, dict[str, Any]] = {
    "1f1b-l5-m4": {"mesh": {"pipe": 2}, "num_microbatches": 4, "model": {"num_layers": 5}},
    "zb_v-l7-m4": {"mesh": {"pipe": 2}, "num_microbatches": 4, "model": {"num_layers": 7}, "pipeline": {"schedule": "zb_v"}},
    "1f1b-l6-m2": {"mesh": {"pipe": 4}, "num_microbatches": 2, "model": {"num_layers": 6}},
    "interleaved-l9-m1": {"mesh": {"pipe": 4}, "num_microbatches": 1, "model": {"num_layers": 9}, "pipeline": {"schedule": "interleaved"}},
    "zb_h1-l5-m3": {"mesh": {"pipe": 4}, "num_microbatches": 3, "model": {"num_layers": 5}, "pipeline": {"schedule": "zb_h1"}},
    "dualpipe_v-l6-m4": {"mesh": {"pipe": 2}, "num_microbatches": 4, "model": {"num_layers": 6}, "pipeline": {"schedule": "dualpipe_v"}},
}


@pytest.mark.parametrize("stash", ["residuals", "inputs"])
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "zb_v-l7-m4" else [pytest.mark.slow]) for c in COUNTS])
def test_blocks_run_once_a_microbatch_and_never_in_bubbles(case: str, stash: str) -> None:
    """Counted where they run: each layer once for each microbatch, twice where its stage is computed again; no row of no layer."""
    run = config(FLOAT32, {"data": {"global_batch_size": 12}}, COUNTS[case], {"pipeline": {"stash": stash}})
    assert num_devices(run) == run.mesh.pipe
    times = run.num_microbatches * (2 if stash == "inputs" else 1)
    assert sorted(executed(run)) == sorted(list(range(run.model.num_layers)) * times)

"""What must not depend on the layout to the last bit: initial values, dropout masks, sampled tokens; and curves to 1e-5."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.build import Parts
from jaxpar.config.run import RunConfig
from jaxpar.mesh.specs import batch_spec
from jaxpar.ops.random import fold, key_of
from tests.equivalence.harness import FLOAT32, config, natural, packed_rows, parts_of, rows_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "data8_zero3": {"mesh": {"data": 8}, "zero_stage": 3},
    "tensor4_data2": {"mesh": {"tensor": 4, "data": 2}, "zero_stage": 1},
    "data2_context2_tensor2": {"mesh": {"data": 2, "context": 2, "tensor": 2}, "zero_stage": 3, "num_microbatches": 2},
    "replica2_tensor2_no_sp": {"mesh": {"replica": 2, "tensor": 2}, "sequence_parallel": False, "zero_stage": 2},
    "context4_ulysses": {"mesh": {"context": 4}, "context": {"method": "ulysses"}},
    "pipe2_zb_v": {"mesh": {"pipe": 2, "data": 2}, "pipeline": {"schedule": "zb_v"}, "zero_stage": 2, "num_microbatches": 4},
}


def initial_values(run: RunConfig) -> dict[str, np.ndarray]:
    """By leaf, layers in natural order."""
    parts = parts_of(run)
    return natural(parts.layout, parts.init_state().params)


@pytest.mark.parametrize("name", LAYOUTS)
def test_initial_values_are_bit_equal(name: str) -> None:
    model = {"model": {"mlp_dim": 496, "num_kv_heads": 4}}
    want, got = initial_values(config(FLOAT32, model)), initial_values(config(FLOAT32, model, LAYOUTS[name]))
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def test_padding_the_vocabulary_changes_no_real_row() -> None:
    want = initial_values(config(FLOAT32, {"model": {"vocab_size": 257}}))
    got = initial_values(config(FLOAT32, {"model": {"vocab_size": 257, "vocab_multiple": 64}}))
    table, padded = want["embed.tokens.table"], got["embed.tokens.table"]
    assert padded.shape[0] == 320
    np.testing.assert_array_equal(padded[:257], table)
    assert not padded[257:].any()
    np.testing.assert_array_equal(got["head.out.kernel"][:, :257], want["head.out.kernel"])


def masks(run: RunConfig, dims: tuple[str, str, str], layer: int, step: int) -> np.ndarray:
    """Dropout of ones at a site, as a global array in natural order."""
    parts = parts_of(run)
    layout, size = parts.layout, {"embed": run.model.embed_dim, "mlp": run.model.mlp_dim}[dims[2]]
    batch = parts.feed.place(rows_of(run, 0), None)
    seq = layout.block_seq_axes if dims[1] == "block_seq" else layout.context_axes
    local_seq = run.data.seq_len // layout.size(seq)

    def drop(batch: dict[str, jax.Array]) -> jax.Array:
        ctx = parts.forward.context(batch, fold(key_of(run.seed), step)).at(layer)
        return ctx.dropout(jnp.ones((batch["tokens"].shape[0], local_seq, size // layout.ways(dims[2])), jnp.float32), 0.5, 100, dims)

    specs = {n: batch_spec(layout, microbatched=False)[n] for n in batch}
    feature = layout.split(dims[2]) or None
    out = jax.jit(jax.shard_map(drop, mesh=parts.mesh, in_specs=(specs,), out_specs=P(layout.batch_axes or None, seq or None, feature)))
    return np.asarray(out(batch))[:, np.argsort(parts.feed.order)]


@pytest.mark.parametrize("dims", [("batch", "block_seq", "embed"), ("batch", "seq", "mlp")], ids=["boundary", "inside"])
def test_dropout_masks_are_bit_equal_and_all_different(dims: tuple[str, str, str]) -> None:
    want = masks(config(FLOAT32), dims, layer=2, step=5)
    for change in LAYOUTS.values():
        np.testing.assert_array_equal(masks(config(FLOAT32, change), dims, layer=2, step=5), want)
    assert abs(float((want > 0).mean()) - 0.5) < 0.02
    others = [masks(config(FLOAT32), dims, layer, step) for layer, step in ((1, 5), (2, 6))]
    assert all((other != want).mean() > 0.4 for other in others)
    assert (want[0] != want[1]).mean() > 0.4  # rows of a batch
    assert (want[:, 0] != want[:, 1]).mean() > 0.4  # positions


def text(run: RunConfig) -> np.ndarray:
    """Tokens sampled after a prompt of five."""
    with jax.enable_x64(True):
        parts = parts_of(run)
        rows = packed_rows(4, run.data.seq_len, run.model.vocab_size)
        rows |= {"segments": np.ones_like(rows["segments"]), "positions": np.arange(run.data.seq_len, dtype=np.int32)[None].repeat(4, 0)}
        batch = parts.feed.place(rows, None)
        state = parts.init_state()
        done = parts.sample_step(state.params, batch, jnp.asarray(5, jnp.int32), jnp.asarray(12, jnp.int32), jnp.asarray(1.0, jnp.float32))
        return np.asarray(done)[:, :17]


@pytest.mark.slow
def test_sampled_tokens_are_equal_in_float64() -> None:
    want = text(config())
    assert len({tuple(row[5:]) for row in want}) == 4  # rows differ
    for name in ("tensor4_data2", "data2_context2_tensor2", "context4_ulysses", "pipe2_zb_v"):
        np.testing.assert_array_equal(text(config(LAYOUTS[name])), want)


def curve(parts: Parts, steps: int) -> list[float]:
    """Losses of SGD steps on the run's own data."""
    state, losses = parts.init_state(), []
    for step in range(steps):
        batch = parts.feed.place(parts.train_data.batch(step), parts.config.num_microbatches)
        state, metrics = parts.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
def test_curves_are_the_same_over_50_steps(tmp_path: Any) -> None:
    base = {"optimizer": {"lr": 0.1}, "train": {"steps": 50}, "run": {"dir": str(tmp_path)}, "attention": "xla"}
    want = curve(parts_of(config(FLOAT32, base)), 50)
    assert want[-1] < want[0] - 0.02
    for name in ("data8_zero3", "data2_context2_tensor2", "pipe2_zb_v"):
        run = config(FLOAT32, base, LAYOUTS[name])
        got = curve(parts_of(run), 50)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        if name == "data8_zero3":
            assert curve(parts_of(run), 50) == got  # same mesh and seed: bitwise

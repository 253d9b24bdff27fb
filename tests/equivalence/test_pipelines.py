"""Loss and every gradient leaf under every schedule equal one device's, on packed rows with uneven padding.

Each schedule with tied and untied embeddings on 2, 3, 4 and 8 stages; microbatches from one to more than twice the stages, odd
depths, and what is left of eight devices for the other axes are drawn.
"""

import random
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.checks import check, layout_of
from jaxpar.config.run import RunConfig
from jaxpar.config.stages import Stages
from jaxpar.parallel.pipeline import control
from jaxpar.schedule.library import FAMILIES, NAMES
from tests.equivalence.harness import (
    FLOAT32,
    assert_float32,
    assert_float64,
    config,
    gradients,
    natural,
    num_devices,
    one_device,
    packed_rows,
    parts_of,
    relative_l2,
    rows_of,
    stored,
)

STAGES = (2, 3, 4, 8)
PLAIN = [(name, tied, stages) for name in NAMES for tied in (True, False) for stages in STAGES]
CASES = PLAIN + [(name, True, stages) for name in ("zb_h1", "zb_v", "interleaved", "dualpipe_v") for stages in (2, 4)]
DEFAULT = (22, 42)  # the others are slow


def draw(index: int) -> RunConfig:
    """The case's sizes and the rest of its layout."""
    name, tied, stages = CASES[index]
    rng = random.Random(7000 + index)
    microbatches = (1, stages - 1, stages, stages + 1, 2 * stages + 1)[index % 5]
    if name == "dualpipe_v":
        microbatches = 2 * stages + index % 2
    chunks = FAMILIES[name].num_chunks or rng.choice([2, 3] if stages < 8 else [2])
    while True:
        mesh = {axis: rng.choice([1, 1, 2, 4]) for axis in ("replica", "data", "context", "tensor")}
        shards = mesh["replica"] * mesh["data"]
        change = {
            "mesh": {"pipe": stages, **mesh},
            "model": {
                "tied_embeddings": tied,
                "num_layers": max(4, stages * chunks + rng.choice([0, 0, 1, 3])),
                "dropout": rng.choice([0.0, 0.1]),
                "num_kv_heads": rng.choice([None, 2]),
            },
            "pipeline": {
                "schedule": name,
                "chunks_per_stage": chunks if name == "interleaved" else None,
                "stash": rng.choice(["residuals", "residuals", "inputs"]),
                "layers_per_stage": rng.choice([None, "balance"]),
            },
            "num_microbatches": microbatches,
            "data": {"global_batch_size": microbatches * shards},
            "zero_stage": rng.choice([0, 1, 2, 3]),
            "sequence_parallel": rng.random() < 0.6,
            "context": {"method": rng.choice(["ring", "all_gather", "ulysses"])},
            "remat": {"policy": rng.choice(["none", "selective"] if name.startswith("zb") or name == "dualpipe_v" else ["none", "full"])},
            "loss_chunk_tokens": rng.choice([10, 1024]),
        }
        run = config(change, second_draw(index))
        if num_devices(run) <= 8 and not check(run, num_devices(run)):
            return run


GPT: dict[str, Any] = {
    **{"bias": True, "activation": "gelu", "norm": "layernorm", "positions": "learned", "max_positions": 32},
    **{"qk_norm": True, "logits_softcap": 4.0},
}


def second_draw(index: int) -> dict[str, Any]:
    """z-loss and the kind of model, by a generator of their own."""
    rng = random.Random(8011 + index)
    return {"z_loss": rng.choice([0.0, 1e-2]), "model": rng.choice([{}, GPT])}


def describe(index: int) -> str:
    run = draw(index)
    mesh = "-".join(f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1)
    tied = "tied" if run.model.tied_embeddings else "untied"
    depth = f"l{run.model.num_layers}-m{run.num_microbatches}"
    kind = "gpt" if run.model.bias else "llama"
    return f"{index}-{run.pipeline.schedule}-{kind}-{tied}-{mesh}-{depth}-z{run.zero_stage}-{run.pipeline.stash}-{run.remat.policy}"


@pytest.mark.parametrize(
    "index", [pytest.param(i, id=describe(i), marks=[] if i in DEFAULT else [pytest.mark.slow]) for i in range(len(CASES))]
)
def test_float64_gate(index: int) -> None:
    assert_float64(draw(index))


@pytest.mark.parametrize("index", [pytest.param(i, marks=pytest.mark.slow) for i in (4, 36)])
def test_float32_gate(index: int) -> None:
    change = draw(index).model_dump(include={"mesh", "model", "pipeline", "num_microbatches", "data", "zero_stage"})
    assert_float32(config(change, FLOAT32))


def test_the_draw_covers_what_it_should() -> None:
    runs = [draw(i) for i in range(len(CASES))]
    assert len(runs) >= 60
    assert {CASES[i][0] for i in DEFAULT} == {"interleaved", "zb_v"}
    assert {run.num_microbatches - run.mesh.pipe for run in runs} >= {-7, -3, -1, 0, 1}
    assert {run.zero_stage for run in runs} == {0, 1, 2, 3}
    assert {run.context.method for run in runs if run.mesh.context > 1} == {"ring", "all_gather", "ulysses"}
    assert any(run.model.num_layers % run.mesh.pipe for run in runs)
    assert {run.pipeline.stash for run in runs} == {"residuals", "inputs"}
    assert any(sum(size > 1 for size in run.mesh.sizes.values()) >= 3 for run in runs)
    assert {(run.z_loss > 0, run.model.bias) for run in runs} == {(False, False), (False, True), (True, False), (True, True)}
    assert any(run.model.dropout > 0 for run in runs)
    assert any(run.model.num_kv_heads == 2 and run.mesh.tensor > 1 for run in runs)
    assert any(run.mesh.tensor > 1 and not run.sequence_parallel for run in runs)
    assert any(run.remat.policy == "full" for run in runs)
    assert any(run.pipeline.schedule.startswith("zb") and run.mesh.tensor > 1 and not stages_of(run).even for run in runs)
    fast = [runs[i] for i in DEFAULT]
    assert {run.model.bias for run in fast} == {run.z_loss > 0 for run in fast} == {True, False}


def stages_of(run: RunConfig) -> Stages:
    stages = layout_of(run, num_devices(run)).stages
    assert stages is not None
    return stages


SMALL: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": 4, "data": {"global_batch_size": 8}}


def two_steps(run: RunConfig) -> Mapping[str, np.ndarray]:
    """Weights after two steps of plain SGD, in natural order."""
    with jax.enable_x64(True):
        parts = parts_of(run)
        state = parts.init_state()
        for seed in (0, 1):
            state, _ = parts.train_step(state, parts.feed.place(rows_of(run, seed), run.num_microbatches))
        return natural(parts.layout, state.params)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_two_steps_of_sgd_give_the_same_weights(name: str) -> None:
    model = {"model": {"num_layers": 5, "tied_embeddings": True}}
    want = two_steps(config(SMALL, model, {"mesh": {"pipe": 1}, "num_microbatches": 1}))
    got = two_steps(config(SMALL, model, {"pipeline": {"schedule": name}, "zero_stage": 1}))
    assert max(relative_l2(got[leaf], want[leaf]) for leaf in want) < 1e-12


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"schedule": "1f1b"}, marks=pytest.mark.slow),
        {"schedule": "zb_v"},
        pytest.param({"schedule": "interleaved", "stash": "inputs"}, marks=pytest.mark.slow),
    ],
)
def test_what_waits_in_unused_slots_changes_nothing(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Law L6: buffers full of NaN, rows of no layer full of NaN, and bubbles that would spread them if they ran."""
    run = config(SMALL, {"model": {"num_layers": 7}, "pipeline": change})
    empty = control.zeros

    def nans(like: Any, *lead: int) -> jax.Array:
        zeros = empty(like, *lead)
        return zeros + jnp.asarray(jnp.nan, zeros.dtype) if jnp.issubdtype(zeros.dtype, jnp.floating) else zeros

    monkeypatch.setattr(control, "empty", nans)
    monkeypatch.setattr("tests.equivalence.harness.stored", lambda layout, params: with_nans(layout, stored(layout, params)))
    means, grads = gradients(run, rows_of(run, 0))
    want_means, want = one_device(run)
    assert abs(means["loss"] - want_means["loss"]) < 1e-12
    assert max(relative_l2(grads[leaf], want[leaf]) for leaf in want) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"pipeline": {"schedule": "zb_v"}, "mesh": {"tensor": 2}, "zero_stage": 3},
        {"pipeline": {"schedule": "dualpipe_v", "layers_per_stage": (0, 0, 1, 0, 2, 0, 1, 1)}, "mesh": {"context": 2}},
        {"pipeline": {"schedule": "interleaved:3", "stash": "inputs"}, "mesh": {"data": 2}, "remat": {"policy": "full"}},
        {"pipeline": {"schedule": "interleaved"}, "model": {"num_layers": 4, "tied_embeddings": True}},
    ],
    ids=["zb_v", "dualpipe_v", "interleaved_3", "interleaved_2"],
)
def test_chunks_without_layers_pass_on_what_they_get(change: dict[str, Any]) -> None:
    run = config(SMALL, {"mesh": {"pipe": 4}, "num_microbatches": 9, "data": {"global_batch_size": 18}, "model": {"num_layers": 5}}, change)
    assert stages_of(run).empty
    assert_float64(run)


def with_nans(layout: Any, params: Any) -> Any:
    if layout.stages is None:
        return params
    unused = np.asarray(layout.stages.layer_of_row) < 0
    assert unused.any()
    for leaf in jax.tree.leaves(params["blocks"]):
        leaf[unused] = np.nan
    return params


@pytest.mark.slow
def test_evaluation_and_sampling_on_stages_equal_one_device() -> None:
    rows = packed_rows(8, 32, 96)

    def results(change: dict[str, Any]) -> tuple[float, np.ndarray]:
        run = config(SMALL, {"model": {"num_layers": 6}}, change)
        with jax.enable_x64(True):
            parts = parts_of(run)
            params = parts.init_state().params
            sums, weights = parts.eval_step(params, parts.feed.place(rows, run.num_microbatches))
            batch = parts.feed.place({n: rows[n][:2] for n in rows}, None)
            text = parts.sample_step(params, batch, *(jnp.asarray(n, jnp.int32) for n in (4, 20)), jnp.asarray(0.5))
            return float(sums["loss"]) / float(weights["loss"]), np.asarray(text)

    loss, text = results({"mesh": {"pipe": 1}})
    for change in ({"pipeline": {"schedule": "zb_v"}}, {"mesh": {"pipe": 4, "tensor": 2}, "zero_stage": 3}):
        got_loss, got_text = results(change)
        assert abs(got_loss - loss) < 1e-12
        assert (got_text == text).all()

"""Runs with experts: what a row tells, what stops a run, and going on under another mesh and another way to travel."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.build import Parts
from jaxpar.core.records import read_records
from jaxpar.core.tree import named_leaves
from jaxpar.train.errors import ExpertsError
from jaxpar.train.experts import experts_note, table_row
from jaxpar.train.loop import Result
from jaxpar.train.sample import rows_of, sample
from tests.train.test_resume import stopped_after

Make = Callable[..., Parts]
Run = Callable[..., Result]

MOE = ("model.moe.num_experts=4", "model.moe.expert_dim=32", "optimizer.schedule=constant")
BIASED = (
    *MOE,
    "model.moe.router=sigmoid_bias",
    "model.moe.bias_rate=0.01",
    "train.steps=10",
    "checkpoint.save_every=5",
    "optimizer.warmup_steps=0",
)


def bias(result: Result) -> np.ndarray:
    return np.asarray(named_leaves(result.state.params)["blocks.moe.router.bias"])


def test_a_row_has_every_experts_load_and_what_was_dropped(run: Run) -> None:
    result = run(*MOE, "train.steps=3", "model.moe.capacity_factor=0.5", "mesh.expert=2", devices=2)
    row = read_records(result.run_dir / "metrics.jsonl")[-1]
    assert np.shape(row["moe_load"]) == np.shape(row["eval_moe_load"]) == (2, 4)
    np.testing.assert_allclose(np.sum(row["moe_load"], axis=1), 1, atol=1e-4)
    assert np.shape(row["moe_dropped"]) == (2,)
    assert row["moe_dropped_worst"] == pytest.approx(max(row["moe_dropped"]), abs=1e-5)
    assert row["moe_dropped_worst"] >= 0.49  # half a place a choice
    assert row["moe_max_load"] == pytest.approx(4 * np.max(row["moe_load"]), rel=1e-3)
    # Places of 4 experts: ceil(32 x 2 / 4 / 2) = 8 for each of 4 rows, 4 times in each of 2 blocks, and a row of gates' gradients for each
    # expert; 32 wide, float32; a half leaves.
    assert row["moe_exchange_bytes"] == 2 * 4 * (4 * 4 * 8 + 1) * 32 * 4 // 2


def test_balance_is_a_term_of_its_own_and_loss_stays_the_cross_entropy(run: Run) -> None:
    """Case MOE-12: at step 1 the loss is the same with a coefficient and without."""
    without = run(*MOE, "train.steps=2", folder="without")
    with_it = run(*MOE, "train.steps=2", "model.moe.balance_coefficient=0.5", folder="with")
    assert with_it.losses[0] == without.losses[0]
    assert with_it.losses[1] != without.losses[1]


def test_too_many_dropped_tokens_stop_a_run_and_leave_a_checkpoint(run: Run, make: Make) -> None:
    limit = ("train.steps=4", "model.moe.capacity_factor=0.5", "model.moe.max_drop_fraction=0.2")
    with pytest.raises(ExpertsError, match=r"step 1: block \d dropped 0\.\d+ of its choices, more than model\.moe\.max_drop_fraction=0\.2"):
        run(*MOE, *limit)
    parts = make(*MOE, *limit)
    rows = read_records(parts.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]  # the second had begun: it is saved, so its row is there
    assert parts.checkpoints.latest() == 2
    assert "moe_load" in rows[-1]
    assert set(rows[1]) == set(rows[0])


TIGHT = (*MOE, "model.moe.dispatch=ragged", "model.moe.capacity_factor=null", "mesh.expert=4")


@pytest.mark.slow
def test_an_overflow_stops_a_run_unless_it_is_allowed(run: Run, make: Make) -> None:
    """And no checkpoint holds what a step made without some of its rows."""
    tight = (*TIGHT, "train.steps=2", "model.moe.ragged_buffer_factor=1.0")
    for save_every in (0, 1):
        name = f"save_every_{save_every}"
        stopped = (*tight, f"checkpoint.save_every={save_every}")
        text = r"step 1: block \d lost 0\.\d+ of its choices.*ragged_buffer_factor=1\.0.*there is no checkpoint yet"
        with pytest.raises(ExpertsError, match=text):
            run(*stopped, devices=4, folder=name)
        assert make(*stopped, devices=4, folder=name).checkpoints.latest() is None
    result = run(*tight, "model.moe.allow_overflow=true", devices=4, folder="allowed")
    assert read_records(result.run_dir / "metrics.jsonl")[-1]["moe_overflow_worst"] > 0


@pytest.mark.slow
def test_an_evaluation_that_loses_rows_stops_a_run(run: Run, make: Make) -> None:
    """One step with a huge rate sends all tokens to few experts: the step itself lost none, so its state is saved."""
    moe = (*TIGHT, "model.moe.router=switch", "model.moe.top_k=1", "model.moe.ragged_buffer_factor=3.0")
    moe = (*moe, "train.steps=1", "optimizer.lr=1000", "optimizer.warmup_steps=0")
    with pytest.raises(
        ExpertsError, match=r"evaluation after step 1: block \d lost 0\.\d+ of its choices.*the last checkpoint is of step 1"
    ):
        run(*moe, devices=4)
    parts = make(*moe, devices=4)
    row = read_records(parts.run_dir / "metrics.jsonl")[-1]
    assert (row["moe_overflow_worst"], parts.checkpoints.latest()) == (0, 1)
    assert row["eval_moe_overflow_worst"] > 0


@pytest.mark.slow
def test_one_expert_trains_and_takes_every_token(run: Run) -> None:
    result = run("model.moe.num_experts=1", "model.moe.top_k=1", "train.steps=2", "data.eval_fraction=0")
    rows = read_records(result.run_dir / "metrics.jsonl")
    assert [row["moe_load"] for row in rows] == [[[1.0]] * 2] * 2
    assert [row["moe_dropped_worst"] for row in rows] == [0, 0]
    assert np.isfinite(result.losses).all()
    assert result.losses[1] != result.losses[0]


@pytest.mark.slow
def test_the_bias_moves_by_its_rule_once_a_step(run: Run) -> None:
    """From zero by the rate towards the mean, whatever the microbatches; with ZeRO, and never by the optimizer."""
    one = run(*BIASED, "train.steps=1", folder="one")
    load = np.asarray(read_records(one.run_dir / "metrics.jsonl")[-1]["moe_load"])
    want = np.float32(0.01) * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_allclose(bias(one), want, rtol=1e-6)
    split = run(*BIASED, "train.steps=1", "num_microbatches=2", "mesh.expert=2", "zero_stage=3", devices=2, folder="split")
    np.testing.assert_array_equal(bias(split), bias(one))


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_experts_elsewhere(make: Make, run: Run) -> None:
    """Another `expert` size, another dispatcher, a pipeline; the routers' biases come along."""
    whole = run(*BIASED, folder="whole")
    part = stopped_after(make(*BIASED, "mesh.expert=4", devices=4), 4)
    assert part.preempted
    elsewhere = ("mesh.pipe=2", "mesh.expert=2", "num_microbatches=2", "model.moe.dispatch=ragged", "model.moe.ragged_buffer_factor=4")
    rest = run(*BIASED, *elsewhere, devices=4)
    np.testing.assert_allclose(part.losses + rest.losses, whole.losses, rtol=2e-5)
    np.testing.assert_allclose(bias(rest), bias(whole), atol=1e-7)


@pytest.mark.slow
def test_the_same_text_is_written_wherever_experts_are(run: Run, make: Make) -> None:
    """Groups of two rows, with drops: the rows that share capacity are the same under every layout."""
    moe = (*MOE, "train.steps=8", "model.moe.routing_group_sequences=2", "model.moe.capacity_factor=0.8")
    trained = run(*moe)
    one = sample(make(*moe), trained.state.params, "the mesh", 12)
    parts = make(*moe, "mesh.expert=2", "mesh.pipe=2", "num_microbatches=2", devices=4)
    state = parts.natural.to_run(parts.checkpoints.restore(8, parts.natural.state)[0])
    assert sample(parts, state.params, "the mesh", 12) == one
    assert len(one) >= 16


@pytest.mark.slow
def test_sampling_loses_no_token_of_a_tight_buffer(make: Make) -> None:
    """Rows of one prompt go to the same experts: in the buffer of training those of the last devices would find no room."""

    def likeliest(*overrides: str) -> np.ndarray:
        parts = make(*MOE, "model.moe.capacity_factor=null", *overrides, devices=4)
        params = parts.init_state().params
        moe = params["blocks"]["moe"]
        moe = moe | {"experts": jax.tree.map(lambda a: 20 * a, moe["experts"])}  # so that they decide about the text
        batch = parts.feed.place(rows_of(parts, np.arange(40, 48, dtype=np.int32), 0), None)
        start, count = jnp.asarray(8, jnp.int32), jnp.asarray(20, jnp.int32)
        params = params | {"blocks": params["blocks"] | {"moe": moe}}
        return np.asarray(parts.sample_step(params, batch, start, count, jnp.asarray(0.0, jnp.float32)))

    want = likeliest("mesh.data=4", "model.moe.dispatch=local")
    assert len(set(want[0, 8:28].tolist())) > 2
    tight = ("mesh.expert=4", "model.moe.dispatch=ragged", "model.moe.ragged_buffer_factor=1")
    np.testing.assert_array_equal(likeliest(*tight), want)


def test_numbers_of_a_row() -> None:
    row = table_row({"moe_load": np.asarray([[0.5, 0.25, 0.25, 0.0], [0.25] * 4]), "moe_dropped": np.asarray([0.1, 0.3])})
    assert row["moe_max_load"] == 2.0
    assert row["moe_dropped_worst"] == 0.3
    assert row["moe_load"] == [[0.5, 0.25, 0.25, 0.0], [0.25] * 4]
    np.testing.assert_allclose(row["moe_load_entropy"], [1.5 * np.log(2), np.log(4)], atol=1e-5)


def test_words_for_a_row() -> None:
    row = table_row({"eval_moe_load": np.asarray([[0.7, 0.1, 0.1, 0.1]]), "eval_moe_dropped": np.asarray([0.25])})
    assert experts_note(row, "eval_") == "busiest expert 2.80 x the mean, 25.0 % dropped"
    assert experts_note(row) == ""


def test_numbers_of_a_batch_without_tokens() -> None:
    row = table_row({"moe_load": np.zeros((2, 4))})
    assert row["moe_max_load"] == 0.0
    assert row["moe_load_entropy"] == [0.0, 0.0]

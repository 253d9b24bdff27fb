"""The loop: evaluation changes nothing, tokens count once, times add up, finished runs stay finished, no second compilation."""

import json
import math
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxpar.build import Parts
from jaxpar.core.records import Row, read_records
from jaxpar.train.compiled import CompiledStep
from jaxpar.train.display import Quiet
from jaxpar.train.errors import StepChangedError
from jaxpar.train.evaluate import evaluate
from jaxpar.train.loop import Result, fit

Make = Callable[..., Parts]
Run = Callable[..., Result]

FOUR_WAYS = ("mesh.data=2", "mesh.tensor=2", "zero_stage=3")


def rows_of(result: Result) -> list[Row]:
    return read_records(result.run_dir / "metrics.jsonl")


def test_evaluation_does_not_change_training(run: Run) -> None:
    often = run("train.steps=6", "train.eval_every=2", "model.dropout=0.1", folder="often")
    never = run("train.steps=6", "model.dropout=0.1", folder="never")
    assert often.losses == never.losses
    assert [row["step"] for row in rows_of(often) if "eval_loss" in row] == [2, 4, 6]
    assert rows_of(often)[-1]["eval_loss"] == rows_of(never)[-1]["eval_loss"] == never.eval_loss


def test_a_folder_holds_what_the_run_was(run: Run) -> None:
    result = run("train.steps=3", *FOUR_WAYS, devices=4)
    assert result.step == 3
    assert not result.preempted
    rows = rows_of(result)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == result.losses
    assert {"grad_norm", "param_norm", "lr", "tokens_per_s", "step_time_s", "data_wait_s", "host_memory_bytes"} <= rows[0].keys()
    assert "mfu" not in rows[0]
    names = {path.name for path in result.run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "hosts.json"} <= names
    assert len(json.loads((result.run_dir / "hosts.json").read_text())["processes"][0]["devices"]) == 4


def test_layouts_agree_and_count_tokens_once(run: Run) -> None:
    one = run("train.steps=8", folder="one")
    four = run("train.steps=8", "num_microbatches=2", *FOUR_WAYS, devices=4, folder="four")
    np.testing.assert_allclose(four.losses, one.losses, rtol=1e-5)
    assert [row["tokens"] for row in rows_of(four)] == [row["tokens"] for row in rows_of(one)] == [256 * n for n in range(1, 9)]
    for row in rows_of(four):
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(256)
        assert row["tokens_per_s_per_device"] == pytest.approx(row["tokens_per_s"] / 4)


class Watch(Quiet):
    """Notes when training begins and when the numbers of each step are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, first_step: int, steps: int) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())

    def step(self, step: int, loss: float, tokens_per_s: float, note: str) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())


def test_step_times_add_up_to_the_time_of_training(make: Make) -> None:
    watch = Watch()
    parts = make("train.steps=50")
    fit(parts, display=watch)
    logged = sum(row["step_time_s"] for row in read_records(parts.run_dir / "metrics.jsonl"))
    assert logged == pytest.approx(watch.times[-1] - watch.times[0], rel=0.05)


def test_rows_of_every_third_step_carry_the_mean_time(run: Run) -> None:
    rows = rows_of(run("train.steps=7", "train.log_every=3"))
    assert [row["step"] for row in rows] == [3, 6, 7]


def test_a_finished_run_is_not_run_again(run: Run) -> None:
    first = run("train.steps=4")
    before = (first.run_dir / "metrics.jsonl").read_text()
    again = run("train.steps=4", "mesh.data=2", devices=2)
    assert (again.step, again.losses, again.eval_loss) == (4, [], first.eval_loss)
    assert (first.run_dir / "metrics.jsonl").read_text() == before


def test_a_short_last_batch_weighs_what_it_holds(make: Make) -> None:
    """The mean over all held-out tokens, whatever the size of the batches they come in."""
    means = []
    for batch in (8, 4, 1):
        parts = make("train.eval_batches=1000", f"data.global_batch_size={batch}")
        assert parts.eval_data.num_eval_batches() < 1000
        found = evaluate(parts, parts.init_state().params)
        assert found is not None
        means.append(found["loss"])
    np.testing.assert_allclose(means[1:], means[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda batch: {name: a[:, :4] for name, a in batch.items()},
            r"batch\.tokens: compiled with int32\[1, 8, 32\], now int32\[1, 4, 32\]",
        ),
        (lambda batch: batch | {"weights": batch["weights"].astype("float16")}, r"batch\.weights: compiled with float32.*now float16"),
        (lambda batch: {name: a for name, a in batch.items() if name != "samples"}, r"batch\.samples: missing"),
        (lambda batch: jax.device_put(batch, jax.devices()[1]), r"batch\.tokens: compiled with sharding .*, now .*"),
    ],
)
def test_a_second_compilation_is_an_error_that_names_what_changed(make: Make, change: Callable, named: str) -> None:
    parts = make("mesh.data=2", devices=2)
    step = CompiledStep(parts.train_step, parts.placement.state, parts.feed.abstract(8, 1))
    batch = parts.feed.place(parts.train_data.batch(0), 1)
    with pytest.raises(StepChangedError, match=named):
        step(parts.init_state(), change(batch))


def test_losses_are_numbers_of_nats(run: Run) -> None:
    result = run("train.steps=2", "optimizer.lr=1e-9")
    assert result.losses[0] == pytest.approx(math.log(257), rel=0.02)  # 257 ids, the 7 of padding never count


def test_the_run_folder_of_a_running_process_is_refused(make: Make) -> None:
    from jaxpar.train.folder import locked

    parts = make()
    parts.run_dir.mkdir(parents=True)
    with locked(parts.run_dir), pytest.raises(ValueError, match=r"is in use by process \d+"):
        fit(parts, display=Quiet())

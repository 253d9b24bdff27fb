"""Going on: under another mesh, with one row a step; what would bend the curve is refused."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxpar.build import Parts
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.config.errors import ConfigError
from jaxpar.core.records import RecordWriter, read_records
from jaxpar.train.display import Quiet
from jaxpar.train.loop import Result, fit
from jaxpar.train.resume import same_rates
from jaxpar.train.signals import StopSignals

Make = Callable[..., Parts]
Run = Callable[..., Result]

SOME = ("train.steps=12", "checkpoint.save_every=5", "optimizer.schedule=constant", "model.dropout=0.1")


class StopAfter(Quiet):
    """Asks for a stop, as a signal does, when the numbers of a step are there."""

    def __init__(self, step: int) -> None:
        self.at, self.signals = step, StopSignals()

    def step(self, step: int, loss: float, tokens_per_s: float, note: str) -> None:  # noqa: ARG002
        if step == self.at:
            self.signals._asked.set()


def stopped_after(parts: Parts, step: int) -> Result:
    display = StopAfter(step)
    return fit(parts, stop=display.signals, display=display)


def test_a_stopped_run_goes_on_under_another_mesh(make: Make, run: Run) -> None:
    whole = run(*SOME, folder="whole")
    part = stopped_after(make(*SOME, "mesh.data=2", devices=2), 7)
    assert part.preempted
    assert part.step in (8, 9)  # a step or two were running when the stop came
    rest = run(*SOME, "mesh.tensor=2", "mesh.context=2", "zero_stage=2", devices=4)
    np.testing.assert_allclose(part.losses + rest.losses, whole.losses, rtol=1e-5)
    rows = read_records(rest.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["attempt"] for row in rows] == [1] * part.step + [2] * (12 - part.step)
    assert rest.eval_loss == pytest.approx(whole.eval_loss, rel=1e-5)


def test_rows_past_the_checkpoint_of_a_killed_run_are_written_anew(make: Make, run: Run) -> None:
    part = stopped_after(make(*SOME), 4)
    with RecordWriter(part.run_dir / "metrics.jsonl") as writer:  # what a run killed at step 9 leaves: no checkpoint, but rows
        for step in range(part.step + 1, 10):
            writer.write({"attempt": 1, "step": step, "loss": -1.0})
    with (part.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"attempt": 1, "step": 10, "lo')
    rest = run(*SOME)
    rows = read_records(rest.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["loss"] > 0 for row in rows)


def test_every_change_of_the_maths_is_refused_and_listed(run: Run) -> None:
    run("train.steps=4")
    with pytest.raises(ConfigError) as error:
        run("train.steps=5", "optimizer.lr=0.1", "model.norm_eps=1e-3", "seed=1")
    text = str(error.value)
    for key in ("optimizer.lr: the checkpoint has 0.3, this run 0.1", "model.norm_eps", "seed"):
        assert key in text
    with pytest.raises(ConfigError, match=r"train\.steps.*schedule=cosine had other learning rates"):
        run("train.steps=5")


def test_more_steps_where_the_learning_rates_so_far_stay(run: Run, make: Make) -> None:
    first = run("train.steps=4", "optimizer.schedule=constant")
    more = run("train.steps=6", "optimizer.schedule=constant")
    whole = run("train.steps=6", "optimizer.schedule=constant", folder="whole")
    assert first.losses + more.losses == whole.losses
    wsd = make("train.steps=100", "optimizer.schedule=wsd", "optimizer.decay_steps=10")
    assert same_rates(wsd, 50, done=40)
    assert not same_rates(wsd, 50, done=45)


def test_other_data_is_refused(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.train.tiny import write_texts

    run("train.steps=2", "optimizer.schedule=constant")
    same = write_texts(tmp_path_factory.mktemp("moved"))
    other = write_texts(tmp_path_factory.mktemp("other"), num_files=41)
    assert run("train.steps=3", "optimizer.schedule=constant", f"data.path={same}").step == 3
    with pytest.raises(CheckpointError, match="data: the checkpoint was trained on"):
        run("train.steps=4", "optimizer.schedule=constant", f"data.path={other}")


def test_a_damaged_checkpoint_stops_the_run(run: Run) -> None:
    result = run("train.steps=2", "optimizer.schedule=constant")
    for path in (result.run_dir / "checkpoints" / "2").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        run("train.steps=3", "optimizer.schedule=constant")


def test_never_begins_anew_and_keeps_the_old_run_aside(run: Run) -> None:
    first = run("train.steps=2")
    again = run("train.steps=2", "checkpoint.resume=never")
    assert again.losses == first.losses
    assert read_records(first.run_dir / "earlier-1" / "metrics.jsonl")[-1]["loss"] == first.losses[-1]
    assert (first.run_dir / "earlier-1" / "checkpoints" / "2").is_dir()


def test_from_another_runs_checkpoints(run: Run) -> None:
    constant = ("optimizer.schedule=constant",)
    base = run("train.steps=3", *constant, folder="base")
    path = f"checkpoint.resume={base.run_dir / 'checkpoints'}"
    branch = run("train.steps=5", *constant, path, folder="branch")
    whole = run("train.steps=5", *constant, folder="whole")
    assert base.losses + branch.losses == whole.losses
    assert [row["step"] for row in read_records(branch.run_dir / "metrics.jsonl")] == [4, 5]
    assert run("train.steps=5", *constant, path, folder="branch").losses == []  # its own checkpoints come first

"""Rows -> arrays, by hand; what is refused, and in which words."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar.core.records import RecordError
from jaxpar.report.errors import ReportError
from jaxpar.report.expert_load import expert_load
from jaxpar.report.run_folder import outcome, read_run
from tests.report.runs import many, row, write_run

EVEN = [0.25] * 4
SKEWED = [0.5, 0.25, 0.25, 0.0]


def test_arrays_by_hand() -> None:
    rows = [
        {"step": 1, "loss": 5.0},
        row(2, [EVEN, SKEWED], moe_dropped=[0.0, 0.2]),
        {"step": 3, "loss": 4.0, "eval_loss": 4.5, "eval_moe_load": [EVEN, EVEN]},
        row(4, [SKEWED, EVEN], moe_overflow=[0.01, 0.0]),
    ]
    load = expert_load(rows, "run")
    assert load.steps.tolist() == [2, 4]
    assert (load.num_blocks, load.num_experts) == (2, 4)
    assert load.relative.tolist() == [[[1, 1, 1, 1], [2, 1, 1, 0]], [[2, 1, 1, 0], [1, 1, 1, 1]]]
    assert load.max_over_mean.tolist() == [[1, 2], [2, 1]]
    assert load.dropped.tolist() == [[0, 0.2], [0.1, 0.1]]
    np.testing.assert_array_equal(load.overflow, [[np.nan, np.nan], [0.01, 0]])
    np.testing.assert_array_equal(load.entropy, np.full((2, 2), 0.5))


def test_shares_that_do_not_sum_to_one_are_taken_over_their_own_mean() -> None:
    """As under expert_choice, where capacity decides how many choices there are."""
    assert expert_load([row(1, [[0.6, 0.2]])], "run").relative[0, 0].tolist() == pytest.approx([1.5, 0.5])


def test_a_block_without_tokens_has_no_ratio() -> None:
    load = expert_load([row(1, [[0.0, 0.0], [0.5, 0.5]])], "run")
    np.testing.assert_array_equal(load.relative, [[[np.nan, np.nan], [1, 1]]])


def test_a_skipped_step_is_left_out() -> None:
    bad = row(2, [["nan", "nan"]], skipped=True)
    assert expert_load([row(1, [[0.5, 0.5]]), bad, row(3, [[0.5, 0.5]])], "run").steps.tolist() == [1, 3]
    with pytest.raises(ReportError, match="every row with moe_load is of a step that was skipped"):
        expert_load([bad], "run")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"step": 1, "loss": 1.0}], "a run without experts"),
        ([row(1, [EVEN]), row(2, [EVEN, EVEN])], "step 2: moe_load has 2 blocks x 4 experts, and 1 blocks x 4 experts at step 1"),
        ([row(1, [EVEN]), row(2, [[0.5, 0.5]])], "step 2: moe_load has 1 blocks x 2 experts, and 1 blocks x 4 experts at step 1"),
        ([row(1, [EVEN, [0.1, float("nan"), 0.3, float("inf")]])], "step 1: moe_load of block 1, expert 1 is nan, and 1 more"),
        ([row(7, [["inf", 0.1]])], "step 7: moe_load of block 0, expert 0 is inf"),
        ([row(7, [[-0.5, 0.1]])], "step 7: moe_load of block 0, expert 0 is -0.5"),
        ([row(1, [EVEN, [0.5, 0.5]])], "step 1: moe_load is not a list of numbers, all as long, for each block"),
        ([row(1, [EVEN]), row(2, EVEN)], "step 2: moe_load is not a list of numbers"),  # pyright: ignore[reportArgumentType]
        ([row(1, [])], "step 1: moe_load is not a list of numbers"),
        ([row(1, [EVEN], moe_dropped=[0.1, 0.2])], "moe_dropped has 2 blocks and moe_load 1"),
        ([row(1, [EVEN], moe_entropy=[float("nan")])], "step 1: moe_entropy of block 0 is nan"),
        ([row(1, [EVEN], moe_balance=1.0)], "step 1: moe_balance is not a number for each block"),
        ([row(1, [EVEN]), row(1, [EVEN])], "step 1 has two rows"),
    ],
)
def test_what_is_refused(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ReportError) as caught:
        expert_load(rows, "runs/mine")
    assert words in str(caught.value)
    assert str(caught.value).startswith("runs/mine: 1 problem")


def test_all_problems_are_told_up_to_ten() -> None:
    rows = [row(step, [[float("nan"), 0.5]]) for step in range(1, 15)]
    with pytest.raises(ReportError, match=r"14 problems") as caught:
        expert_load(rows, "run")
    assert str(caught.value).endswith("and 4 more")
    assert len(str(caught.value).splitlines()) == 12


def test_the_last_numbers_of_a_run(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0, "eval_loss": 3.5, "tokens_per_s": 10.0}, {"step": 4, "loss": "nan"}]
    reached = outcome(read_run(write_run(tmp_path / "run", rows)))
    assert (reached.step, reached.eval_loss, reached.tokens_per_s) == (4, 3.5, 10.0)
    assert reached.loss is not None
    assert np.isnan(reached.loss)
    assert outcome([{"step": 1}]) == (1, None, None, None)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "good", many(1, 1, 2))
    no_metrics = tmp_path / "runs" / "young"
    no_metrics.mkdir()
    (no_metrics / "config.yaml").write_text("name: young\n")
    (tmp_path / "empty").mkdir()
    for folder, words in (
        (tmp_path / "runs" / "god", ("no such folder; runs here:", "runs/good")),
        (tmp_path / "runs", ("not the folder of a run", "runs/good")),
        (tmp_path / "runs" / "good" / "config.yaml", ("is a file; a report needs the folder of a run",)),
        (tmp_path / "empty", ("not the folder of a run", "jaxpar report runs/NAME")),
        (no_metrics, ("no metrics yet",)),
        (write_run(tmp_path / "none", []), ("no metrics yet: not one whole row",)),
        (write_run(tmp_path / "back", [{"step": 5}, {"step": 4}]), ("row 2: step 4 after step 5",)),
        (write_run(tmp_path / "odd", [{"loss": 5}, {"step": "x"}, {"step": True}]), ("row 1: step is None", "row 2", "row 3")),
    ):
        with pytest.raises(ReportError) as caught:
            read_run(folder)
        for word in words:
            assert word in str(caught.value)


def test_a_torn_last_line_is_no_error_and_a_damaged_one_is(tmp_path: Path) -> None:
    path = write_run(tmp_path, many(2, 1, 2)) / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert [found["step"] for found in read_run(tmp_path)] == [10]
    path.write_text("{]\n" + whole)
    with pytest.raises(RecordError, match="line 1"):
        read_run(tmp_path)


def test_numbers_need_neither_jax_nor_matplotlib() -> None:
    code = "import jaxpar.report.load_text, jaxpar.report.heat_map, sys; print([m for m in ('jax', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.strip()) == []

"""Bars, words and verdicts, by hand."""

import numpy as np
import pytest

from jaxpar.core.words import percent, times
from jaxpar.report.load_text import LEVELS, PLAIN_LEVELS, bar_lines, bars, evenly_chosen, levels_for, load_lines, verdict

SKEWED = np.array([[1.0, 1.0, 1.0, 1.0], [2.4, 0.9, 0.65, 0.05]])


def test_a_full_bar_is_twice_the_mean() -> None:
    assert bars(np.arange(9) / 4) == "·▁▂▃▄▅▆▇█"
    assert bars(np.array([1.0, 0.124, 0.126, 1.87, 1.88, 7.0, np.nan])) == "▄·▁▇██·"
    assert bars(np.array([0.0, 1.0, 3.0]), PLAIN_LEVELS) == "048"


def test_experts_stand_in_groups_and_lines() -> None:
    (line,) = bar_lines(np.ones((12, 40)), [11])
    assert line == f"block 11  {'▄' * 16} {'▄' * 16} {'▄' * 8}"
    relative = np.ones((2, 130))
    relative[1, 129] = 2.0
    lines = bar_lines(relative, range(2))
    assert [line.split("  ")[0] for line in lines] == [f"block {block}, expert {start}" for block in (0, 1) for start in (0, 64, 128)]
    assert lines[-1].endswith("  ▄█")
    assert len({line.index("▄") for line in lines}) == 1


def test_lines_of_a_step() -> None:
    assert load_lines(SKEWED / 4, [0.0, 0.213]) == [
        "load of 4 experts (▄ the mean, █ twice that or more, · next to nothing)",
        "block 0  ▄▄▄▄  max 1.00 x the mean, min 1.00 x (expert 0), 0.0 % dropped",
        "block 1  █▄▃·  max 2.40 x the mean, min 0.05 x (expert 3), 21.3 % dropped",
        "block 1: expert 0 gets 2.40 x the mean; 1 of 8 experts gets less than 0.1 x the mean; "
        "21.3 % of the choices of block 1 are dropped, the most",
    ]
    assert load_lines([[0.5, 0.5]], None)[1:] == [
        "block 0  ▄▄  max 1.00 x the mean, min 1.00 x (expert 0)",
        "balanced: every expert gets 1.00 to 1.00 x the mean of its block",
    ]


def test_of_many_blocks_eight_are_shown_and_all_are_judged() -> None:
    load = np.ones((30, 4)) / 4
    load[3] = [0.7, 0.1, 0.1, 0.1]  # not among those shown
    lines = load_lines(load, None)
    assert [line.split()[1] for line in lines[1:-1]] == ["0", "4", "8", "12", "17", "21", "25", "29"]
    assert "8 of 30 blocks" in lines[0]
    assert lines[-1] == "block 3: expert 0 gets 2.80 x the mean"
    assert len(load_lines(load, None, most_blocks=30)) == 32


def test_many_experts_have_their_words_above_their_bars() -> None:
    lines = load_lines(np.ones((2, 128)), np.zeros(2))
    assert lines[1] == "block 0: max 1.00 x the mean, min 1.00 x (expert 0), 0.0 % dropped"
    assert [line[:19].strip() for line in lines[2:4]] == ["block 0, expert 0", "block 0, expert 64"]
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize(
    ("relative", "dropped", "words"),
    [
        ([[1.2, 0.8]], None, "balanced: every expert gets 0.80 to 1.20 x the mean of its block"),
        ([[1.5, 0.5]], [0.0], "block 0: expert 0 gets 1.50 x the mean"),
        ([[1.0, 1.0, 1.0], [1.3, 1.3, 0.4]], None, "block 1: expert 2 gets 0.40 x the mean"),
        ([[np.nan, np.nan]], [0.0], "no token was routed"),
        ([[np.nan, np.nan], [1.0, 1.0]], [np.nan, 0.0], "balanced: every expert gets 1.00 to 1.00 x the mean of its block"),
        (
            [[1.0, 1.0]],
            [0.25],
            "balanced: every expert gets 1.00 to 1.00 x the mean of its block; 25.0 % of the choices of block 0 are dropped",
        ),
        ([[3.92, 0.08, 0.0, 0.0]], None, "block 0: expert 0 gets 3.92 x the mean; 3 of 4 experts get less than 0.1 x the mean"),
    ],
)
def test_verdicts(relative: list[list[float]], dropped: list[float] | None, words: str) -> None:
    assert verdict(np.array(relative), None if dropped is None else np.array(dropped)) == words


def test_a_block_without_tokens_says_so() -> None:
    assert load_lines([[0.0, 0.0], [0.5, 0.5]], [np.nan, 0.0])[1] == "block 0  ··  nothing was routed"


def test_chosen_blocks() -> None:
    assert evenly_chosen(8, 8) == list(range(8))
    for count in (9, 10, 32, 61):
        chosen = evenly_chosen(count, 8)
        assert (len(set(chosen)), chosen[0], chosen[-1]) == (8, 0, count - 1)
        assert max(np.diff(chosen)) - min(np.diff(chosen)) <= 1


def test_numbers_in_words() -> None:
    assert [times(ratio) for ratio in (0.0, 2.4, 9.99, 9.999, 26.94)] == ["0.00", "2.40", "9.99", "10.0", "26.9"]
    assert [percent(fraction) for fraction in (0.0, 0.0001, 0.0006, 1.0)] == ["0.0 %", "< 0.1 %", "0.1 %", "100.0 %"]


def test_digits_where_bars_cannot_be_written() -> None:
    assert [levels_for(encoding) for encoding in ("utf-8", "ascii", "latin-1", None)] == [LEVELS, *[PLAIN_LEVELS] * 3]

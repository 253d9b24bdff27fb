"""Shares of sources, in closed form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.errors import DataError
from jaxpar.data.mixture import assign, whole_weights


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6), num=st.integers(1, 1500))
def test_counts_follow_the_weights(weights: list[int], num: int) -> None:
    total = sum(weights)
    source, number = assign(np.arange(num), weights)
    for i, weight in enumerate(weights):
        mine = source == i
        assert list(number[mine]) == list(range(mine.sum()))  # numbered without a gap, in order
        counts = np.cumsum(mine)
        assert np.abs(counts - (np.arange(num) + 1) * weight / total).max() < max(1, len(weights))
        for cycle in range(total, num + 1, total):
            assert counts[cycle - 1] == cycle // total * weight


def test_a_sample_is_known_without_those_before() -> None:
    weights = [7, 2, 1]
    source, number = assign(np.arange(1000), weights)
    picked = np.array([999, 3, 500])
    assert np.array_equal(assign(picked, weights)[0], source[picked])
    assert np.array_equal(assign(picked, weights)[1], number[picked])


def test_far_samples_do_not_overflow() -> None:
    weights = whole_weights([0.123456789, 0.876543211])
    (source,), (number,) = assign(np.array([2**32 - 1]), weights)
    exact = (2**32 - 1) * weights[0] // sum(weights)
    assert number == (exact if source == 0 else 2**32 - 1 - exact)


def test_weights_are_exact_in_decimal() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_weights([3.0]) == [1]
    assert whole_weights([1e-3, 2.0]) == [1, 2000]
    with pytest.raises(DataError, match="too many digits; round them"):
        whole_weights([0.1234567891234, 1.0])

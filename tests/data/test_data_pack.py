"""Inputs, targets, weights, positions and segments against a row written out token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.pack import pack


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), padding=st.integers(0, 4), isolate=st.booleans())
def test_rows(lengths: list[int], padding: int, isolate: bool) -> None:
    owners = [i + 1 for i, length in enumerate(lengths) for _ in range(length)] + [0] * (padding + 1)
    tokens = np.arange(len(owners)) + 10
    batch = pack(tokens[None], np.array(owners)[None], isolate_documents=isolate)
    begun: dict[int, int] = {}
    for s in range(len(owners) - 1):
        here, after = owners[s], owners[s + 1]
        begun.setdefault(here, s)
        assert batch["tokens"][0, s] == (tokens[s] if here else 0)
        assert batch["targets"][0, s] == (tokens[s + 1] if after else 0)
        assert batch["weights"][0, s] == (here == after != 0 if isolate else here != 0 and after != 0)
        assert batch["segments"][0, s] == (here if isolate else min(here, 1))
        assert batch["positions"][0, s] == (s - begun[here] if isolate else s)
    assert {key: value.dtype.name for key, value in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "positions": "int32",
        "segments": "int32",
    }


def test_targets_are_shifted_before_the_sequence_is_split() -> None:
    """CTX-03: tokens 1-8 over two context shards: 2 3 4 5 | 6 7 8 none, seven counted."""
    window = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 99]])
    batch = pack(window, np.array([[1] * 8 + [0]]), isolate_documents=True)
    assert batch["targets"].reshape(2, 4).tolist() == [[2, 3, 4, 5], [6, 7, 8, 0]]
    assert batch["weights"].reshape(2, 4).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]

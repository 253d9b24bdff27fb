"""Law L2: which tokens are in which row."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config.data import DataConfig
from jaxpar.data.corpus import Corpus
from jaxpar.data.hashing import mix, permute
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.order import Stream
from jaxpar.data.store import ArrayStore

LENGTHS = [5, 2, 3, 1, 40, 7, 7, 19, 1, 30]
MIXTURE = {
    "mixture": ({"source": "synthetic", "weight": 0.7, "num_tokens": 5000}, {"source": "synthetic", "weight": 0.3, "num_tokens": 9000})
}


def _stream(lengths: list[int], *, seq_len: int, eod: int | None, seed: int = 0) -> Stream:
    lengths_N = np.array(lengths)
    starts_N = np.cumsum(lengths_N) - lengths_N
    corpus = Corpus("numbered", ArrayStore(np.arange(lengths_N.sum()) + 1), starts_N, lengths_N, mix(np.arange(len(lengths))), 0, "")
    return Stream(corpus, seed=seed, seq_len=seq_len, eod=eod)


def _mixed(seed: int = 3) -> Dataset:
    config = DataConfig.model_validate({**MIXTURE, "seq_len": 16, "global_batch_size": 8, "eval_fraction": 0.1})
    return open_dataset(config, seed=seed, vocab_size=500)


def _equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def test_splitmix64_reference() -> None:
    """First output of the reference implementation (Vigna, splitmix64.c) from state 0."""
    assert int(mix(0)[0]) == 0xE220A8397B1DCDAF


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_order_of_numpy_is_that_of_whole_numbers() -> None:
    """Hash and permutation written again in Python's integers: no word size, version or platform enters the data order."""
    mask = (1 << 64) - 1

    def python_mix(*parts: int) -> int:
        hashed = 0
        for part in parts:
            hashed = ((hashed ^ part) + 0x9E3779B97F4A7C15) & mask
            hashed = ((hashed ^ (hashed >> 30)) * 0xBF58476D1CE4E5B9) & mask
            hashed = ((hashed ^ (hashed >> 27)) * 0x94D049BB133111EB) & mask
            hashed ^= hashed >> 31
        return hashed

    def python_permute(index: int, bits: int, size: int, *key: int) -> int:
        left, right = index >> bits, index & ((1 << bits) - 1)
        for number in range(4):
            left, right = right, left ^ (python_mix(python_mix(*key), number, right) & ((1 << bits) - 1))
        image = (left << bits) | right
        return image if image < size else python_permute(image, bits, size, *key)

    for size, bits in ((5, 2), (16, 2), (17, 3), (1000, 5), (70_000, 9)):
        indexes = np.arange(min(size, 300))
        expected = [python_permute(int(i), bits, size, 11, 12) for i in indexes]
        assert permute(indexes, size, 11, 12).tolist() == expected


def test_permutation_scatters() -> None:
    """Neighbours are sent apart: the correlation of index and image is that of random numbers."""
    image = permute(np.arange(10_000), 10_000, 7)
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05
    assert np.abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    seq_len=st.integers(1, 40),
    eod=st.sampled_from([None, 0]),
    seed=st.integers(0, 5),
    starts=st.lists(st.integers(0, 400), min_size=1, max_size=5),
)
def test_windows_equal_a_naive_stream(lengths: list[int], seq_len: int, eod: int | None, seed: int, starts: list[int]) -> None:
    """Against the stream written out token by token."""
    stream = _stream(lengths, seq_len=seq_len, eod=eod, seed=seed)
    documents = np.split(np.arange(sum(lengths)) + 1, np.cumsum(lengths)[:-1])
    tokens: list[int] = []
    owners: list[int] = []
    for epoch in itertools.count():
        bits = mix(seed, 1, epoch, np.arange(len(lengths))).tolist()
        order = sorted(range(len(lengths)), key=bits.__getitem__)
        for document in order:
            text = [*map(int, documents[document]), *([] if eod is None else [eod])]
            tokens += text
            owners += [owners[-1] + 1 if owners else 0] * len(text)
        if len(tokens) > max(starts) + seq_len + 1:
            break
    window_BW, segments_BW = stream.windows(np.array(starts))
    for row, start in enumerate(starts):
        part = slice(start, start + seq_len + 1)
        assert list(window_BW[row]) == tokens[part]
        assert list(segments_BW[row]) == [owner - owners[start] + 1 for owner in owners[part]]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), seq_len=st.integers(1, 60), seed=st.integers(0, 5))
def test_no_token_is_lost(lengths: list[int], seq_len: int, seed: int) -> None:
    """Samples are the windows of the stream, each once: over k epochs every token is an input k times (DAT-12)."""
    stream = _stream(lengths, seq_len=seq_len, eod=0, seed=seed)
    starts = stream.starts(np.arange(stream.epoch_tokens))  # seq_len epochs exactly
    assert sorted(starts) == list(range(0, stream.epoch_tokens * seq_len, seq_len))
    seen = np.bincount(stream.windows(starts)[0][:, :-1].ravel(), minlength=sum(lengths) + 1)
    assert seen[0] == seq_len * len(lengths)
    assert (seen[1:] == seq_len).all()


@pytest.mark.parametrize(("lengths", "seq_len"), [([5, 2, 3, 1], 4), ([100], 16), ([2] * 40, 64)])
def test_long_and_short_documents(corpus: Callable[..., Dataset], lengths: list[int], seq_len: int) -> None:
    """DAT-12 (documents longer than a row), DAT-14 (many in one): every token is shown, and isolated ones never cross."""
    dataset = corpus(lengths, seq_len=seq_len, eod_token=0, batch=1)
    inputs: list[int] = []
    for batch in dataset.eval_batches():
        inputs += list(batch["tokens"][batch["segments"] > 0])
        assert batch["weights"].sum() > 0
    assert sorted(inputs) == sorted([*range(1, sum(lengths) + 1), *[0] * len(lengths)])
    assert "none dropped" in dataset.describe()


def test_many_segments_in_a_row(corpus: Callable[..., Dataset]) -> None:
    """DAT-14: no maximum of segments is compiled in; 80 tokens, three with its end each, 21 documents a row of 64."""
    batch = corpus([2] * 40, seq_len=64, eod_token=0, batch=1).batch(0)
    assert batch["segments"].max() in (22, 23)
    assert batch["positions"].max() == 2


def test_epochs_have_other_orders(corpus: Callable[..., Dataset]) -> None:
    dataset = corpus([8] * 64, seq_len=8, batch=64)
    first, second = dataset.batch(0)["tokens"], dataset.batch(1)["tokens"]
    assert sorted(first.ravel()) == sorted(second.ravel()) == list(range(1, 513))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, corpus([8] * 64, seq_len=8, batch=64, seed=1).batch(0)["tokens"])


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_hosts_share_one_batch(num_hosts: int) -> None:
    """PRC-09: rows are disjoint, together the batch of one host, bitwise."""
    rows = 8 // num_hosts
    for step in range(5):
        whole = _mixed().batch(step)
        parts = [_mixed().batch(step, host * rows, (host + 1) * rows) for host in range(num_hosts)]
        assert _equal(whole, {key: np.concatenate([part[key] for part in parts]) for key in whole})
        assert list(whole["samples"]) == list(range(step * 8, step * 8 + 8))


def test_hosts_together_see_an_epoch(corpus: Callable[..., Dataset]) -> None:
    """PRC-09: the union over processes and steps is the corpus, each token once."""
    datasets = [corpus([8] * 32, seq_len=8, batch=8) for _ in range(4)]
    seen = [
        token
        for step in range(4)
        for host, one in enumerate(datasets)
        for token in one.batch(step, host * 2, host * 2 + 2)["tokens"].ravel()
    ]
    assert sorted(seen) == list(range(1, 257))


def test_restart_goes_on(corpus: Callable[..., Dataset]) -> None:
    """RES-01: shards, straight against resumed at step 7."""
    straight = list(itertools.islice(corpus(LENGTHS, seq_len=8).iterate(0), 20))
    resumed = list(itertools.islice(corpus(LENGTHS, seq_len=8).iterate(7), 13))
    assert all(_equal(one, other) for one, other in zip(straight[7:], resumed, strict=True))


def test_batch_size_changed_on_resume(corpus: Callable[..., Dataset]) -> None:
    """RES-05: ten steps of 8, then batches of 16 go on with sample 80; nothing skipped, nothing twice."""
    small, large = corpus(LENGTHS, seq_len=8, batch=8), corpus(LENGTHS, seq_len=8, batch=16)
    assert small.fingerprint() == large.fingerprint()
    resumed = large.iterate(10, first_sample=80)
    first, second = next(resumed), next(resumed)
    assert list(first["samples"]) == list(range(80, 96))
    assert list(second["samples"]) == list(range(96, 112))
    assert np.array_equal(first["tokens"], np.concatenate([small.batch(10)["tokens"], small.batch(11)["tokens"]]))


def test_evaluation_leaves_training_alone() -> None:
    """RES-10."""
    plain, watched = _mixed(), _mixed()
    config = plain.config
    evaluation = open_dataset(config, seed=3, vocab_size=500, split="eval")
    for step in range(6):
        list(evaluation.eval_batches())
        assert _equal(plain.batch(step), watched.batch(step))

"""The held-out part, and the fixed set that is evaluated."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config.data import DataConfig
from jaxpar.data.errors import DataError
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.sources import Split


def _text(tmp_path: Path, count: int, split: Split, fraction: float = 0.3, **more: object) -> Dataset:
    for i in range(count):
        (tmp_path / f"{i:02}.txt").write_text(f"document number {i}, nothing else")
    fields = {"source": "text", "path": str(tmp_path), "seq_len": 8, "global_batch_size": 4, "eval_fraction": fraction, **more}
    return open_dataset(DataConfig.model_validate(fields), seed=0, vocab_size=257, split=split)


def _documents(dataset: Dataset) -> set[bytes]:
    rows = [list(batch["tokens"][row][batch["segments"][row] > 0]) for batch in dataset.eval_batches() for row in range(4)]
    return {bytes(row) for row in rows}


def test_every_document_is_in_one_split(tmp_path: Path) -> None:
    train, held = _text(tmp_path, 40, "train"), _text(tmp_path, 40, "eval")
    counts = [stream.corpus.num_documents for dataset in (train, held) for stream in dataset.streams]
    assert sum(counts) == 40
    assert 4 <= counts[1] <= 20
    keys = [set(dataset.streams[0].corpus.keys_N.tolist()) for dataset in (train, held)]
    assert not keys[0] & keys[1]


def test_split_is_by_content(tmp_path: Path) -> None:
    """Copies of a document fall on the same side, and new files move no other."""
    for folder, count in (("few", 20), ("many", 40)):
        (tmp_path / folder).mkdir()
        _text(tmp_path / folder, count, "train")
    few, many = (
        set(_text(tmp_path / folder, count, "eval").streams[0].corpus.keys_N.tolist()) for folder, count in (("few", 20), ("many", 40))
    )
    assert few < many


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_each_example_counts_once(corpus: Callable[..., Dataset], num_hosts: int) -> None:
    """MET-01: ten sequences with losses 1 to 10 in batches of 4: the weighted mean is 5.5, the last batch is filled with weight 0."""
    dataset = corpus([9] * 10, seq_len=9, batch=4)
    rows = 4 // num_hosts
    total, weight, ids = 0.0, 0.0, []
    for host in range(num_hosts):
        batches = list(dataset.eval_batches(host * rows, (host + 1) * rows))
        assert [batch["tokens"].shape for batch in batches] == [(rows, 9)] * 3
        for batch in batches:
            losses = (batch["tokens"] - 1) // 9 + 1  # of document n: n
            total += float((losses * batch["weights"]).sum())
            weight += float(batch["weights"].sum())
            ids += batch["samples"].tolist()
    assert (total / weight, weight) == (5.5, 80)
    assert sorted(ids) == list(range(12))


def test_evaluation_is_the_same_each_time(corpus: Callable[..., Dataset]) -> None:
    """RES-11: a part of the set, twice, with training between; the same for another seed of the run."""
    dataset, other = corpus([9] * 40, seq_len=9), corpus([9] * 40, seq_len=9, seed=5, split="train")
    first = [batch["samples"].tolist() for batch in dataset.eval_batches(limit=3)]
    tokens = [batch["tokens"].tolist() for batch in dataset.eval_batches(limit=3)]
    dataset.batch(17)
    assert [batch["samples"].tolist() for batch in dataset.eval_batches(limit=3)] == first
    assert [batch["tokens"].tolist() for batch in dataset.eval_batches(limit=3)] == tokens
    assert (dataset.num_eval_batches(3), dataset.num_eval_batches(), other.num_eval_batches(99)) == (3, 10, 10)


def test_evaluation_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    config = _text(tmp_path, 40, "eval").config
    one, two = (open_dataset(config, seed=seed, vocab_size=257, split="eval") for seed in (0, 9))
    for first, second in zip(one.eval_batches(), two.eval_batches(), strict=True):
        assert np.array_equal(first["tokens"], second["tokens"])


def test_eval_path_holds_out_files(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val.txt").write_text("held out")
    train = _text(tmp_path / "train", 5, "train", eval_path=str(tmp_path / "val.txt"))
    held = open_dataset(train.config, seed=0, vocab_size=257, split="eval")
    assert train.streams[0].corpus.num_documents == 5
    assert _documents(held) == {b"held out", b""}


def test_nothing_held_out(tmp_path: Path) -> None:
    """DAT-06: one document cannot be divided; the message says what to set, and that works."""
    with pytest.raises(DataError, match=r"nothing is held out.*1 document.*data\.eval_path.*data\.piece_tokens.*data\.eval_fraction=0"):
        _text(tmp_path, 1, "eval", 1e-9)
    assert _text(tmp_path, 1, "train", 0.5, piece_tokens=2).num_tokens > 0
    assert _text(tmp_path, 1, "eval", 0.5, piece_tokens=2).num_tokens > 0


def test_too_small_a_fraction_names_one_that_works(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="would hold out one") as caught:
        _text(tmp_path, 10, "eval", 1e-9)
    fraction = float(str(caught.value).split("data.eval_fraction=")[1].split()[0])
    assert _text(tmp_path, 10, "eval", fraction).streams[0].corpus.num_documents >= 1


def test_everything_held_out(tmp_path: Path) -> None:
    """DAT-06: the only document is taken for evaluation."""
    with pytest.raises(DataError, match="nothing is left to train on"):
        _text(tmp_path, 1, "train", 1 - 1e-12)


def test_no_evaluation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.eval_fraction is 0 and no eval_path"):
        _text(tmp_path, 3, "eval", 0.0)


def test_mixture_evaluates_all_parts_once() -> None:
    parts = ({"source": "synthetic", "num_tokens": 9000}, {"source": "synthetic", "num_tokens": 4000, "weight": 9})
    fields = {"mixture": parts, "seq_len": 64, "global_batch_size": 4, "eval_fraction": 0.4, "isolate_documents": False}
    dataset = open_dataset(DataConfig.model_validate(fields), seed=1, vocab_size=100, split="eval")
    shown = sum(int((batch["segments"] > 0).sum()) for batch in dataset.eval_batches())
    targets = sum(int(batch["weights"].sum()) for batch in dataset.eval_batches())
    inputs_never_shown = sum((stream.epoch_tokens - 1) % 64 == 0 for stream in dataset.streams)  # a last token that begins no row
    assert shown == dataset.num_tokens - inputs_never_shown
    assert targets == dataset.num_tokens - 2

"""Tokenizers, cache, background iteration, fingerprints."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxpar.config.data import DataConfig
from jaxpar.data.errors import DataError
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.tokenizer import load_tokenizer

WORDS = ["the", "cat", "sat", "on", "mat"]


def _word_tokenizer(path: Path, special: list[str]) -> Path:
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate([*WORDS, "[UNK]"])}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    return path


def _config(tmp_path: Path, text: str = "the cat sat on the mat", **settings: object) -> DataConfig:
    (tmp_path / "text").mkdir(exist_ok=True)
    for i in range(12):
        (tmp_path / "text" / f"{i:02}.txt").write_text(f"{text} {i}")
    fields = {"source": "text", "path": str(tmp_path / "text"), "seq_len": 8, "global_batch_size": 4, "eval_fraction": 0.0, **settings}
    return DataConfig.model_validate(fields)


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("naïve 😀\n")
    assert ids.tolist() == list("naïve 😀\n".encode())
    assert tokenizer.decode(np.append(ids, 256)) == "naïve 😀\n"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_tokenizer_file(tmp_path: Path) -> None:
    path = _word_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (7, 6)
    assert tokenizer.decode(tokenizer.encode("the mat")) == "the mat"
    assert load_tokenizer(str(tmp_path)).fingerprint() == tokenizer.fingerprint()
    dataset = open_dataset(_config(tmp_path, tokenizer=str(path)), seed=0, vocab_size=7)
    assert dataset.num_tokens == 12 * 8
    assert sorted(dataset.batch(0)["tokens"].ravel())[:4] == [0] * 4
    assert (dataset.batch(0)["tokens"] == 6).sum() in (3, 4)


def test_long_documents_are_tokenised_in_pieces(tmp_path: Path) -> None:
    path = _word_tokenizer(tmp_path / "tokenizer.json", ["</s>"])
    text = "the cat sat on the mat " * 100_000
    (tmp_path / "long.txt").write_text(text)
    config = DataConfig(
        source="text", path=str(tmp_path / "long.txt"), tokenizer=str(path), seq_len=8, global_batch_size=4, eval_fraction=0
    )
    assert open_dataset(config, seed=0, vocab_size=7).num_tokens == 600_001


def test_end_of_document(tmp_path: Path) -> None:
    path = str(_word_tokenizer(tmp_path / "tokenizer.json", ["<fin>", "<begin>"]))
    with pytest.raises(DataError, match=r"data\.eod_token: .*none of .*is in its vocabulary; .*special ones: <begin>, <fin>"):
        load_tokenizer(path)
    with pytest.raises(DataError, match=r"'<end>' is not in its vocabulary.*<begin>, <fin>"):
        load_tokenizer(path, "<end>")
    with pytest.raises(DataError, match="99 is no id"):
        load_tokenizer(path, 99)
    assert load_tokenizer(path, "<fin>").eod == 6
    assert load_tokenizer(path, 3).eod == 3
    with pytest.raises(DataError, match="bytes have no named tokens"):
        load_tokenizer("bytes", "</s>")


def test_tokenizer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer: nowhere\.json: no such file; give 'bytes' or"):
        load_tokenizer("nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'jaxpar\[hf\]'"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_missing_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    config = DataConfig(source="jsonl", path=str(tmp_path), seq_len=8, global_batch_size=4)
    with pytest.raises(DataError, match=r"pip install 'jaxpar\[zstd\]'"):
        open_dataset(config, seed=0, vocab_size=257)


def test_vocabulary_too_small(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab_size 256 is too small for tokenizer bytes .*at least 257"):
        open_dataset(_config(tmp_path), seed=0, vocab_size=256)


def test_batch_shapes_and_types(corpus: Callable[..., Dataset]) -> None:
    batch = corpus([50] * 10, seq_len=16).batch(2, 1, 3)
    assert {key: (value.shape, value.dtype.name) for key, value in batch.items()} == {
        "tokens": ((2, 16), "int32"),
        "targets": ((2, 16), "int32"),
        "weights": ((2, 16), "float32"),
        "positions": ((2, 16), "int32"),
        "segments": ((2, 16), "int32"),
        "samples": ((2,), "uint32"),
    }
    assert batch["samples"].tolist() == [9, 10]


def test_rows_and_samples_out_of_range(corpus: Callable[..., Dataset]) -> None:
    dataset = corpus([50] * 10, seq_len=16)
    with pytest.raises(DataError, match=r"rows 0 to 5 are not within the batch: data\.global_batch_size is 4"):
        dataset.batch(0, 0, 5)
    with pytest.raises(DataError, match=r"beyond 2\^32 rows"):
        dataset.batch(2**30)
    assert dataset.batch(2**30 - 1)["samples"].max() == 2**32 - 1


def test_iteration_in_the_background(corpus: Callable[..., Dataset]) -> None:
    dataset = corpus([50] * 10, seq_len=16, prefetch=3)
    iterator = dataset.iterate(5, 1, 3)
    for step, batch in enumerate(itertools.islice(iterator, 6), 5):
        expected = dataset.batch(step, 1, 3)
        assert all(np.array_equal(batch[key], expected[key]) and batch[key].dtype == expected[key].dtype for key in expected)
    assert any("grain" in thread.name for thread in threading.enumerate())
    iterator.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_errors_come_out_of_the_background(corpus: Callable[..., Dataset]) -> None:
    """PRC-06 begins here: what fails on the thread is raised where batches are taken, as it was."""
    iterator = corpus([50] * 10, seq_len=16).iterate(2**30 - 1)
    next(iterator)
    with pytest.raises(DataError, match=r"beyond 2\^32 rows"):
        next(iterator)


def test_cache_is_used_and_mended(tmp_path: Path) -> None:
    config, cache = _config(tmp_path), tmp_path / "cache"
    seen: list[int] = []

    def fresh() -> tuple[Dataset, bool]:
        seen.clear()
        dataset = open_dataset(config, seed=0, vocab_size=257, cache_dir=cache, progress=lambda _, tokens: seen.append(tokens))
        return dataset, bool(seen)

    first, read = fresh()
    assert read
    again, read = fresh()
    assert not read
    expected = first.batch(3)["tokens"].copy()
    assert np.array_equal(again.batch(3)["tokens"], expected)
    tokens, index = sorted(cache.iterdir(), key=lambda file: file.suffix != ".tokens")
    for damaged in (tokens, index):
        damaged.write_bytes(damaged.read_bytes()[:-10])
        mended, read = fresh()
        assert read
        assert np.array_equal(mended.batch(3)["tokens"], expected)
    (tmp_path / "text" / "00.txt").write_text("changed")
    changed, read = fresh()
    assert read
    assert changed.fingerprint() != first.fingerprint()
    assert not list(cache.glob("*.partial"))


def test_a_failed_read_leaves_no_cache(tmp_path: Path) -> None:
    config, cache = _config(tmp_path), tmp_path / "cache"
    (tmp_path / "text" / "11.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"11\.txt: invalid UTF-8"):
        open_dataset(config, seed=0, vocab_size=257, cache_dir=cache)
    assert not list(cache.iterdir())


def test_fingerprint_is_of_content(tmp_path: Path) -> None:
    """The same when files move or are touched or the batch changes; another for other tokens, order, rows."""
    base = open_dataset(_config(tmp_path), seed=0, vocab_size=257)
    (tmp_path / "text").rename(tmp_path / "moved")
    os.utime(tmp_path / "moved" / "00.txt", (0, 0))
    moved = base.config.model_copy(update={"path": str(tmp_path / "moved"), "global_batch_size": 99, "prefetch": 7})
    assert open_dataset(moved, seed=0, vocab_size=257).fingerprint() == base.fingerprint()
    others = [(moved, 1), (moved.model_copy(update={"seq_len": 9}), 0), (moved.model_copy(update={"piece_tokens": 5}), 0)]
    others += [(moved.model_copy(update={"eval_fraction": 0.3}), 0), (moved.model_copy(update={"eod_token": 0}), 0)]
    prints = [open_dataset(config, seed=seed, vocab_size=257).fingerprint() for config, seed in others]
    assert len({base.fingerprint(), *prints}) == 6


def test_mixture_shares_and_description(tmp_path: Path) -> None:
    text = {"source": "text", "path": str(tmp_path / "text"), "weight": 1}
    _config(tmp_path)
    fields = {"mixture": (text, {"source": "synthetic", "weight": 3}), "seq_len": 8, "global_batch_size": 4, "eval_fraction": 0.0}
    dataset = open_dataset(DataConfig.model_validate(fields), seed=0, vocab_size=1000)
    ids = np.concatenate([dataset.batch(step)["tokens"] for step in range(25)])
    from_text = (ids < 257).all(axis=1)
    assert from_text.sum() in range(25, 30)  # exactly 25 rows of text; a synthetic row may look like one
    assert "25 % of the samples" in dataset.describe()
    assert "75 % of the samples" in dataset.describe()


def test_synthetic_is_cheap_and_skewed() -> None:
    config = DataConfig(source="synthetic", seq_len=256, global_batch_size=64, num_tokens=10**12, eval_fraction=0)
    with pytest.raises(DataError):
        open_dataset(config.model_copy(update={"eod_token": 600}), seed=0, vocab_size=512)
    small = config.model_copy(update={"num_tokens": 10**6})
    tokens = open_dataset(small, seed=0, vocab_size=512).batch(0)["tokens"]
    assert (tokens.min(), tokens.max()) == (0, 511)
    counts = np.bincount(tokens.ravel(), minlength=512)
    share = counts[:128].sum() / counts.sum()  # P(u^2 < 1/4) = 1/2
    assert abs(share - 0.5) < 0.02
    assert not np.array_equal(tokens, open_dataset(small, seed=1, vocab_size=512).batch(0)["tokens"])


def test_no_jax_and_no_heavy_import() -> None:
    """Opening and cutting batches needs neither JAX nor Grain: start-up is paid once, elsewhere."""
    program = (
        "import sys\n"
        "from jaxpar.config.data import DataConfig\n"
        "from jaxpar.data.loader import open_dataset\n"
        "open_dataset(DataConfig(source='synthetic', seq_len=8, global_batch_size=2), seed=0, vocab_size=99).batch(0)\n"
        "print([name for name in ('jax', 'grain', 'tokenizers', 'zstandard') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

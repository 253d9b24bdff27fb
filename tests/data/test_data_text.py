"""Text, JSONL and standard-library sources: what is read, and what is said about what cannot be."""

import gzip
import json
import os
import sysconfig
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from jaxpar.config.data import DataConfig
from jaxpar.data.documents import PIECE_BYTES, read_pieces
from jaxpar.data.errors import DataError
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.text import stdlib_files


def _open(path: Path | str | tuple[str, ...], source: str = "text", cache_dir: Path | None = None, **settings: object) -> Dataset:
    paths = path if isinstance(path, tuple) else str(path)
    fields = {"source": source, "path": paths, "seq_len": 8, "global_batch_size": 2, "eval_fraction": 0.0, **settings}
    return open_dataset(DataConfig.model_validate(fields), seed=0, vocab_size=257, cache_dir=cache_dir)


def _documents(dataset: Dataset) -> list[bytes]:
    corpus = dataset.streams[0].corpus
    spans = zip(corpus.starts_N, corpus.lengths_N, strict=True)
    return [corpus.store.gather(np.arange(start, start + length)).astype(np.uint8).tobytes() for start, length in spans]


def test_files_folders_patterns(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "a.txt", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _documents(_open(tmp_path / "b")) == [b"b/1.txt", b"b/2.txt"]
    assert _documents(_open(tmp_path / "**" / "*.txt")) == [b"a.txt", b"b/1.txt", b"b/2.txt"]
    assert _documents(_open((str(tmp_path / "c.md"), str(tmp_path / "a.txt")))) == [b"c.md", b"a.txt"]
    for missing in ("none.txt", "*.rst"):
        with pytest.raises(DataError, match="no such file or folder, and no file matches"):
            _open(tmp_path / missing)
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="no files in this folder"):
        _open(tmp_path / "void")


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\xef\xbb\xbf")
    assert _documents(_open(tmp_path / "a.txt")) == [b"one\r\ntwo\xef\xbb\xbf"]


@pytest.mark.parametrize("place", [0, 5, PIECE_BYTES - 1, PIECE_BYTES + 7, 3 * PIECE_BYTES])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_invalid_utf8(tmp_path: Path, place: int, mark: bytes) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(mark + b"x" * place + b"\xe9" + b"y" * 10)
    with pytest.raises(DataError, match=rf"bad\.txt: invalid UTF-8 at byte {len(mark) + place} \(0xe9\).*encoding_errors=replace"):
        _open(path)
    (text,) = _documents(_open(path, encoding_errors="replace"))
    assert text.decode() == "x" * place + "\ufffd" + "y" * 10


def test_utf16_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", encoding="utf-16")
    with pytest.raises(DataError, match="looks like UTF-16"):
        _open(tmp_path / "a.txt")


@pytest.mark.parametrize("unit", ["é", "漢字 ", "x" * 50 + "\n", "😀"])
def test_pieces_are_whole_characters_before_white_space(tmp_path: Path, unit: str) -> None:
    text = unit * (3 * PIECE_BYTES // len(unit.encode()))
    (tmp_path / "a.txt").write_text(text)
    pieces = [piece.decode() for piece in read_pieces(tmp_path / "a.txt", "strict")]
    assert "".join(pieces) == text
    assert len(pieces) >= 3
    if unit.isspace() or unit[-1] in " \n":
        assert all(piece[0] == unit[-1] for piece in pieces[1:])


@pytest.mark.parametrize("texts", [["", "ab", "c"], ["ab", "", "c"], ["ab", "c", ""]])
def test_empty_documents_are_skipped_and_counted(tmp_path: Path, texts: list[str]) -> None:
    """DAT-08: empty first, in the middle, last."""
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    dataset = _open(tmp_path)
    assert _documents(dataset) == [b"ab", b"c"]
    assert "2 documents, 1 empty ones skipped" in dataset.describe()
    batch = dataset.batch(0)
    assert set(batch["tokens"].ravel().tolist()) == {*b"abc", 256}


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_nothing_left(tmp_path: Path, content: bytes) -> None:
    for i in range(2):
        (tmp_path / f"{i}.txt").write_bytes(content)
    with pytest.raises(DataError, match="no tokens: 2 documents found, all of them empty"):
        _open(tmp_path)


def test_jsonl_lines(tmp_path: Path) -> None:
    """DAT-09: blank and space-only lines, CRLF, BOM, other line separators in a string, no final newline."""
    text = '\ufeff{"text": "one"}\r\n\r\n   \n{"text": "two\u2028\u0085 b", "id": 4}\n\n{"id": 5, "text": "three"}'
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    frames = zstandard.ZstdCompressor().compress(text.encode()[:40]) + zstandard.ZstdCompressor().compress(text.encode()[40:])
    (tmp_path / "c.jsonl.zst").write_bytes(frames)
    (tmp_path / "d.txt").write_text("not read")
    expected = [b"one", "two\u2028\u0085 b".encode(), b"three"]
    assert _documents(_open(tmp_path, "jsonl")) == expected * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"content": "x", "id": 1}', r"line 2: no field 'text' \(data\.field\); found: 'content', 'id'"),  # DAT-11
        (b"{}", "line 2: no field 'text'.*found: none"),
        (b'{"text": 5}', "line 2: field 'text' must be text, found int"),
        (b'["text"]', "line 2: a JSON object is needed, found list"),
        (b'{"text": "x"', "line 2: not a JSON object on one line"),
        (b'{"text": "\xff"}', r"line 2: invalid UTF-8 at byte 28 \(0xff\)"),
        (b'{"text": "\\ud800"}', "line 2: field 'text' holds half of a surrogate pair"),
    ],
)
def test_jsonl_errors(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        _open(tmp_path / "a.jsonl", "jsonl")


def test_jsonl_replace(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "a\xffb"}\n{"body": "a\\ud800b"}')
    assert _documents(_open(tmp_path / "a.jsonl", "jsonl", field="body", encoding_errors="replace")) == ["a\ufffdb".encode()] * 2


def test_jsonl_empty(tmp_path: Path) -> None:
    """DAT-06: an empty shard among three is skipped with a warning; alone it is an error."""
    for name, text in (("a", '{"text": "x"}\n'), ("b", ""), ("c", '{"text": "y"}\n')):
        (tmp_path / f"{name}.jsonl").write_text(text)
    with pytest.warns(UserWarning, match=r"b\.jsonl is empty: skipped"):
        assert _documents(_open(tmp_path, "jsonl")) == [b"x", b"y"]
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(DataError, match="no documents"):
        _open(tmp_path / "b.jsonl", "jsonl")
    (tmp_path / "b.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="no documents"):
        _open(tmp_path / "b.jsonl", "jsonl")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_damaged_archives(tmp_path: Path, suffix: str, damage: str) -> None:
    text = b"".join(json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(500))
    packed = gzip.compress(text) if suffix == "gz" else zstandard.ZstdCompressor().compress(text)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed[:-30] if damage == "truncated" else b"garbage")
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix}: (damaged|truncated)"):
        _open(path, "jsonl")


def test_a_line_of_200_megabytes(tmp_path: Path) -> None:
    """One line, no white space, two-byte characters: read in pieces, memory stays far below the file's size."""
    path = tmp_path / "line.txt"
    block = ("aé" * 333_333).encode()
    with path.open("wb") as stream:
        for _ in range(200):
            stream.write(block)
    tracemalloc.start()
    dataset = _open(path, cache_dir=tmp_path / "cache")
    dataset.batch(0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dataset.num_tokens == 200 * len(block) + 1
    assert peak_bytes < 40 << 20


def test_standard_library(tmp_path: Path) -> None:
    folder, files = stdlib_files()
    names = [file.relative_to(folder).as_posix() for file in files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "idle_test", "__pycache__"} & set(name.split("/"))]
    assert len(names) > 400
    fields = {"source": "stdlib", "seq_len": 256, "global_batch_size": 16}
    train, held = (
        open_dataset(DataConfig.model_validate(fields), seed=0, vocab_size=257, split=split, cache_dir=tmp_path)
        for split in ("train", "eval")
    )
    assert f"standard library of Python {sysconfig.get_python_version()}." in train.describe()
    assert train.num_tokens > 50 * held.num_tokens / 3 > 100_000
    assert held.num_eval_batches(8) == 8
    total = sum(file.stat().st_size for file in files)
    nonempty = sum(file.stat().st_size > 0 for file in files)
    assert train.num_tokens + held.num_tokens == total + nonempty


@pytest.mark.parametrize("source", ["text", "jsonl", "tokens"])
def test_missing_settings(source: str) -> None:
    sizes = {"seq_len": 8, "global_batch_size": 2}
    with pytest.raises(DataError, match=rf"data\.path: source '{source}' reads files: set path"):
        open_dataset(DataConfig.model_validate({"source": source, **sizes}), seed=0, vocab_size=257)
    with pytest.raises(DataError, match=r"no source: set data\.source, or several under data\.mixture"):
        open_dataset(DataConfig.model_validate(sizes), seed=0, vocab_size=257)

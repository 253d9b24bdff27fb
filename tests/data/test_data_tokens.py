"""Token files: formats byte for byte, and every way they can be wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config.data import DataConfig
from jaxpar.data.errors import DataError
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.megatron import read_megatron, write_megatron


def _open(path: Path | str | tuple[str, ...], vocab_size: int = 1000, cache_dir: Path | None = None, **settings: object) -> Dataset:
    paths = path if isinstance(path, tuple) else str(path)
    fields = {"source": "tokens", "path": paths, "seq_len": 4, "global_batch_size": 2, "eval_fraction": 0.0, **settings}
    return open_dataset(DataConfig.model_validate(fields), seed=0, vocab_size=vocab_size, cache_dir=cache_dir)


def _documents(dataset: Dataset) -> list[list[int]]:
    corpus = dataset.streams[0].corpus
    spans = zip(corpus.starts_N, corpus.lengths_N, strict=True)
    return [corpus.store.gather(np.arange(start, start + length)).tolist() for start, length in spans]


def _golden(code: int, pack: str, lengths: list[int], bounds: list[int], width: int) -> bytes:
    """The .idx as the format table has it, written field by field."""
    offsets = [width * sum(lengths[:i]) for i in range(len(lengths))]
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    content += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *offsets)
    assert len(struct.pack(f"<{pack}", 0)) == width
    return content + struct.pack(f"<{len(bounds)}q", *bounds)


@pytest.mark.parametrize(("vocab_size", "code", "pack", "width"), [(65499, 8, "H", 2), (65500, 4, "i", 4)])
def test_megatron_bytes(tmp_path: Path, vocab_size: int, code: int, pack: str, width: int) -> None:
    documents = [[[5, 6, 7], [8]], [[9, 60000]], [[1, 2, 3, 4]]]
    write_megatron(tmp_path / "golden_text_document", ([np.array(part) for part in document] for document in documents), vocab_size)
    bin_path = tmp_path / "golden_text_document.bin"
    tokens = [5, 6, 7, 8, 9, 60000, 1, 2, 3, 4]
    assert bin_path.read_bytes() == struct.pack(f"<10{pack}", *tokens)
    assert bin_path.with_suffix(".idx").read_bytes() == _golden(code, pack, [3, 1, 2, 4], [0, 2, 3, 4], width)
    read = read_megatron(bin_path)
    assert (read.starts_N.tolist(), read.lengths_N.tolist(), read.tokens.map().tolist()) == ([0, 4, 6], [4, 2, 4], tokens)


@pytest.mark.parametrize(("code", "pack", "width"), [(1, "B", 1), (2, "b", 1), (3, "h", 2), (4, "i", 4), (5, "q", 8), (8, "H", 2)])
def test_megatron_widths(tmp_path: Path, code: int, pack: str, width: int) -> None:
    """Every code of token ids; named by .bin, .idx or prefix; with modes as multimodal data has them."""
    (tmp_path / "a.bin").write_bytes(struct.pack(f"<6{pack}", 1, 2, 0, 4, 5, 6))
    (tmp_path / "a.idx").write_bytes(_golden(code, pack, [3, 0, 3], [0, 1, 2, 3], width) + bytes(3))
    for name in ("a.bin", "a.idx", "a", "a.*", ""):
        dataset = _open(tmp_path / name)
        assert _documents(dataset) == [[1, 2, 0], [4, 5, 6]]
        assert "1 empty ones skipped" in dataset.describe()
    assert _documents(_open(tmp_path / "a", eod_token=0)) == [[1, 2], [4, 5, 6]]  # an end that the file holds is not doubled


def test_megatron_damage(tmp_path: Path) -> None:
    """Truncated .bin or .idx, wrong magic, version, code, bounds, offsets; each file is named."""
    whole = _golden(4, "i", [3, 3], [0, 1, 2], 4)
    bin_path, idx_path = tmp_path / "a.bin", tmp_path / "a.idx"
    bin_path.write_bytes(struct.pack("<6i", *range(6)))
    offsets_at = 34 + 8
    cases = [
        (b"", "not a Megatron index"),
        (b"TNTIDX\x00\x00" + whole[8:], "not a Megatron index: it must begin with"),
        (whole[:9] + struct.pack("<Q", 2) + whole[17:], "version 2 of the Megatron index"),
        (whole[:17] + b"\x07" + whole[18:], "dtype code 7 is not one of token ids"),
        (whole[:-3], r"truncated or damaged: \d+ bytes; 2 sequences need"),
        (whole[:-8] + struct.pack("<q", 1), "document bounds must rise from 0 to 2"),
        (whole[:offsets_at] + struct.pack("<qq", 0, 13) + whole[offsets_at + 16 :], r"a\.bin: truncated or not the file of a\.idx"),
        (whole[:offsets_at] + struct.pack("<qq", 0, 11) + whole[offsets_at + 16 :], r"a\.idx: damaged: the sequences"),
    ]
    for content, message in cases:
        idx_path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            _open(bin_path)
    idx_path.write_bytes(whole)
    bin_path.write_bytes(struct.pack("<6i", *range(6))[:-5])
    with pytest.raises(DataError, match=r"a\.bin: truncated or not the file of a\.idx: 19 bytes, the index needs 24"):
        _open(bin_path)
    bin_path.unlink()
    with pytest.raises(DataError, match=r"a\.bin: missing; its index a\.idx is there"):
        _open(idx_path)


def test_negative_ids(tmp_path: Path) -> None:
    """DAT-01: label -1 or -100 in a signed file is no token."""
    (tmp_path / "a.bin").write_bytes(struct.pack("<3i", 1, -100, 5))
    (tmp_path / "a.idx").write_bytes(_golden(4, "i", [3], [0, 1], 4))
    with pytest.raises(DataError, match=r"a\.bin: id -100 at offset 1 \(byte 4\) is outside the vocabulary 0 to 999"):
        _open(tmp_path / "a.bin")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_headerless(tmp_path: Path, dtype: str) -> None:
    """nanoGPT's train.bin: as it is without eod_token, cut into documents with it."""
    ids = [7, 8, 50, 50, 9, 50, 3]
    (tmp_path / "a.bin").write_bytes(np.array(ids, f"<{dtype[0]}{int(dtype[4:]) // 8}").tobytes())
    assert _documents(_open(tmp_path / "a.bin", dtype=dtype)) == [ids]
    dataset = _open(tmp_path / "a.bin", dtype=dtype, eod_token=50)
    assert _documents(dataset) == [[7, 8], [9], [3]]
    assert "3 documents, 1 empty ones skipped" in dataset.describe()
    shown = [token for batch in dataset.eval_batches() for token in batch["tokens"][batch["segments"] > 0].tolist()]
    assert sorted(shown) == [3, 7, 8, 9, 50, 50, 50]


def test_without_separator_documents_follow_each_other(tmp_path: Path) -> None:
    """Exactly the file's tokens, in its order, when nothing says what ends a document."""
    ids = np.arange(1, 41, dtype="<u2")
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    dataset = _open(tmp_path / "a.bin")
    rows = np.concatenate([dataset.batch(step)["tokens"] for step in range(5)])
    assert rows[np.argsort(rows[:, 0])].tolist() == ids.reshape(10, 4).tolist()


def test_llmc_header(tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5
    (tmp_path / "a.bin").write_bytes(header.tobytes() + struct.pack("<5H", 4, 5, 6, 7, 8))
    assert _documents(_open(tmp_path / "a.bin")) == [[4, 5, 6, 7, 8]]
    (tmp_path / "a.bin").write_bytes(header.tobytes() + struct.pack("<4H", 4, 5, 6, 7))
    with pytest.raises(DataError, match=r"a\.bin: truncated or damaged: 1032 bytes; its llm\.c header says 5 tokens: 1034 bytes"):
        _open(tmp_path / "a.bin")


def test_id_outside_the_vocabulary(tmp_path: Path) -> None:
    """DAT-01: file, offset and id."""
    ids = np.arange(2000, dtype="<u2") % 256
    ids[1000] = 256
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    with pytest.raises(
        DataError, match=r"a\.bin: id 256 at offset 1000 \(byte 2000\) is outside the vocabulary 0 to 255; set model\.vocab_size.*257"
    ):
        _open(tmp_path / "a.bin", 256)
    assert _open(tmp_path / "a.bin", 257).num_tokens == 2000


def test_wrong_width(tmp_path: Path) -> None:
    """DAT-03: 32 bits read as 16 and the reverse."""
    ids = np.random.default_rng(0).integers(0, 900, 1000)
    (tmp_path / "wide.bin").write_bytes(ids.astype("<u4").tobytes())
    (tmp_path / "narrow.bin").write_bytes(ids.astype("<u2").tobytes())
    with pytest.raises(DataError, match=r"wide\.bin.*set data\.dtype=uint32"):
        _open(tmp_path / "wide.bin")
    with pytest.raises(DataError, match=r"narrow\.bin: id \d+ at offset \d+ .*data\.dtype=uint16"):
        _open(tmp_path / "narrow.bin", dtype="uint32")
    assert _open(tmp_path / "wide.bin", dtype="uint32").num_tokens == _open(tmp_path / "narrow.bin").num_tokens == 1000


def test_odd_length(tmp_path: Path) -> None:
    """DAT-04."""
    (tmp_path / "a.bin").write_bytes(bytes(1001))
    with pytest.raises(DataError, match=r"a\.bin: 1001 bytes is no multiple of 2 \(uint16\)"):
        _open(tmp_path / "a.bin")


def test_empty_shards(tmp_path: Path) -> None:
    """DAT-06: the empty one in the middle is skipped with a warning, all other ids are seen; alone it is an error."""
    for name, ids in (("a", [1, 2, 3]), ("b", []), ("c", [4, 5])):
        (tmp_path / f"{name}.bin").write_bytes(np.array(ids, "<u2").tobytes())
    with pytest.warns(UserWarning, match=r"b\.bin is empty: skipped"):
        dataset = _open(tmp_path)
    assert _documents(dataset) == [[1, 2, 3], [4, 5]]
    assert {1, 2, 3, 4, 5} == set(dataset.batch(0)["tokens"].ravel().tolist())
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(DataError, match="no tokens"):
        _open(tmp_path / "b.bin")


def test_many_shards_stay_within_file_descriptors(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"{i:03}.bin").write_bytes(np.array([2 * i + 1, 2 * i + 2], "<u2").tobytes())
    dataset = _open(tmp_path, global_batch_size=150)
    assert sorted(dataset.batch(0)["tokens"].ravel()) == list(range(1, 601))


def test_one_file_is_cut_into_pieces(tmp_path: Path) -> None:
    """piece_tokens: a file without documents can be shuffled and held out; the pieces are the file."""
    (tmp_path / "a.bin").write_bytes(np.arange(1, 96, dtype="<u2").tobytes())
    config = DataConfig(source="tokens", path=str(tmp_path / "a.bin"), seq_len=4, global_batch_size=2, eval_fraction=1e-9)
    with pytest.raises(DataError, match=r"data\.piece_tokens"):
        open_dataset(config, seed=0, vocab_size=1000, split="eval")
    pieces = _documents(_open(tmp_path / "a.bin", piece_tokens=10))
    assert [len(piece) for piece in pieces] == [10] * 9 + [5]
    assert sum(pieces, []) == list(range(1, 96))  # noqa: RUF017


def test_index_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.bin", tmp_path / "cache"
    path.write_bytes(np.arange(100, dtype="<u2").tobytes())
    first = _open(path, cache_dir=cache)
    assert len(list(cache.iterdir())) == 1
    assert _open(path, cache_dir=cache).fingerprint() == first.fingerprint()
    with pytest.raises(DataError, match="id 99 at offset 99"):
        _open(path, 50, cache_dir=cache)
    path.write_bytes(np.arange(120, dtype="<u2").tobytes())
    changed = _open(path, cache_dir=cache)
    assert (changed.num_tokens, len(list(cache.iterdir()))) == (120, 2)
    assert changed.fingerprint() != first.fingerprint()

"""Source `tokens`: files of token ids, mapped where they lie: headerless (nanoGPT), llm.c, Megatron .bin/.idx."""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxpar.data.cache import CacheEntry, Progress
from jaxpar.data.corpus import Corpus
from jaxpar.data.errors import DataError
from jaxpar.data.files import expand
from jaxpar.data.hashing import mix
from jaxpar.data.megatron import read_megatron
from jaxpar.data.store import FileStore, TokenFile

_SCAN_TOKENS = 1 << 22
_SAMPLE_BYTES = 1 << 16
_LLMC_MAGIC, _LLMC_HEADER_BYTES = 20240520, 1024  # llm.c: 256 int32: magic, version 1, number of tokens; then uint16


@dataclass(frozen=True)
class _FileIndex:
    """One file: its documents, and its lowest and highest id with their offsets (in tokens)."""

    starts_N: Int[np.ndarray, " N"]
    lengths_N: Int[np.ndarray, " N"]
    extremes: Int[np.ndarray, "4"]


def token_paths(paths: str | tuple[str, ...]) -> list[Path]:
    """Files of tokens; a Megatron dataset may be named by its .bin, its .idx or the prefix of both."""
    entries = (paths,) if isinstance(paths, str) else paths
    named = [f"{entry}.bin" if not Path(entry).exists() and Path(f"{entry}.idx").is_file() else entry for entry in entries]
    files = [file.with_suffix(".bin") if file.suffix == ".idx" else file for file in expand(tuple(named), (".bin", ".idx"))]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: missing; its index {file.with_suffix('.idx').name} is there")
    return list(dict.fromkeys(files))


def token_corpus(files: list[Path], dtype: str, eod: int | None, vocab_size: int, entry: CacheEntry, progress: Progress | None) -> Corpus:
    """Documents of files of ids. eod: the id that ends a document in them; None: a headerless file is one document.

    DataError names file, offset and id where an id is outside the vocabulary, and what does not fit in size or width.
    """
    opened = [_open(file, np.dtype(dtype)) for file in files]
    arrays = entry.load()
    if arrays is None:
        arrays = _scan_all(opened, eod, progress)
        entry.save(arrays)
    for (tokens, _), extremes in zip(opened, arrays["extremes"], strict=True):
        _check_range(tokens, extremes, vocab_size)
    hashes = [_sample_hash(tokens) for tokens, _ in opened]
    ordinals = [np.arange(count) for count in arrays["counts"]]
    return Corpus(
        name=f"tokens in {files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""),
        store=FileStore([tokens for tokens, _ in opened]),
        starts_N=arrays["starts"],
        lengths_N=arrays["lengths"],
        keys_N=np.concatenate([mix(value, ordinal) for value, ordinal in zip(hashes, ordinals, strict=True)]),
        num_empty=0,
        fingerprint=hashlib.blake2b(repr([hashes, dtype, eod]).encode(), digest_size=16).hexdigest(),
    )


def _open(path: Path, dtype: np.dtype) -> tuple[TokenFile, tuple[np.ndarray, np.ndarray] | None]:
    """The file's tokens, and its documents where it says them."""
    if path.with_suffix(".idx").is_file():
        megatron = read_megatron(path)
        return megatron.tokens, (megatron.starts_N, megatron.lengths_N)
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    if header[0] == _LLMC_MAGIC and header[1] == 1:
        num_tokens = int(header[2])
        if size_bytes != _LLMC_HEADER_BYTES + 2 * num_tokens:
            expected = _LLMC_HEADER_BYTES + 2 * num_tokens
            raise DataError(
                f"{path}: truncated or damaged: {size_bytes} bytes; its llm.c header says {num_tokens} tokens: {expected} bytes"
            )
        return TokenFile(path, np.dtype("<u2"), num_tokens, _LLMC_HEADER_BYTES), None
    if size_bytes % dtype.itemsize:
        raise DataError(
            f"{path}: {size_bytes} bytes is no multiple of {dtype.itemsize} ({dtype.name}): truncated, or not data.dtype={dtype.name}"
        )
    tokens = TokenFile(path, dtype.newbyteorder("<"), size_bytes // dtype.itemsize)
    if size_bytes == 0:
        warnings.warn(f"{path} is empty: skipped", stacklevel=2)
    elif dtype.itemsize == 2:
        _check_width(tokens)
    return tokens, None


def _check_width(tokens: TokenFile) -> None:
    """Ids of 32 bits read as 16 show as pairs (low half, high half), the high half of any real vocabulary below 16."""
    sample = tokens.map()[:_SCAN_TOKENS]
    low, high = sample[0::2], sample[1::2]
    if len(sample) >= 64 and len(sample) % 2 == 0 and high.max() < 16 <= low.max():
        raise DataError(f"{tokens.path}: every second id is below 16: it looks like uint32; set data.dtype=uint32 (now uint16)")


def _scan_all(
    opened: list[tuple[TokenFile, tuple[np.ndarray, np.ndarray] | None]], eod: int | None, progress: Progress | None
) -> dict[str, np.ndarray]:
    indexes: list[_FileIndex] = []
    base = 0
    for tokens, documents in opened:
        index = _scan(tokens, documents, eod, progress)
        indexes.append(_FileIndex(index.starts_N + base, index.lengths_N, index.extremes))
        base += tokens.num_tokens
    return {
        "starts": np.concatenate([index.starts_N for index in indexes]),
        "lengths": np.concatenate([index.lengths_N for index in indexes]),
        "counts": np.array([len(index.lengths_N) for index in indexes]),
        "extremes": np.stack([index.extremes for index in indexes]),
    }


def _scan(tokens: TokenFile, documents: tuple[np.ndarray, np.ndarray] | None, eod: int | None, progress: Progress | None) -> _FileIndex:
    """One pass over the file: range of ids, and ends of documents. An end is no part of its document here."""
    ids = tokens.map()
    low, low_at, high, high_at = 0, 0, -1, 0
    ends: list[np.ndarray] = []
    for start in range(0, tokens.num_tokens, _SCAN_TOKENS):
        chunk = ids[start : start + _SCAN_TOKENS]
        if (lowest := int(chunk.min())) < low:
            low, low_at = lowest, start + int(chunk.argmin())
        if (highest := int(chunk.max())) > high:
            high, high_at = highest, start + int(chunk.argmax())
        if documents is None and eod is not None:
            ends.append(np.flatnonzero(chunk == eod) + start)
        if progress:
            progress(str(tokens.path), start + len(chunk))
    extremes = np.array([low, low_at, high, high_at])
    if documents is not None:
        starts_N, lengths_N = documents
        if eod is not None and len(ids):
            last_N = np.clip(starts_N + lengths_N - 1, 0, len(ids) - 1)
            lengths_N = lengths_N - ((lengths_N > 0) & (ids[last_N] == eod))
        return _FileIndex(starts_N, lengths_N, extremes)
    ends_N = np.concatenate([*ends, np.zeros(0, np.int64)])
    if len(ends_N) == 0 or ends_N[-1] != tokens.num_tokens - 1:
        ends_N = np.append(ends_N, tokens.num_tokens)
    starts_N = np.concatenate([[0], ends_N[:-1] + 1])
    return _FileIndex(starts_N, ends_N - starts_N, extremes)


def _check_range(tokens: TokenFile, extremes: np.ndarray, vocab_size: int) -> None:
    low, low_at, high, high_at = map(int, extremes)
    if low >= 0 and high < vocab_size:
        return
    found, offset = (low, low_at) if low < 0 else (high, high_at)
    byte = tokens.first_byte + offset * tokens.dtype.itemsize
    narrow = " or, if it was written as uint16, data.dtype=uint16" if tokens.dtype.name == "uint32" and high > 1 << 16 else ""
    raise DataError(
        f"{tokens.path}: id {found} at offset {offset} (byte {byte}) is outside the vocabulary 0 to {vocab_size - 1}; "
        f"set model.vocab_size to at least {high + 1}{narrow}, or mend the file"
    )


def _sample_hash(tokens: TokenFile) -> int:
    """A hash of length, head and tail: cheap for files of any size, the same wherever the file lies."""
    size_bytes = tokens.first_byte + tokens.num_tokens * tokens.dtype.itemsize
    digest = hashlib.blake2b(str(size_bytes).encode(), digest_size=8)
    with tokens.path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(size_bytes - _SAMPLE_BYTES, 0))
        digest.update(stream.read(_SAMPLE_BYTES))
    return int.from_bytes(digest.digest(), "little")

"""The indexed dataset of Megatron-LM: `<prefix>.bin` (tokens) and `<prefix>.idx`, little-endian.

.idx: b"MMIDIDX\\0\\0", u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1, i32 tokens of each sequence, i64 its byte
offset in .bin, i64 document bounds in sequences, and for multimodal data i8 a mode of each sequence. Source: Megatron-LM,
megatron/core/datasets/indexed_dataset.py (read 2026).
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer

from jaxpar.data.errors import DataError
from jaxpar.data.store import TokenFile

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_HEADER = struct.Struct("<QBQQ")
_SMALL_VOCAB = 65500  # Megatron-LM stores smaller vocabularies as u16, larger ones as i32


@dataclass(frozen=True)
class MegatronFile:
    """tokens: the whole .bin. starts_N, lengths_N: its documents, in tokens."""

    tokens: TokenFile
    starts_N: Int[np.ndarray, " N"]
    lengths_N: Int[np.ndarray, " N"]


def read_megatron(bin_path: Path) -> MegatronFile:
    """Parse the .idx beside `bin_path` and check it against the .bin. DataError says what does not fit."""
    idx_path = bin_path.with_suffix(".idx")
    dtype, lengths_S, offsets_S, bounds_D = _read_index(idx_path)
    size_bytes = bin_path.stat().st_size
    ends_S = offsets_S + lengths_S.astype(np.int64) * dtype.itemsize
    needed_bytes = int(ends_S.max(initial=0))
    if needed_bytes > size_bytes or size_bytes % dtype.itemsize:
        raise DataError(f"{bin_path}: truncated or not the file of {idx_path.name}: {size_bytes} bytes, the index needs {needed_bytes}")
    if (np.diff(bounds_D) < 0).any() or bounds_D[0] != 0 or bounds_D[-1] != len(lengths_S):
        raise DataError(f"{idx_path}: damaged: document bounds must rise from 0 to {len(lengths_S)} sequences")
    within_document = np.ones(len(lengths_S), bool)
    within_document[bounds_D[:-1][bounds_D[:-1] < len(lengths_S)]] = False
    apart = within_document[1:] & (offsets_S[1:] != ends_S[:-1])
    if apart.any() or (offsets_S % dtype.itemsize).any() or (offsets_S < 0).any() or (lengths_S < 0).any():
        raise DataError(f"{idx_path}: damaged: the sequences of a document must lie one after the other in {bin_path.name}")
    first_N, counts_N = bounds_D[:-1], np.diff(bounds_D)
    cumulative = np.concatenate([[0], np.cumsum(lengths_S, dtype=np.int64)])
    starts_N = np.zeros(len(first_N), np.int64)
    starts_N[counts_N > 0] = offsets_S[first_N[counts_N > 0]] // dtype.itemsize
    tokens = TokenFile(bin_path, dtype, size_bytes // dtype.itemsize)
    return MegatronFile(tokens, starts_N, cumulative[bounds_D[1:]] - cumulative[first_N])


def write_megatron(prefix: Path, documents: Iterable[Iterable[Integer[np.ndarray, " N"]]], vocab_size: int) -> None:
    """Write documents, each of one or more sequences, as Megatron-LM would for this vocabulary size."""
    code = 8 if vocab_size < _SMALL_VOCAB else 4
    dtype = np.dtype(_DTYPES[code])
    lengths: list[int] = []
    bounds = [0]
    with prefix.with_name(prefix.name + ".bin").open("wb") as stream:
        for document in documents:
            for sequence in document:
                stream.write(sequence.astype(dtype).data)
                lengths.append(len(sequence))
            bounds.append(len(lengths))
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    lengths_S = np.array(lengths, "<i4")
    with prefix.with_name(prefix.name + ".idx").open("wb") as stream:
        stream.write(_MAGIC + _HEADER.pack(1, code, len(lengths), len(bounds)))
        for array in (lengths_S, (ends - lengths_S.astype(np.int64) * dtype.itemsize).astype("<i8"), np.array(bounds, "<i8")):
            stream.write(array.data)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    start = len(_MAGIC) + _HEADER.size
    if len(content) < start or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise DataError(f"{path}: not a Megatron index: it must begin with {_MAGIC!r}, found {content[: len(_MAGIC)].tobytes()!r}")
    version, code, num_sequences, num_bounds = _HEADER.unpack(content[len(_MAGIC) : start].tobytes())
    if version != 1:
        raise DataError(f"{path}: version {version} of the Megatron index; only version 1 is known")
    if code not in _DTYPES or _DTYPES[code][1] == "f":
        raise DataError(f"{path}: dtype code {code} is not one of token ids (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16)")
    expected_bytes = start + 12 * num_sequences + 8 * num_bounds
    if num_bounds < 1 or len(content) not in (expected_bytes, expected_bytes + num_sequences):  # with or without modes
        raise DataError(f"{path}: truncated or damaged: {len(content)} bytes; {num_sequences} sequences need {expected_bytes}")

    def take(count: int, dtype: str) -> np.ndarray:
        nonlocal start
        begin, start = start, start + count * np.dtype(dtype).itemsize
        return np.frombuffer(content[begin:start].tobytes(), dtype)

    return np.dtype(_DTYPES[code]), take(num_sequences, "<i4"), take(num_sequences, "<i8"), take(num_bounds, "<i8")

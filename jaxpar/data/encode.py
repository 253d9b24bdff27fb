"""Documents of text -> corpus: every document is tokenised once, its tokens appended to one file."""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxpar.data.cache import CacheEntry, Progress, whole_file
from jaxpar.data.corpus import Corpus
from jaxpar.data.documents import Document
from jaxpar.data.errors import DataError
from jaxpar.data.store import ArrayStore
from jaxpar.data.tokenizer import Tokenizer

_GROUP_BYTES = 4 << 20  # text handed to the tokenizer at once, which it spreads over its threads


def encode_corpus(name: str, documents: Iterable[Document], tokenizer: Tokenizer, entry: CacheEntry, progress: Progress | None) -> Corpus:
    """The corpus of `documents`, from the cache when it is there. Memory does not grow with the text."""
    path = entry.path(".tokens")
    arrays = entry.load()
    if path is None:
        with tempfile.TemporaryFile() as stream:
            arrays = _encode_all(name, documents, tokenizer, stream, progress)
            stream.flush()
            tokens_N = _map(stream, stream.tell(), tokenizer)
    else:
        if arrays is None or not _is_whole(path, arrays, tokenizer):
            with whole_file(path) as stream:
                arrays = _encode_all(name, documents, tokenizer, stream, progress)
            entry.save(arrays)
        tokens_N = _map(path, path.stat().st_size, tokenizer)
    lengths_N = arrays["lengths"]
    return Corpus(
        name=name,
        store=ArrayStore(tokens_N),
        starts_N=np.cumsum(lengths_N) - lengths_N,
        lengths_N=lengths_N,
        keys_N=arrays["keys"],
        num_empty=0,
        fingerprint=str(arrays["fingerprint"]),
    )


def _encode_all(
    name: str, documents: Iterable[Document], tokenizer: Tokenizer, stream: BinaryIO, progress: Progress | None
) -> dict[str, np.ndarray]:
    lengths: list[int] = []
    keys: list[int] = []
    whole = hashlib.blake2b(digest_size=16)
    num_tokens = 0
    for group in _groups(documents, lengths, keys, whole):
        for document, ids_N in zip((number for number, _ in group), tokenizer.encode_many([piece for _, piece in group]), strict=True):
            stream.write(ids_N.data)
            lengths[document] += len(ids_N)
            num_tokens += len(ids_N)
        if progress:
            progress(name, num_tokens)
    if not lengths:
        raise DataError(f"{name}: no documents in it; give data.path a file with text in it")
    return {"lengths": np.array(lengths, np.int64), "keys": np.array(keys, np.uint64), "fingerprint": np.array(whole.hexdigest())}


def _groups(
    documents: Iterable[Document], lengths: list[int], keys: list[int], whole: hashlib.blake2b
) -> Iterator[list[tuple[int, bytes]]]:
    """Pieces with the number of their document, some megabytes at a time; fills in keys as documents end."""
    group: list[tuple[int, bytes]] = []
    size = 0
    for number, document in enumerate(documents):
        content = hashlib.blake2b(digest_size=8)
        lengths.append(0)
        for piece in document.pieces:
            content.update(piece)
            group.append((number, piece))
            size += len(piece)
            if size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
        digest = content.digest()
        whole.update(digest)
        key = digest if document.key is None else hashlib.blake2b(document.key, digest_size=8).digest()
        keys.append(int.from_bytes(key, "little"))
    yield group


def _map(file: Path | BinaryIO, size_bytes: int, tokenizer: Tokenizer) -> np.ndarray:
    """The file's tokens; the map stays when an open file is closed."""
    if size_bytes == 0:
        return np.zeros(0, tokenizer.storage_dtype)
    return np.asarray(np.memmap(file, tokenizer.storage_dtype, "r"))


def _is_whole(path: Path, arrays: dict[str, np.ndarray], tokenizer: Tokenizer) -> bool:
    expected_bytes = int(arrays["lengths"].sum()) * np.dtype(tokenizer.storage_dtype).itemsize
    return path.is_file() and path.stat().st_size == expected_bytes

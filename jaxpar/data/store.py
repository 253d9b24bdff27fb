"""Where tokens lie: stores answer for any flat index, whatever files are behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

_MAX_OPEN_MAPS = 256  # each holds a file descriptor; the usual limit is 1024 a process


@runtime_checkable
class Store(Protocol):
    """A long run of tokens."""

    def gather(self, index_N: Int[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
        """Tokens at flat positions."""
        ...


@dataclass(frozen=True)
class TokenFile:
    """A run of tokens in a file. first_byte: length of the header; num_tokens: how many follow it."""

    path: Path
    dtype: np.dtype
    num_tokens: int
    first_byte: int = 0

    def map(self) -> Integer[np.ndarray, " N"]:
        """The tokens, read from disk as they are touched."""
        if self.num_tokens == 0:
            return np.zeros(0, self.dtype)
        # A plain array over the map: np.memmap's own indexing is several times slower.
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.first_byte, (self.num_tokens,)))


class ArrayStore:
    """Tokens in one array (in memory, or mapped)."""

    def __init__(self, tokens_N: Integer[np.ndarray, " N"]):
        self._tokens_N = tokens_N

    def gather(self, index_N: Int[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
        return self._tokens_N[index_N]


class FileStore:
    """Files one after the other, mapped when first touched."""

    def __init__(self, files: Sequence[TokenFile]):
        self._bases = np.cumsum([0, *(file.num_tokens for file in files)])
        self._map = lru_cache(maxsize=_MAX_OPEN_MAPS)(lambda i: files[i].map())

    def gather(self, index_N: Int[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
        file_N = np.searchsorted(self._bases, index_N, "right") - 1
        tokens_N = np.empty(len(index_N), np.int64)
        for i in np.unique(file_N):
            mine = file_N == i
            tokens_N[mine] = self._map(int(i))[index_N[mine] - self._bases[i]]
        return tokens_N

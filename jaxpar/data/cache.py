"""Indexes and tokens kept beside the run, so that a second start reads no text."""

import hashlib
import json
import os
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

_FORMAT = 1  # raised when what is stored changes: old entries are then made anew

Progress = Callable[[str, int], None]  # name of the source, tokens read so far; called about once per million tokens


@dataclass(frozen=True)
class CacheEntry:
    """Files of one source under `stem`; None: nothing is kept."""

    stem: Path | None

    def path(self, suffix: str) -> Path | None:
        return self.stem and self.stem.with_name(self.stem.name + suffix)

    def load(self) -> dict[str, np.ndarray] | None:
        """The arrays saved; None when there are none, or they are damaged (they are then made again from the source)."""
        path = self.path(".index.npz")
        if path is None or not path.is_file():
            return None
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError):
            return None

    def save(self, arrays: dict[str, np.ndarray]) -> None:
        if path := self.path(".index.npz"):
            with whole_file(path) as stream:
                np.savez(stream, allow_pickle=False, **arrays)


def cache_entry(cache_dir: Path | None, kind: str, facts: Sequence[object]) -> CacheEntry:
    """The entry for a source with these facts (files, sizes, times, settings): any other facts have another entry."""
    if cache_dir is None:
        return CacheEntry(None)
    cache_dir.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(json.dumps([_FORMAT, *facts]).encode(), digest_size=8).hexdigest()
    return CacheEntry(cache_dir / f"{kind}-{digest}")


def file_facts(files: Sequence[Path]) -> list[list[object]]:
    """What tells a changed file: path, size, time of change."""
    return [[str(file.resolve()), (status := file.stat()).st_size, status.st_mtime_ns] for file in files]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that others see whole or not at all, also when several processes write it at once."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

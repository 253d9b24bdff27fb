"""What a checkpoint must contain: shape and dtype of every array, size and CRC-32 of every file.

Orbax casts dtypes in silence on restore and lists a step whose data file was emptied; with the manifest both are errors.
"""

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.core.tree import LeafType

FILE = "manifest.json"
FORMAT = 1  # raised when a reader of today could misread what is written
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """Size and CRC-32 of a file."""

    num_bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`."""

    step: int
    arrays: dict[str, LeafType]
    files: dict[str, FileEntry]  # path in the checkpoint -> entry

    def as_text(self) -> str:
        arrays = {name: {"shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in self.arrays.items()}
        files = {name: {"bytes": entry.num_bytes, "crc32": entry.crc32} for name, entry in self.files.items()}
        return json.dumps({"format": FORMAT, "step": self.step, "arrays": arrays, "files": files}, indent=1)


def file_entry(path: Path, *, sync: bool = False) -> FileEntry:
    """Read a file once. sync: wait until it is on the disk, not only in the kernel's cache."""
    num_bytes, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            num_bytes += len(block)
            crc = zlib.crc32(block, crc)
        if sync:
            os.fsync(file.fileno())
    return FileEntry(num_bytes, f"{crc:08x}")


def scan_files(folder: Path, *, sync: bool = False) -> dict[str, FileEntry]:
    """Entries of every file below `folder`, read by four threads (CRC-32 and reads leave Python's lock)."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    with ThreadPoolExecutor(4) as pool:
        entries = pool.map(lambda path: file_entry(path, sync=sync), paths)
        return {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries, strict=True)}


def read_manifest(folder: Path) -> Manifest:
    """Manifest of a checkpoint folder; CheckpointError where it is missing or not one."""
    try:
        return _parse(json.loads((folder / FILE).read_text()))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder / FILE} is missing: the folder is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {type(error).__name__}: {error}") from error


def _parse(raw: dict[str, Any]) -> Manifest:
    if raw["format"] != FORMAT:
        raise ValueError(f"written in format {raw['format']}, this version of jaxpar reads {FORMAT}")
    return Manifest(
        step=raw["step"],
        arrays={name: LeafType(tuple(leaf["shape"]), leaf["dtype"]) for name, leaf in raw["arrays"].items()},
        files={name: FileEntry(entry["bytes"], entry["crc32"]) for name, entry in raw["files"].items()},
    )


def damaged_files(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> list[str]:
    """One line for each file that is missing, of another size or of other content. part of parts: share of the content to read."""
    lines = []
    present = {name: folder / name for name in manifest.files if (folder / name).is_file()}
    for name, entry in manifest.files.items():
        if name not in present:
            lines.append(f"{name} is missing")
        elif (size := present[name].stat().st_size) != entry.num_bytes:
            lines.append(f"{name} has {size} bytes, {entry.num_bytes} were written")
            del present[name]
    mine = sorted(present)[part::parts]
    with ThreadPoolExecutor(4) as pool:
        for name, found in zip(mine, pool.map(lambda name: file_entry(present[name]), mine), strict=True):
            if found != manifest.files[name]:
                lines.append(f"{name} has other content than was written (CRC-32 {found.crc32}, not {manifest.files[name].crc32})")
    return lines

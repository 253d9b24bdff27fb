"""Sources `text` (files of the user) and `stdlib` (the source of the running Python): one document a file."""

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jaxpar.data.documents import Document, read_pieces
from jaxpar.data.errors import DataError

# Folders of the standard library that hold no library source: tests (some in odd encodings on purpose) and what users install.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_name() -> str:
    """What the `stdlib` source is on this machine: its text differs by version."""
    return f"standard library of Python {platform.python_version()}"


def stdlib_files() -> tuple[Path, list[Path]]:
    """The standard library's folder and its *.py files, sorted by relative path. DataError when Python has no source there."""
    folder = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        # _sysconfigdata is written when Python is built and names that machine's paths: left out, as it differs between builds.
        kept += [Path(where, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    if not kept:
        raise DataError(f"data.source: stdlib: {folder} holds no *.py files (a Python without its source?); use source: text with a path")
    return folder, sorted(kept, key=lambda file: file.relative_to(folder).as_posix())


def read_stdlib(folder: Path, files: list[Path]) -> Iterator[Document]:
    """One document a module, held out by its path so that versions of Python hold out the same modules."""
    for file in files:
        yield Document(str(file), read_pieces(file, "strict"), file.relative_to(folder).as_posix().encode())


def read_text(files: list[Path], errors: str) -> Iterator[Document]:
    """One document a file."""
    for file in files:
        yield Document(str(file), read_pieces(file, errors))

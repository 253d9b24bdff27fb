"""Paths of the config -> files, always in the same order."""

import glob
from pathlib import Path

from jaxpar.data.errors import DataError


def expand(paths: str | tuple[str, ...], suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Files that `paths` (files, folders, patterns) name; those of a folder or pattern sorted by relative path.

    suffixes: in folders, only files that end so (empty: every file). Hidden files of folders are left out. DataError
    when an entry names nothing.
    """
    files: list[Path] = []
    for entry in (paths,) if isinstance(paths, str) else paths:
        path = Path(entry).expanduser()
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = [file for file in _walk(path) if not suffixes or file.name.endswith(suffixes)]
        else:
            found = [file for name in sorted(glob.glob(str(path), recursive=True)) if (file := Path(name)).is_file()]
        if not found:
            wanted = f" that end in {' or '.join(suffixes)}" if suffixes and path.is_dir() else ""
            reason = f"no files{wanted} in this folder" if path.is_dir() else "no such file or folder, and no file matches it as a pattern"
            raise DataError(f"data.path: {entry}: {reason} (relative paths start at {Path.cwd()})")
        files += found
    return files


def _walk(folder: Path) -> list[Path]:
    relative = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return [folder / file for file in sorted(relative, key=Path.as_posix) if not any(part.startswith(".") for part in file.parts)]

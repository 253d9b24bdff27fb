"""The folder of a run's checkpoints: which steps are there, what may be deleted, whether more will fit.

<folder>/<step>/{meta.json, manifest.json, state/}. Anything called `tmp.*` is unfinished or on its way out, and never a checkpoint.
"""

import os
import shutil
import time
from pathlib import Path

from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.config.train import CheckpointConfig
from jaxpar.core.words import size

TEMPORARY = "tmp."
_WRITERS_STOP_S, _QUIET_S, _LOOK_S = 30.0, 0.5, 0.05


def saved_steps(folder: Path) -> dict[int, Path]:
    """Step -> its folder, in numeric order. Whole or not: a name is enough, so that a damaged one is met, not passed over."""
    if not folder.is_dir():
        return {}
    found = {int(path.name): path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()}
    return dict(sorted(found.items()))


def temporary(folder: Path, step: int) -> Path:
    """Where a step is written until it is whole."""
    return folder / f"{TEMPORARY}{step}"


def remove_temporary(folder: Path) -> None:
    """Remove what a killed run left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_failed(folder: Path) -> None:
    """Remove what a failed save has written; returns when it stays away, or after half a minute.

    Orbax raises the first failure while its other writers are at work: on a full disk their files came again in 2 of 24 runs.
    """
    deadline = time.monotonic() + _WRITERS_STOP_S
    seen = time.monotonic()
    while (now := time.monotonic()) < min(seen + _QUIET_S, deadline):
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            seen = now
        time.sleep(_LOOK_S)


def sync_folder(folder: Path) -> None:
    """Wait until names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """`sync_folder` for a folder and all below it."""
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)


def steps_to_delete(steps: list[int], config: CheckpointConfig) -> list[int]:
    """All but the last `keep_last` (by number; -1: all) and the multiples of `keep_every`."""
    if config.keep_last == -1:
        return []
    old = sorted(steps)[: -config.keep_last]
    return [step for step in old if not (config.keep_every and step % config.keep_every == 0)]


def prune(folder: Path, config: CheckpointConfig) -> None:
    """Delete what the policy does not keep; each step leaves by one rename, so none is ever seen half deleted."""
    steps = saved_steps(folder)
    for step in steps_to_delete(list(steps), config):
        leaving = folder / f"{TEMPORARY}delete.{step}"
        steps[step].rename(leaving)
        shutil.rmtree(leaving)


def check_writable(folder: Path, name: str) -> None:
    """Make the folder, write a file called `tmp.<name>` in it and remove it; CheckpointError with the reason where that fails."""
    probe = folder / f"{TEMPORARY}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {folder}: {error.strerror or error}; set run.dir to a folder that can"
        ) from error


def check_space(folder: Path, state_bytes: int, config: CheckpointConfig) -> str | None:
    """CheckpointError where one checkpoint does not fit on the disk; a warning where those that will be kept do not; else None.

    A new checkpoint is whole before an old one goes, so keep_last + 1 exist at once (two are counted where all are kept).
    """
    free = shutil.disk_usage(folder).free
    if free < state_bytes:
        raise CheckpointError(
            f"a checkpoint takes about {size(state_bytes)}, {folder} has {size(free)} free: free some, or set run.dir to a larger disk"
        )
    here = len(saved_steps(folder))
    more = max(1, (2 if config.keep_last == -1 else config.keep_last + 1) - here)
    if free >= more * state_bytes:
        return None
    return (
        f"{folder} has {size(free)} free; checkpoint.keep_last = {config.keep_last} needs about {size(more * state_bytes)} more "
        f"({more} checkpoints of {size(state_bytes)}): saving may fail later in the run"
    )

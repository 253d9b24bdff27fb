"""The run folder: config.yaml as resolved, metrics.jsonl, tensorboard/, checkpoints/, hosts.json; one process trains in it at a time."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpar.config.errors import ConfigError

CONTENT = ("config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "hosts.json")


def check_writable(run_dir: Path) -> None:
    """Make the folder and write in it; ConfigError where that fails, before anything is computed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        text = f"run.dir: cannot write in {run_dir}: {error.strerror}; choose a folder of yours, e.g. run.dir=runs/mine"
        raise ConfigError([text], "run folder") from None


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder; ConfigError where another process trains in it. A killed process holds nothing."""
    with (run_dir / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            text = f"run.dir: {run_dir} is in use by {file.read().strip() or 'another process'}; wait for it, or set run.dir=runs/other"
            raise ConfigError([text], "run folder") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def set_aside(run_dir: Path) -> Path | None:
    """Move what an earlier run left into `earlier-<n>`; None where there is nothing. Nothing is deleted."""
    found = [run_dir / name for name in CONTENT if (run_dir / name).exists()]
    if not found:
        return None
    number = 1
    while (target := run_dir / f"earlier-{number}").exists():
        number += 1
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return target


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_hosts(run_dir: Path, devices: list[Any], versions: dict[str, str]) -> None:
    """hosts.json: which devices each process has, as JAX sees them, and the versions of this one."""
    processes: dict[int, list[str]] = {}
    for device in devices:
        processes.setdefault(device.process_index, []).append(str(device))
    facts = {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device_kind": devices[0].device_kind,
        "processes": [{"process": index, "devices": names} for index, names in sorted(processes.items())],
        "versions": versions,
    }
    replace_text(run_dir / "hosts.json", json.dumps(facts, indent=2) + "\n")

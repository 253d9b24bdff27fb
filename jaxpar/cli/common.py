"""What the commands share: arguments, devices, the compilation cache, the checkpoint of a run."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpar.config.load import load_config
from jaxpar.config.run import RunConfig
from jaxpar.core.problems import ProblemsError

if TYPE_CHECKING:
    from jaxpar.build import Parts
    from jaxpar.step.state import TrainState

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config, e.g. mesh.data=8.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file, as JSON.")]

CACHE_DAYS = 30


def prepare(config: RunConfig) -> None:
    """Devices and compilation cache, before JAX starts; says which devices run."""
    from jaxpar.train.devices import prepare_devices

    use_compilation_cache()
    print(prepare_devices(config), flush=True)


def start(path: Path, overrides: list[str] | None) -> "Parts":
    """A command line's config, built, on its devices."""
    config = load_config(path, overrides or [])
    prepare(config)
    from jaxpar.build import build

    return build(config)


def use_compilation_cache() -> None:
    """Keep compiled programs for the next run, unless JAX_COMPILATION_CACHE_DIR says where (or is empty: nowhere).

    JAX's key covers the program, its flags and versions, but not the features of the CPU that XLA compiled for: a home folder
    shared between machines must not hand one's code to another, so each kind of CPU has a folder. Entries of 30 days go.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "jaxpar" / f"xla-{cpu_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.stat().st_mtime < time.time() - CACHE_DAYS * 86_400:
                file.unlink(missing_ok=True)
    except OSError as error:
        print(f"compiled programs are not kept for the next run: {folder}: {error.strerror}")
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


def cpu_digest() -> str:
    """Eight letters for the model and features of this CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.blake2b(repr((platform.machine(), platform.processor(), facts)).encode(), digest_size=4).hexdigest()


def latest_state(parts: "Parts") -> "tuple[TrainState, int]":
    """The latest checkpoint of the run folder; the model must be the one that was trained, data and mesh may be others."""
    from jaxpar.checkpoint.compat import config_differences
    from jaxpar.config.errors import ConfigError

    if parts.checkpoints.latest() is None:
        raise ConfigError([f"run.dir: no checkpoint in {parts.run_dir}; train first, with the same command but `train`"], "run folder")
    meta = parts.checkpoints.read_meta()
    changes = config_differences(meta["config"], parts.config.model_dump(mode="json"))
    if lines := [line for line in changes if line.startswith(("model.", "data.tokenizer"))]:
        raise ConfigError(lines, f"the checkpoint of step {meta['step']} is of another model")
    state, meta = parts.checkpoints.restore(meta["step"], parts.natural.state)
    return parts.natural.to_run(state), meta["step"]


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Make a file that the command line asks for, and say so; ProblemsError where the disk refuses it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise ProblemsError([f"cannot be written: {error.strerror}"], str(path)) from None
    print(f"wrote {path}")


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """The result of a command, for programs."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")

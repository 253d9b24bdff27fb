"""Which devices a run gets, decided before JAX makes its clients: accelerators where there are any, else CPU devices if asked for."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config.checks import check
from jaxpar.config.errors import ConfigError
from jaxpar.config.run import RunConfig


@dataclass(frozen=True)
class Backend:
    """A kind of accelerator: its device files, and the package through which JAX reaches it."""

    name: str
    files: tuple[str, ...]  # patterns under /dev
    modules: tuple[str, ...]
    install: str


BACKENDS = (
    Backend("cuda", ("nvidia[0-9]*", "dxg"), ("jax_cuda12_plugin", "jax_cuda13_plugin"), "pip install 'jaxpar[cuda12]' (or cuda13)"),
    Backend("rocm", ("kfd",), ("jax_rocm60_plugin", "jax_rocm7_plugin"), "see JAX's installation page for AMD GPUs"),
    Backend("tpu", ("accel[0-9]*", "vfio/[0-9]*"), ("libtpu",), "pip install 'jax[tpu]'"),
)


def prepare_devices(config: RunConfig) -> str:
    """Set the process up for `config`; call before anything uses JAX. Returns, in words, what runs.

    `mesh.fake_devices` makes CPU devices only where no accelerator is found (or JAX_PLATFORMS starts with cpu). Also turns on
    64-bit types for a float64 run. Raises ConfigError where the mesh does not fit the fake devices.
    """
    kind, words = choose(config.mesh.num_fake_devices)
    if kind == "fake":
        if problems := check(config, config.mesh.num_fake_devices):
            raise ConfigError(problems, f"mesh.fake_devices={config.mesh.num_fake_devices}")
        make_fake_devices(config.mesh.num_fake_devices)
    elif platforms := os.environ.get("JAX_PLATFORMS"):
        require_platform(platforms)
    if config.param_dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    return words


def choose(fake_devices: int) -> tuple[str, str]:
    """("fake" | "real", words), from the environment and the device files alone: no client is started."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    here, missing = accelerators()
    asked_cpu = platforms.split(",")[0] == "cpu"
    if not fake_devices:
        return "real", f"devices as JAX finds them{f' (JAX_PLATFORMS={platforms})' if platforms else ''}"
    if asked_cpu or (not here and not platforms):
        reason = "JAX_PLATFORMS=cpu" if asked_cpu else (missing or "no accelerator found")
        return "fake", f"{fake_devices} fake CPU devices (mesh.fake_devices; {reason})"
    found = f"JAX_PLATFORMS={platforms}" if platforms else f"{here} found"
    return "real", f"real devices ({found}), so mesh.fake_devices={fake_devices} is not used"


def require_platform(platforms: str) -> None:
    """ConfigError where JAX does not find what JAX_PLATFORMS asks for: a plugin that is not installed, or no such device."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        hint = (
            accelerators()[1] or "`jaxpar doctor` shows what is installed; without JAX_PLATFORMS, CPU devices serve where nothing else is"
        )
        raise ConfigError(
            [f"JAX finds no such device{f': {error}' if str(error) else ''}; {hint}"], f"JAX_PLATFORMS={platforms}"
        ) from error


def accelerators() -> tuple[str | None, str | None]:
    """(name of an accelerator that JAX can use, else None; a word on one that it cannot use for want of a package)."""
    missing = None
    for backend in BACKENDS:
        if any(any(Path("/dev").glob(pattern)) for pattern in backend.files):
            if any(importlib.util.find_spec(module) for module in backend.modules):
                return backend.name, None
            missing = f"a {backend.name} device is here but JAX has no plugin for it: {backend.install}"
    return None, missing


def make_fake_devices(num_devices: int) -> None:
    """CPU devices for this process. ValueError where JAX already has its devices and they are others."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    from jaxpar.mesh.build import prepare_fake_devices

    prepare_fake_devices(num_devices)

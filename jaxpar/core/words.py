"""Numbers as people read them, and the versions of what decides numbers."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("jaxpar", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pydantic")


def size(num_bytes: float) -> str:
    """Bytes in powers of 1000, three digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def versions() -> dict[str, str]:
    """Python and the packages that decide what runs."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

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


def times(ratio: float) -> str:
    """A multiple of the mean: two digits after the point below 10."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def percent(fraction: float) -> str:
    """A fraction in percent; what is above zero never reads 0.0."""
    return f"{100 * fraction:.1f} %" if fraction == 0 or fraction >= 0.0005 else "< 0.1 %"


def versions() -> dict[str, str]:
    """Python and the packages that decide what runs."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

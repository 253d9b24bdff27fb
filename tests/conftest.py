"""Eight fake CPU devices, strict dtype promotion, one compilation cache for all workers."""

import os
import tempfile
from pathlib import Path

import pytest

# XLA:CPU hangs with eight devices on two cores unless its thread pool holds twice as many threads (read when the client is made).
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxpar-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

SLOW = Path(__file__).with_name("slow_tests.txt")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of slow_tests.txt. A line that names no test any more is an error, where its whole file is collected."""
    lines = [line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")]
    found: set[str] = set()
    for item in items:
        # A line is a whole id, or one without parameters for all of them.
        if mine := {item.nodeid.split("@")[0], item.nodeid.split("[")[0]}.intersection(lines):
            item.add_marker("slow")
            found |= mine
    files = {file for item in items if {"tests", file := item.nodeid.split("::")[0]}.intersection(item.config.args)}
    if stale := [line for line in lines if line not in found and line.split("::")[0] in files]:
        raise pytest.UsageError(f"{SLOW.name}: no such test: {', '.join(stale)}")

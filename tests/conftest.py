"""Eight fake CPU devices, strict dtype promotion, one compilation cache for all workers."""

import os
import tempfile
from pathlib import Path

# XLA:CPU hangs with eight devices on two cores unless its thread pool holds twice as many threads (read when the client is made).
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxpar-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

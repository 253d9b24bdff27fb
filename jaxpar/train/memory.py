"""How much memory is in use: by the accelerator's own count where it keeps one, else the process's resident set."""

import resource
import sys
from pathlib import Path
from typing import Any


def memory_metric(devices: list[Any]) -> tuple[str, int]:
    """("device_memory_peak_bytes", largest over local devices) or ("host_memory_bytes", resident set of this process)."""
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        return "device_memory_peak_bytes", max(s["peak_bytes_in_use"] for s in stats)
    return "host_memory_bytes", resident_bytes()


def resident_bytes() -> int:
    """Resident set of this process; where /proc is missing, its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

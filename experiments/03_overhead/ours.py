"""Times our train step as the plain-JAX baseline times its own: `python ours.py CONFIG [key=value ...]`, one JSON line.

A step's time runs from its dispatch to its end with the loss read; making the batch is outside. Warm-up and step counts
come from BENCH_WARMUP and BENCH_STEPS, which the baseline reads too.
"""

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

import jaxpar


def process_start() -> float:
    """Wall-clock time at which this process was started (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def main(path: str, *overrides: str) -> None:
    config = jaxpar.load_config(path, overrides)
    jaxpar.prepare_devices(config)
    import jax

    parts = jaxpar.build(config)
    warmup, steps = int(os.environ.get("BENCH_WARMUP", "3")), int(os.environ.get("BENCH_STEPS", "12"))
    state = parts.init_state()
    times, losses, startup_s = [], [], 0.0
    for i in range(warmup + steps):
        batch = parts.feed.place(parts.train_data.batch(i), config.num_microbatches)
        began = time.perf_counter()
        state, metrics = parts.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - began)
        if i == 0:
            startup_s = time.time() - process_start()
    steady = times[warmup:]
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = {"step_ms": 1e3 * statistics.median(steady), "min_step_ms": 1e3 * min(steady), "startup_s": startup_s, "peak_rss_mb": rss_mb}
    print(json.dumps(record | {"loss_first": losses[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])

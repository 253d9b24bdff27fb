"""`jaxpar train`: train, or go on; then show what the model writes and what to try next."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.cli.common import ConfigPath, JsonFile, Overrides, prepare, write_json
from jaxpar.config.load import load_config
from jaxpar.train.folder import check_writable
from jaxpar.train.signals import PREEMPTED, StopSignals

if TYPE_CHECKING:
    from jaxpar.build import Parts
    from jaxpar.config.run import RunConfig
    from jaxpar.train.loop import Result


def train(path: ConfigPath, overrides: Overrides = None, json: JsonFile = None) -> int:
    """Train CONFIG, from where its run folder is; Ctrl-C or SIGTERM saves and exits 75, the same command goes on."""
    with StopSignals() as stop:
        config = load_config(path, overrides or [])
        check_writable(Path(config.run.dir or f"runs/{config.name}"))
        prepare(config)
        from jaxpar.build import build
        from jaxpar.train.loop import fit

        parts = build(config)
        result = fit(parts, stop=stop)
    text = None if result.preempted else show_sample(parts, result)
    write_json(json, summary(result, text))
    if result.preempted:
        return PREEMPTED
    show_end(path, overrides or [], config, parts, result)
    return 0


def summary(result: "Result", text: str | None) -> dict[str, object]:
    """The result for programs."""
    last = result.losses[-1] if result.losses and math.isfinite(result.losses[-1]) else None
    facts = {"step": result.step, "loss": last, "eval_loss": result.eval_loss, "preempted": result.preempted}
    return {**facts, "run_dir": str(result.run_dir), "sample": text}


def show_sample(parts: "Parts", result: "Result") -> str | None:
    """Print a sample of the length that the config wants, or what fits."""
    from jaxpar.train.sample import room_for, sample

    train = parts.config.train
    if not (num_tokens := min(train.sample_tokens, max(room_for(parts, train.sample_prompt), 0))):
        return None
    text = sample(parts, result.state.params, train.sample_prompt, num_tokens)
    print(f"\nsample (prompt {train.sample_prompt!r}, temperature 0.8):\n{text}\n")
    return text


def show_end(path: Path, overrides: list[str], config: "RunConfig", parts: "Parts", result: "Result") -> None:
    """Where everything is, and what to try next."""
    show_experts(result)
    if result.eval_loss is not None:
        perplexity = math.exp(min(result.eval_loss, 700))
        print(f"evaluation loss {result.eval_loss:.4f} nats a token (perplexity {perplexity:.4g}) at step {result.step}")
    curves = (result.run_dir / "tensorboard").is_dir()
    print(f"run folder: {result.run_dir} (config.yaml, metrics.jsonl, {'tensorboard/, ' if curves else ''}checkpoints/)")
    again = " ".join([str(path), *overrides])
    elsewhere = " ".join([str(path), *(text for text in overrides if not text.startswith(("run.dir=", "mesh.", "zero_stage=")))])
    print("next:")
    if other := another_mesh(config, parts.mesh.size):
        print(f"  the same curve under another mesh: jaxpar train {elsewhere} {other} run.dir={result.run_dir}-2")
    print(f"  more text: jaxpar sample {again} --prompt 'class '")
    if curves:
        print(f"  curves: tensorboard --logdir {result.run_dir.parent}")


def show_experts(result: "Result") -> None:
    """Load of each expert at the last logged step, and a picture of it over time where matplotlib is installed."""
    import importlib.util
    import sys

    from jaxpar.core.records import read_records
    from jaxpar.report.expert_load import expert_load, has_experts
    from jaxpar.report.load_text import levels_for, load_lines

    rows = read_records(result.run_dir / "metrics.jsonl")
    if not has_experts(rows):
        return
    logged = [row for row in rows if "moe_load" in row][-1]
    print("\n".join(load_lines(logged["moe_load"], logged.get("moe_dropped"), levels=levels_for(sys.stdout.encoding))))
    if importlib.util.find_spec("matplotlib"):
        from jaxpar.report.heat_map import save_heat_map

        picture = result.run_dir / "expert_load.png"
        save_heat_map(expert_load(rows, str(result.run_dir)), str(result.run_dir), picture, "png")
        print(f"over time: {picture}")
    else:
        print(f"over time: pip install 'jaxpar[plot]', then jaxpar report {result.run_dir} --png expert_load.png")


def another_mesh(config: "RunConfig", num_devices: int) -> str | None:
    """Overrides of a mesh of as many devices that this run can have and has not."""
    from jaxpar.config.checks import check

    for tensor, zero_stage in ((1, 3), (2, 3), (4, 1)):
        sizes = {"pipe": 1, "replica": 1, "data": num_devices // tensor, "expert": 1, "context": 1, "tensor": tensor}
        mesh = config.mesh.model_copy(update=sizes)
        other = config.model_copy(update={"mesh": mesh, "zero_stage": zero_stage})
        if num_devices > 1 and num_devices % tensor == 0 and mesh != config.mesh and not check(other, num_devices):
            axes = [f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1 or getattr(config.mesh, axis) > 1]
            return " ".join([*axes, f"zero_stage={zero_stage}"])
    return None

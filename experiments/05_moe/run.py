"""What experts cost and what their routers do: step time by dispatcher, growth with experts, a plain program beside ours, routers on text.

    python run.py cost | growth | baseline --baseline jax_moe_pp.py | routers | figure --png FILE    (--help names the options)

Each writes its part of result.json, prints a table, and takes key=value overrides at its end.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxpar
from jaxpar.config.parameters import active_parameter_count, parameter_count

HERE = Path(__file__).resolve().parent
RESULT = HERE / "result.json"
RUNS = HERE.parents[1] / "configs" / "run"
BENCH, TEXT, OURS = RUNS / "bench.yaml", RUNS / "quickstart_moe.yaml", HERE.parent / "03_overhead" / "ours.py"
MESH = ("mesh.fake_devices=8", "mesh.data=2", "mesh.expert=4", "zero_stage=1")
WINDOW = 10  # steps that a number of a run over time is the mean of
WARMUP = 3  # steps of a throughput run that are not timed, the one that compiles among them
DROPLESS = "model.moe.capacity_factor=null"
ONE = ("model.moe.top_k=1", "model.moe.expert_dim=352")  # one expert a token, twice as wide: equal FLOPs
ROUTERS: Mapping[str, tuple[str, ...]] = {
    "topk, no balance loss": ("model.moe.balance_coefficient=0",),
    "topk": (),
    "switch": ("model.moe.router=switch", *ONE),
    "gshard": ("model.moe.router=gshard",),
    "sigmoid_bias": ("model.moe.router=sigmoid_bias", "model.moe.balance_coefficient=0", "model.moe.bias_rate=1e-2"),
    "expert_choice": ("model.moe.router=expert_choice", "model.moe.balance_coefficient=0", "model.moe.capacity_factor=1"),
    # Training is balanced; evaluation is greedy and, as in fairseq, drops nothing.
    "base": (
        "model.moe.router=base",
        *ONE,
        "model.moe.balance_coefficient=0",
        "model.moe.dispatch=local",
        "mesh.expert=1",
        "mesh.data=8",
        DROPLESS,
    ),
    "sinkhorn": ("model.moe.router=sinkhorn", *ONE, "model.moe.balance_coefficient=0"),
    "hash": ("model.moe.router=hash", *ONE, "model.moe.balance_coefficient=0", "model.moe.router_z_coefficient=0"),
}


def stepping(config: jaxpar.RunConfig) -> Iterator[float]:
    """Milliseconds of one step after the other, from dispatch to end; the first compiles."""
    import jax

    parts = jaxpar.build(config)
    state = parts.init_state()
    for i in itertools.count():
        batch = parts.feed.place(parts.train_data.batch(i), parts.config.num_microbatches)
        began = time.perf_counter()
        state, metrics = parts.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        yield 1e3 * (time.perf_counter() - began)


def medians(runs: Mapping[str, Sequence[str]], timed: int) -> dict[str, float]:
    """Median step of each, one step of every run in turn, so that what else the machine does meets all alike."""
    configs = {name: jaxpar.load_config(BENCH, list(overrides)) for name, overrides in runs.items()}
    print(jaxpar.prepare_devices(next(iter(configs.values()))), file=sys.stderr)
    running = {name: stepping(config) for name, config in configs.items()}
    rounds = [
        {name: next(times) for name, times in running.items()} for _ in track(range(2 + timed), "steps", console=Console(stderr=True))
    ][2:]
    return {name: statistics.median(times[name] for times in rounds) for name in runs}


def experts(num: int, *changes: str) -> list[str]:
    """Half as wide as the dense layer and two a token: equal active FLOPs, but for the router's. Later changes win."""
    return [*MESH, f"model.moe.num_experts={num}", "model.moe.top_k=2", "model.moe.expert_dim=512", *changes]


def kinds(num: int) -> dict[str, list[str]]:
    return {
        "dense": list(MESH),
        "local, dropless": experts(num, "mesh.data=8", "mesh.expert=1", "model.moe.dispatch=local", DROPLESS),
        "all_to_all, capacity 1": experts(num, "model.moe.capacity_factor=1.0"),
        "all_to_all, capacity 1.25": experts(num),
        "ragged, dropless": experts(num, "model.moe.dispatch=ragged", DROPLESS),
    }


def last_json(command: list[str], cwd: Path, env: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_pair(plain: Path, overrides: list[str], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """One run of each; the plain program takes its shape from ours."""
    config = jaxpar.load_config(BENCH, overrides)
    m, data = config.model, config.data
    assert m.moe is not None
    shape = {"LAYERS": m.num_layers, "EMBED": m.embed_dim, "HEADS": m.num_heads, "MLP": m.mlp_dim, "VOCAB": m.vocab_size}
    shape |= {"EXPERTS": m.moe.num_experts, "TOPK": m.moe.top_k}
    env = {f"BENCH_{k}": str(v) for k, v in (shape | {"SEQ": data.seq_len, "BATCH": data.global_batch_size}).items()}
    env |= {"BENCH_WARMUP": str(WARMUP), "BENCH_STEPS": str(steps)}
    folder = f"run.dir={tempfile.gettempdir()}/jaxpar-moe-{os.getpid()}"
    ours = last_json([sys.executable, str(OURS), str(BENCH), folder, *overrides], HERE, env)
    theirs = last_json([sys.executable, plain.name, "--layout", "ep4"], plain.parent, env)
    if theirs["params"] != parameter_count(m) or abs(ours["loss_first"] - theirs["loss_first"]) > 0.1:
        sys.exit(f"not the same work: {parameter_count(m)} parameters here; {ours}, {theirs}")
    tokens = data.global_batch_size * data.seq_len
    ours, theirs = (each | {"tokens_per_s": 1e3 * tokens / each["step_ms"]} for each in (ours, theirs))
    return ours, theirs


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def record(path: Path, **parts: Any) -> None:
    """Replace parts of the result file; the others stay."""
    path.write_text(json.dumps(read(path) | parts, indent=1) + "\n")


app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)
Json = Annotated[Path, typer.Option("--json", help="The result file.")]
Timed = Annotated[int, typer.Option("--steps", help="Steps timed of each, after two.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]


def shown(title: str, times: Mapping[str, float], against: Sequence[str]) -> None:
    table = Table("", "step ms", *(f"/ {name}" for name in against), title=title)
    for name, ms in times.items():
        table.add_row(name, f"{ms:.0f}", *(f"{ms / times[other]:.2f}" for other in against))
    Console().print(table)


@app.command()
def cost(timed: Timed = 7, path: Json = RESULT, overrides: Overrides = None) -> None:
    """Step time of each dispatcher beside a dense model of equal active FLOPs."""
    runs = {name: [*run, *(overrides or ())] for name, run in kinds(8).items()}
    times = medians(runs, timed)
    active = {name: active_parameter_count(jaxpar.load_config(BENCH, run).model) for name, run in runs.items()}
    record(path, cost={"step_ms": times, "active_parameters": active})
    shown("8 experts, 2 a token, each half as wide as the dense layer", times, ["dense", "local, dropless"])


@app.command()
def growth(timed: Timed = 7, path: Json = RESULT, overrides: Overrides = None) -> None:
    """Step time from 8 to 64 experts at equal top_k and width."""
    runs = {
        f"{num} experts, {name}": [*kinds(num)[name], *(overrides or ())]
        for name in ("all_to_all, capacity 1", "ragged, dropless")
        for num in (8, 16, 32, 64)
    }
    times = medians(runs, timed)
    changed = " ".join(overrides or ("bench.yaml",))
    record(path, growth=read(path).get("growth", {}) | {changed: {"step_ms": times}})
    shown(f"more experts, {changed}", times, [name for name in times if name.startswith("8 ")])


@app.command()
def baseline(
    plain: Annotated[Path, typer.Option("--baseline", help="The plain capacity all-to-all program, jax_moe_pp.py.")],
    pairs: Annotated[int, typer.Option(help="Runs of each, in turn.")] = 3,
    timed: Annotated[int, typer.Option("--steps", help="Steps timed in a run.")] = 12,
    path: Json = RESULT,
    overrides: Overrides = None,
) -> None:
    """Throughput of configs/run/bench.yaml with 8 experts, top 2, on expert 4 x data 2 against a plain program."""
    moe = ["model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.capacity_factor=1.25"]
    own = ["mesh.fake_devices=8", "mesh.expert=4", "mesh.data=2", *moe, *(overrides or ())]
    runs = [measure_pair(plain.resolve(), own, timed) for _ in track(range(pairs), "pairs", console=Console(stderr=True))]
    ratio = statistics.median(ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in runs)
    name = " ".join(overrides or ("bench.yaml",))
    record(path, baseline=read(path).get("baseline", {}) | {name: {"ratio": ratio, "pairs": runs}})
    rates = [statistics.median(pair[i]["tokens_per_s"] for pair in runs) for i in (0, 1)]
    print(f"{name}: {rates[0]:.0f} tokens/s, the plain program {rates[1]:.0f}; median ratio {ratio:.2f}")


@app.command()
def routers(
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 300,
    names: Annotated[str, typer.Option(help="Of ROUTERS, with semicolons.")] = ";".join(ROUTERS),
    path: Json = RESULT,
    overrides: Overrides = None,
) -> None:
    """Loss and balance of every router on the same text."""
    from jaxpar.core.records import read_records

    found = read(path).get("routers", {})
    for name in names.split(";"):
        with tempfile.TemporaryDirectory() as folder:
            run = [f"run.dir={folder}", f"train.steps={steps}", "train.eval_every=100", "train.sample_tokens=0", "log.tensorboard=false"]
            command = [sys.executable, "-m", "jaxpar", "train", str(TEXT), *run, *ROUTERS[name], *(overrides or ())]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr}")
            rows = read_records(Path(folder) / "metrics.jsonl")
        found[name] = summary(rows)
        record(path, routers=found)
        print(name, {key: found[name][key] for key in ("eval_loss", "max_load_last", "dropped_last")}, flush=True)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a run: held-out losses; load and drops of the worst block, over time (means of `WINDOW` steps) and over the last tenth."""
    trained = [row for row in rows if "moe_load" in row]
    last = trained[-max(len(trained) // 10, 1) :]
    windows = [trained[i : i + WINDOW] for i in range(0, len(trained), WINDOW)]

    def means(key: str) -> list[float]:
        return [round(statistics.fmean(row[key] for row in window), 5) for window in windows]

    return {
        "eval_loss": {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row},
        "steps": [window[-1]["step"] for window in windows],
        "loss": means("loss"),
        "max_load": means("moe_max_load"),
        "dropped": means("moe_dropped_worst"),
        "max_load_last": statistics.fmean(row["moe_max_load"] for row in last),
        "dropped_last": statistics.fmean(row["moe_dropped_worst"] for row in last),
    }


@app.command()
def figure(png: Annotated[Path, typer.Option(help="The picture.")], path: Json = RESULT) -> None:
    """Draw what `routers` measured; needs matplotlib."""
    from figure import draw

    draw(read(path)["routers"], png)


if __name__ == "__main__":
    app()

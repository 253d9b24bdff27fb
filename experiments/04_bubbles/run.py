"""Pipeline schedules as they run: step time and memory over microbatches, and throughput against a plain pipeline.

    python run.py steps | memory | baseline --baseline jax_moe_pp.py | figure --png FILE    (--help names the options)

Each writes its part of result.json, prints a table, and takes key=value overrides of the config at its end.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxpar
from jaxpar.config.parameters import parameter_count
from jaxpar.schedule.library import build_schedule, schedule_problems
from jaxpar.schedule.simulate import simulate

HERE = Path(__file__).resolve().parent
CONFIG, RESULT = HERE / "config.yaml", HERE / "result.json"
BENCH, OURS = HERE.parents[1] / "configs" / "run" / "bench.yaml", HERE.parent / "03_overhead" / "ours.py"
STAGES = 4
SCHEDULES = "gpipe,1f1b,interleaved,zb_h1,zb_v,dualpipe_v"
RECOMPUTED = ("gpipe", "1f1b")  # schedules whose memory is also measured with pipeline.stash=inputs
MICROBATCHES = "4,8,16,32"
PREDICTIONS = ("work", "makespan")
WARMUP = 3  # steps of a throughput run that are not timed, the one that compiles among them
MIB = 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class StepTime:
    """A point of `steps`. work (of all stages together) and makespan are simulated; unit: the forward pass of a stage, F = I = W."""

    schedule: str
    microbatches: int
    ticks: int
    work: float
    makespan: float
    step_ms: float
    cpu_ms: float  # processor time of the whole process, which other processes disturb less


@dataclass(frozen=True)
class Memory:
    """A point of `memory`: what XLA's buffer assignment of the compiled step needs on a device beside its arguments."""

    schedule: str
    stash: str
    microbatches: int
    temp_bytes: int


@dataclass(frozen=True)
class Sizes:
    """What the points of a measurement have in common."""

    rows: int  # of a microbatch
    data: int
    overrides: tuple[str, ...]

    def config(self, schedule: str, microbatches: int, *changes: str) -> jaxpar.RunConfig:
        sizes = [f"num_microbatches={microbatches}", f"data.global_batch_size={self.rows * microbatches}"]
        mesh = [f"mesh.pipe={STAGES}", f"mesh.data={self.data}", f"pipeline.schedule={schedule}"]
        return jaxpar.load_config(CONFIG, [*sizes, *mesh, *self.overrides, *changes])

    def parts(self, schedule: str, microbatches: int, *changes: str) -> jaxpar.Parts:
        import jax

        return jaxpar.build(self.config(schedule, microbatches, *changes), devices=jax.devices()[: STAGES * self.data])


def points(schedules: Sequence[str], microbatches: Sequence[int]) -> list[tuple[str, int]]:
    """(schedule, M) in the order of M; those that a schedule does not allow are named and left out."""
    found = []
    for m, name in itertools.product(microbatches, schedules):
        if problems := schedule_problems(name, STAGES, m):
            print(f"left out: {name}: {'; '.join(problems)}", file=sys.stderr)
        else:
            found.append((name, m))
    return found


def stepping(parts: jaxpar.Parts) -> Iterator[tuple[float, float]]:
    """(milliseconds, of processor time too) of one step after the other, from dispatch to end; the first compiles."""
    import jax

    state = parts.init_state()
    for i in itertools.count():
        batch = parts.feed.place(parts.train_data.batch(i), parts.config.num_microbatches)
        began, cpu_began = time.perf_counter(), time.process_time()
        state, metrics = parts.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        yield 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu_began)


def measure_steps(sizes: Sizes, schedules: Sequence[str], microbatches: Sequence[int], timed: int) -> list[StepTime]:
    """One step of every point in turn, `timed` times, so that what else the machine does meets all alike."""
    parts = {point: sizes.parts(*point) for point in points(schedules, microbatches)}
    running = {point: stepping(each) for point, each in parts.items()}
    rounds = [
        {point: next(times) for point, times in running.items()} for _ in track(range(1 + timed), "steps", console=Console(stderr=True))
    ][1:]
    found = []
    for (name, m), each in parts.items():
        timeline, ticks = simulate(build_schedule(name, STAGES, m)), each.forward.ticks
        assert ticks is not None
        medians = (statistics.median(times[name, m][i] for times in rounds) for i in (0, 1))
        found.append(StepTime(name, m, ticks.num_ticks, sum(timeline.work), timeline.makespan, *medians))
    return found


def ms_per_unit(found: Sequence[StepTime], prediction: str) -> float:
    """The one constant that scales a prediction: the geometric mean of measured / predicted over all points."""
    return statistics.geometric_mean(point.step_ms / getattr(point, prediction) for point in found)


def measure_memory(sizes: Sizes, schedules: Sequence[str], microbatches: Sequence[int]) -> Iterator[Memory]:
    """Compiles each step for abstract arguments; nothing runs."""
    for name, m in points(schedules, microbatches):
        for stash in ("residuals", "inputs") if name in RECOMPUTED else ("residuals",):
            parts = sizes.parts(name, m, f"pipeline.stash={stash}")
            batch = parts.feed.abstract(parts.config.data.global_batch_size, m)
            memory = parts.train_step.lower(parts.placement.state, batch).compile().memory_analysis()
            assert memory is not None
            yield Memory(name, stash, m, memory.temp_size_in_bytes)


def last_json(command: list[str], cwd: Path, env: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_pair(plain: Path, overrides: list[str], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """One run of each; the plain pipeline takes its shape from ours."""
    config = jaxpar.load_config(BENCH, overrides)
    m, data = config.model, config.data
    shape = {"LAYERS": m.num_layers, "EMBED": m.embed_dim, "HEADS": m.num_heads, "MLP": m.mlp_dim, "VOCAB": m.vocab_size}
    run = {"SEQ": data.seq_len, "BATCH": data.global_batch_size, "MICROBATCHES": config.num_microbatches, "WARMUP": WARMUP, "STEPS": steps}
    env = {f"BENCH_{name}": str(value) for name, value in (shape | run).items()}
    folder = f"run.dir={tempfile.gettempdir()}/jaxpar-bubbles-{os.getpid()}"
    ours = last_json([sys.executable, str(OURS), str(BENCH), folder, *overrides], HERE, env)
    theirs = last_json([sys.executable, plain.name, "--layout", "pp4"], plain.parent, env)
    if theirs["params"] != parameter_count(m) or abs(ours["loss_first"] - theirs["loss_first"]) > 0.1:
        sys.exit(f"not the same work: {parameter_count(m)} parameters here; {ours}, {theirs}")
    tokens = data.global_batch_size * data.seq_len
    ours, theirs = (each | {"tokens_per_s": 1e3 * tokens / each["step_ms"]} for each in (ours, theirs))
    return ours, theirs


def steps_table(found: Sequence[StepTime]) -> Table:
    units = {prediction: ms_per_unit(found, prediction) for prediction in PREDICTIONS}
    title = "; ".join(f"{name} x {ms:.3g} ms, off by {spread(found, name):.0%}" for name, ms in units.items())
    table = Table("schedule", "M", "ticks", "cpu ms", "step ms", *(text for name in PREDICTIONS for text in (name, "ratio")), title=title)
    names = list(dict.fromkeys(point.schedule for point in found))
    for point in sorted(found, key=lambda point: names.index(point.schedule)):
        predicted = [ms * getattr(point, name) for name, ms in units.items()]
        cells = [cell for ms in predicted for cell in (f"{ms:.0f}", f"{point.step_ms / ms:.2f}")]
        table.add_row(point.schedule, str(point.microbatches), str(point.ticks), f"{point.cpu_ms:.0f}", f"{point.step_ms:.0f}", *cells)
    return table


def spread(found: Sequence[StepTime], prediction: str) -> float:
    """Root mean square of measured / predicted - 1."""
    unit = ms_per_unit(found, prediction)
    return statistics.fmean((point.step_ms / (unit * getattr(point, prediction)) - 1) ** 2 for point in found) ** 0.5


def memory_table(found: Sequence[Memory]) -> Table:
    counts = sorted({point.microbatches for point in found})
    table = Table("schedule", "stash", *(f"M = {m}" for m in counts), title="temporaries of the compiled step on a device, MiB")
    by_place = {(point.schedule, point.stash, point.microbatches): point.temp_bytes / MIB for point in found}
    for schedule, stash in dict.fromkeys((point.schedule, point.stash) for point in found):
        cells = [by_place.get((schedule, stash, m)) for m in counts]
        table.add_row(schedule, stash, *("" if mib is None else f"{mib:.1f}" for mib in cells))
    return table


def baseline_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("ours", "pairs", "tokens/s ours", "tokens/s plain", "ratio", title="medians of paired runs")
    for name, row in found.items():
        rates = [f"{statistics.median(pair[i]['tokens_per_s'] for pair in row['pairs']):.0f}" for i in (0, 1)]
        table.add_row(name, str(len(row["pairs"])), *rates, f"{row['ratio']:.2f}")
    return table


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def record(path: Path, **parts: Any) -> None:
    """Replace parts of the result file; the others stay."""
    path.write_text(json.dumps(read(path) | parts, indent=1) + "\n")


app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)
Schedules = Annotated[str, typer.Option(help="Names, with commas.")]
Microbatches = Annotated[str, typer.Option(help="Numbers, with commas.")]
Rows = Annotated[int, typer.Option(help="Rows of a microbatch.")]
Data = Annotated[int, typer.Option(help="mesh.data.")]
Json = Annotated[Path, typer.Option("--json", help="The result file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]


def prepared(sizes: Sizes, schedule: str, microbatches: Sequence[int]) -> Sizes:
    """After the fake devices of the largest point are made."""
    print(jaxpar.prepare_devices(sizes.config(schedule, max(microbatches))), file=sys.stderr)
    return sizes


def shown(found: Iterable[T]) -> list[T]:
    """All of them, each printed as soon as it is there."""
    kept = []
    for each in found:
        print(each, file=sys.stderr)
        kept.append(each)
    return kept


@app.command()
def steps(
    schedules: Schedules = SCHEDULES,
    microbatches: Microbatches = MICROBATCHES,
    rows: Rows = 2,
    data: Data = 1,
    timed: Annotated[int, typer.Option("--steps", help="Steps timed at each point, after the one that compiles.")] = 5,
    path: Json = RESULT,
    overrides: Overrides = None,
) -> None:
    """Step time on fake devices beside two predictions."""
    names, counts = schedules.split(","), [int(m) for m in microbatches.split(",")]
    sizes = prepared(Sizes(rows, data, tuple(overrides or ())), names[0], counts)
    found = measure_steps(sizes, names, counts, timed)
    units = {name: ms_per_unit(found, name) for name in PREDICTIONS}
    record(path, steps=asdict(sizes) | {"steps": timed, "ms_per_unit": units, "points": [asdict(point) for point in found]})
    Console().print(steps_table(found))


@app.command()
def memory(
    schedules: Schedules = SCHEDULES,
    microbatches: Microbatches = MICROBATCHES,
    rows: Rows = 2,
    data: Data = 1,
    path: Json = RESULT,
    overrides: Overrides = None,
) -> None:
    """Memory of the compiled step; nothing runs."""
    names, counts = schedules.split(","), [int(m) for m in microbatches.split(",")]
    sizes = prepared(Sizes(rows, data, tuple(overrides or ())), names[0], counts)
    found = shown(measure_memory(sizes, names, counts))
    record(path, memory=asdict(sizes) | {"points": [asdict(point) for point in found]})
    Console().print(memory_table(found))


@app.command()
def baseline(
    plain: Annotated[Path, typer.Option("--baseline", help="The plain roll-and-scan pipeline, jax_moe_pp.py.")],
    schedules: Schedules = "1f1b",
    pairs: Annotated[int, typer.Option(help="Runs of each, in turn.")] = 3,
    timed: Annotated[int, typer.Option("--steps", help="Steps timed in a run.")] = 12,
    remat: Annotated[str, typer.Option(help="remat.policy of ours; the plain pipeline recomputes a stage in every iteration.")] = "none",
    zero: Annotated[int, typer.Option(help="zero_stage of ours; the plain pipeline shards embedding and head over all devices.")] = 1,
    path: Json = RESULT,
    overrides: Overrides = None,
) -> None:
    """Throughput of configs/run/bench.yaml on pipe 4 x data 2 with 8 microbatches against a plain pipeline."""
    mesh = ["mesh.fake_devices=8", f"mesh.pipe={STAGES}", "mesh.data=2", "num_microbatches=8"]
    found: dict[str, Any] = {}
    for name in schedules.split(","):
        own = [f"pipeline.schedule={name}", f"remat.policy={remat}", f"zero_stage={zero}", *(overrides or ())]
        runs = shown(measure_pair(plain.resolve(), [*mesh, *own], timed) for _ in range(pairs))
        ratio = statistics.median(ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in runs)
        found[", ".join([name, f"remat {remat}", f"ZeRO {zero}", *(overrides or ())])] = {"ratio": ratio, "pairs": runs}
        record(path, baseline=read(path).get("baseline", {}) | found)
    Console().print(baseline_table(found))


@app.command()
def figure(png: Annotated[Path, typer.Option(help="The picture.")], path: Json = RESULT) -> None:
    """Draw what `steps` and `memory` measured; needs matplotlib."""
    from figure import draw

    draw(read(path), png)


if __name__ == "__main__":
    app()

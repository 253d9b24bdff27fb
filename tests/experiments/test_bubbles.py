"""`experiments/04_bubbles` measures what it says, at its smallest; wall-clock times are not judged."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

FOLDER = Path(__file__).parents[2] / "experiments" / "04_bubbles"
TINY = ("model.num_layers=4", "model.embed_dim=32", "model.num_heads=2", "model.mlp_dim=64", "model.vocab_size=64", "data.seq_len=16")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bubbles_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bubbles() -> Iterator[ModuleType]:
    module = load("run")
    yield module
    del sys.modules[module.__name__]


def shown(table: object) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_steps_of_one_schedule(bubbles: ModuleType) -> None:
    (point,) = bubbles.measure_steps(bubbles.Sizes(1, 1, TINY), ["1f1b"], [2], 1)
    assert (point.schedule, point.microbatches) == ("1f1b", 2)
    assert point.work == 4 * 2 * 3  # stages x microbatches x (F + I + W)
    assert point.makespan == (2 + 4 - 1) * 3
    assert point.ticks == 2 * (2 + 4 - 1)
    assert point.step_ms > 0
    assert point.cpu_ms > 0
    assert "1f1b" in shown(bubbles.steps_table([point]))


def test_memory_of_one_schedule(bubbles: ModuleType) -> None:
    kept, again = bubbles.measure_memory(bubbles.Sizes(1, 1, TINY), ["1f1b"], [2])
    assert (kept.stash, again.stash) == ("residuals", "inputs")
    assert kept.temp_bytes > again.temp_bytes > 0
    assert "inputs" in shown(bubbles.memory_table([kept, again]))


def test_one_constant_fits_exact_points_exactly(bubbles: ModuleType) -> None:
    points = [bubbles.StepTime("1f1b", m, 0, 12.0 * m, 3.0 * (m + 3), 36.0 * m, 0.0) for m in (4, 8)]
    assert bubbles.ms_per_unit(points, "work") == pytest.approx(3)
    assert bubbles.spread(points, "work") == pytest.approx(0)
    assert bubbles.spread(points, "makespan") > 0.05


def test_what_a_schedule_does_not_allow_is_named(bubbles: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bubbles.points(["1f1b", "dualpipe_v"], [4, 8]) == [("1f1b", 4), ("1f1b", 8), ("dualpipe_v", 8)]
    assert "left out: dualpipe_v: 4 microbatches" in capsys.readouterr().err


def test_parts_of_the_result_are_replaced_one_by_one(bubbles: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    bubbles.record(path, steps=1, memory=2)
    bubbles.record(path, steps=3)
    assert json.loads(path.read_text()) == {"steps": 3, "memory": 2}


def test_figure_is_drawn(bubbles: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [asdict(bubbles.StepTime("1f1b", m, 0, 12.0 * m, 3.0 * (m + 3), 36.0 * m, 0.0)) for m in (4, 8)]
    memory = [asdict(bubbles.Memory("1f1b", stash, m, 2**25)) for stash in ("residuals", "inputs") for m in (4, 8)]
    result = {"steps": {"ms_per_unit": {"work": 3.0, "makespan": 8.0}, "points": steps}, "memory": {"points": memory}}
    load("figure").draw(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

"""`experiments/05_moe` measures what it says, at its smallest; wall-clock times are not judged."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jaxpar
from jaxpar.config.parameters import active_parameter_count, matmul_parameters

FOLDER = Path(__file__).parents[2] / "experiments" / "05_moe"
TINY = ("model.num_layers=2", "model.embed_dim=32", "model.mlp_dim=64", "model.vocab_size=64", "data.seq_len=16", "model.moe.expert_dim=32")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"moe_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def moe() -> Iterator[ModuleType]:
    module = load("run")
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("num", [8, 64])
def test_all_kinds_have_the_active_parameters_of_the_dense_model(moe: ModuleType, num: int) -> None:
    """But for the routers'."""
    counts = {name: active_parameter_count(jaxpar.load_config(moe.BENCH, run).model) for name, run in moe.kinds(num).items()}
    dense = counts.pop("dense")
    assert set(counts.values()) == {dense + 4 * 256 * num}


def test_every_router_is_a_legal_run(moe: ModuleType) -> None:
    """All eight, at equal work: as many parameters a token, but for the router's own."""
    models = [jaxpar.load_config(moe.TEXT, list(overrides)).model for overrides in moe.ROUTERS.values()]
    assert len({model.moe.router for model in models if model.moe}) == 8
    router = 4 * 128 * 8
    assert len({matmul_parameters(model) - router * bool(model.moe and model.moe.learns) for model in models}) == 1
    assert {model.moe.mean_choices * model.expert_dim for model in models if model.moe} == {2 * 176}


@pytest.mark.slow
def test_one_step_of_each_kind(moe: ModuleType) -> None:
    for name, run in moe.kinds(8).items():
        changes = [change for change in TINY if name != "dense" or "moe" not in change]
        times = moe.stepping(jaxpar.load_config(moe.BENCH, [*run, *changes]))
        assert min(next(times), next(times)) > 0


def test_summary_of_a_run(moe: ModuleType) -> None:
    row: dict[str, Any] = {"moe_load": [[1.0]], "moe_dropped_worst": 0.1, "moe_max_load": 1.5}
    rows = [{"step": n, "loss": 3.0 - n / 10, **row} for n in range(1, 21)] + [{"step": 20, "eval_loss": 2.0}]
    found = moe.summary(rows)
    assert found["eval_loss"] == {20: 2.0}
    assert found["max_load_last"] == 1.5
    assert found["steps"] == [10, 20]
    assert found["loss"] == [2.45, 1.45]


def test_figure_is_drawn(moe: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = {"steps": list(range(1, 41)), "loss": [3.0] * 40, "max_load": [1.5] * 40, "dropped": [0.1] * 40}
    load("figure").draw(dict.fromkeys(moe.ROUTERS, run), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

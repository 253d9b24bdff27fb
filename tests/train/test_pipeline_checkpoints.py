"""A checkpoint knows no stages: saved under one schedule it is restored, bit for bit, under another depth, another or none."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.build import Parts, build
from jaxpar.checkpoint import CheckpointStore, make_meta
from jaxpar.config.load import load_config
from jaxpar.config.train import CheckpointConfig
from jaxpar.core.records import read_records
from jaxpar.core.tree import leaf_types, named_leaves
from jaxpar.step.natural import natural_spec
from jaxpar.train.display import Quiet
from jaxpar.train.loop import Result, fit
from tests.equivalence.harness import FLOAT32, config, parts_of
from tests.train.test_resume import stopped_after

Make = Callable[..., Parts]
Run = Callable[..., Result]

# 128: as large as a dim has to be for Adafactor to factor it.
MODEL: dict[str, Any] = {"model": {"embed_dim": 128, "mlp_dim": 128, "tied_embeddings": True}, "num_microbatches": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "interleaved, 2 stages": {"mesh": {"pipe": 2, "data": 2}, "pipeline": {"schedule": "interleaved"}, "zero_stage": 1},
    "zb_v, 2 stages": {"mesh": {"pipe": 2, "data": 2, "tensor": 2}, "pipeline": {"schedule": "zb_v"}, "zero_stage": 3},
    "no pipeline": {"mesh": {"data": 4}, "zero_stage": 2},
    "interleaved, 4 stages": {"mesh": {"pipe": 4, "data": 2}, "pipeline": {"schedule": "interleaved"}, "zero_stage": 2},
    "a list, 4 stages": {"mesh": {"pipe": 4}, "pipeline": {"layers_per_stage": (1, 3, 3, 1)}},
}
ODD_LIST: dict[str, Any] = {"pipeline": {"layers_per_stage": (1, 3, 4, 1)}}
OPTIMIZERS = ("adamw", "muon", "adafactor")


@cache
def parts(layout: str, optimizer: str, num_layers: int) -> Parts:
    odd = ODD_LIST if layout.startswith("a list") and num_layers == 9 else {}
    return parts_of(config(FLOAT32, MODEL, LAYOUTS[layout], odd, {"model": {"num_layers": num_layers}, "optimizer": {"name": optimizer}}))


def values(like: Any) -> Any:
    """Random numbers for an abstract state, on the host, with those whose bits are lost first."""

    def one(index: int, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        rng = np.random.default_rng(index)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return rng.integers(1, 1000, leaf.shape).astype(leaf.dtype)
        numbers = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        odd = np.asarray([-0.0, 1e-40, -np.inf, np.nan], leaf.dtype)[rng.integers(0, 4, leaf.shape)]
        return np.where(rng.random(leaf.shape) < 0.1, odd, numbers)

    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(treedef, [one(i, leaf) for i, leaf in enumerate(leaves)])


def differences(got: Any, want: Any) -> list[str]:
    """Leaves whose bits are not the same."""
    left, right = named_leaves(got), named_leaves(want)
    assert left.keys() == right.keys()
    return [name for name in right if np.asarray(left[name]).tobytes() != np.asarray(right[name]).tobytes()]


def put(tree: Any, like: Any) -> Any:
    """Host numbers, sharded as an abstract state."""
    return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, like))


def in_rows(p: Parts, natural: Any, unused: float) -> Any:
    """A state in natural order as the stages of a pipeline hold it, by NumPy; unused: what rows of no layer hold."""
    if p.layout.stages is None:
        return natural
    layers = np.asarray(p.layout.stages.layer_of_row)

    def one(leaf: np.ndarray) -> np.ndarray:
        if leaf.ndim == 0 or leaf.shape[0] != p.config.model.num_layers:
            return leaf
        out = leaf[layers]
        out[layers < 0] = unused if jnp.issubdtype(leaf.dtype, jnp.floating) else int(np.nan_to_num(unused))
        return out

    return jax.tree.map(one, natural)


FIRST, ZB_V, PLAIN, FOUR, LIST = LAYOUTS
CASES = [
    ("adamw", 9, (FIRST, ZB_V, PLAIN, LIST)),
    ("adamw", 8, (FIRST, ZB_V)),  # every stage is full, in an order of its own
    ("muon", 9, (FIRST, FOUR, PLAIN)),
    ("adafactor", 9, (FIRST, ZB_V, PLAIN)),
    ("adafactor", 8, (FIRST, PLAIN)),
]


@pytest.mark.parametrize(("optimizer", "num_layers", "layouts"), CASES, ids=[f"{name}-{n}" for name, n, _ in CASES])
def test_from_each_layout_to_the_next_and_back(optimizer: str, num_layers: int, layouts: tuple[str, ...], tmp_path: Path) -> None:
    """Saved and restored on the way; the files hold what a run without a pipeline would have written."""
    plain = leaf_types(parts(PLAIN, optimizer, num_layers).placement.state)
    want = values(parts(PLAIN, optimizer, num_layers).placement.state)
    before, state = parts(FIRST, optimizer, num_layers), None
    for step, layout in enumerate([*layouts[1:], FIRST], 1):
        if state is None:  # what a stage holds beside its layers is not saved
            state = put(in_rows(before, want, np.nan), before.placement.state)
        after = parts(layout, optimizer, num_layers)
        assert leaf_types(after.natural.state) == plain
        store = CheckpointStore(tmp_path / str(step), CheckpointConfig())
        meta = make_meta(config=before.config.model_dump(mode="json"), fingerprint="", step=step, samples_seen=0)
        store.save(step, before.natural.from_run(state), meta, blocking=True)
        on_disk, _ = store.restore(step, jax.eval_shape(lambda: want))
        assert not differences(on_disk, want)
        restored, _ = store.restore(step, after.natural.state, config=after.config.model_dump(mode="json"))
        store.close()
        state = after.natural.to_run(restored)
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(after.placement.state), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
        assert not differences(state, in_rows(after, want, 0.0))
        before = after


def test_what_is_in_order_is_not_copied() -> None:
    for layout, num_layers in ((PLAIN, 9), ("1f1b", 8)):
        p = parts(layout, "adamw", num_layers) if layout in LAYOUTS else parts_of(config(FLOAT32, MODEL, {"mesh": {"pipe": 2}}))
        state = object()
        assert p.natural.state is p.placement.state
        assert p.natural.from_run(state) is p.natural.to_run(state) is state  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("shape", "spec", "want"),
    [
        ((8, 64, 32), P("pipe", "data"), P("pipe", "data")),
        ((9, 64, 32), P("pipe", "data"), P(None, "data", "pipe")),
        ((9, 64, 32), P("pipe"), P(None, "pipe", None)),
        ((9, 63, 32, 2), P("pipe", None, "tensor"), P(None, None, "tensor", "pipe")),
        ((9, 63), P("pipe"), P(None, None)),
        ((9,), P(), P(None)),
    ],
)
def test_layers_that_do_not_divide_are_sharded_along_another_dim(shape: tuple[int, ...], spec: P, want: P) -> None:
    """In a checkpoint of odd depth no leaf is whole on every device, where any dim divides."""
    assert natural_spec(parts(ZB_V, "adamw", 9).layout, shape, spec) == want


# Whole runs.

RUN = (
    *("model.num_layers=5", "train.steps=9", "num_microbatches=4", "checkpoint.save_every=4"),
    *("data.eval_fraction=0", "log.tensorboard=false"),
)
STAGED = {
    "interleaved": ("mesh.pipe=2", "pipeline.schedule=interleaved", "mesh.data=2"),
    "zb_v": ("mesh.pipe=2", "pipeline.schedule=zb_v", "zero_stage=2", "mesh.tensor=2"),
    "list": ("mesh.pipe=4", "pipeline.layers_per_stage=[1,2,1,1]"),
    "none": (),
}
DEVICES = {"interleaved": 4, "zb_v": 4, "list": 4, "none": 1}


class KilledError(Exception):
    """Stands for a kill: nothing is saved on the way out."""


class KillAt(Quiet):
    """Dies when the numbers of a step are there."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, step: int, loss: float, tokens_per_s: float, note: str) -> None:  # noqa: ARG002
        if step == self.at:
            raise KilledError


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any]:
    """The run that nothing interrupts, on one device, and its initial parameters."""
    p = build(load_config(tiny, [f"run.dir={tmp_path_factory.mktemp('whole')}", *RUN]), devices=jax.devices()[:1])
    return fit(p, display=Quiet()), p.init_state().params


def losses(folder: Path) -> list[float]:
    rows = read_records(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    return [row["loss"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("way", [("interleaved", "zb_v", "none"), ("none", "list", "interleaved")])
def test_stopped_and_killed_under_one_schedule_and_gone_on_under_another(
    make: Make, whole: tuple[Result, Any], way: tuple[str, ...]
) -> None:
    """Stopped after two steps or so, then killed at the eighth, with the fourth saved: the curve is that of one device."""
    first, second, third = (make(*RUN, *STAGED[name], devices=DEVICES[name]) for name in way)
    result, initial = whole
    part = stopped_after(first, 1)
    assert not differences(first.natural.from_run(first.init_state()).params, initial)
    assert part.preempted
    assert part.step < 4
    with pytest.raises(KilledError):
        fit(second, display=KillAt(8))
    assert second.checkpoints.latest() == 4
    rest = fit(third, display=Quiet())
    assert rest.step == 9
    np.testing.assert_allclose(losses(rest.run_dir), result.losses, rtol=1e-5)
    want = named_leaves(result.state.params)
    for name, leaf in named_leaves(third.natural.from_run(rest.state).params).items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(want[name]), rtol=1e-4, atol=1e-6, err_msg=name)

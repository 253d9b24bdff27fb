"""What is saved under one layout comes back bit for bit under any other, and nothing is cast, left out or half there."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint import CheckpointError, CheckpointStore
from jaxpar.config.train import CheckpointConfig
from tests.checkpoint.helpers import CONFIG, MIXED, WHOLE, ZERO3, fill, mesh_of, meta, run_script, same_bits, state_like


def store_at(folder: Path, **fields: Any) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig(**fields))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of step 10 from eight ZeRO-3 shards, and its state."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    state = fill(state_like(mesh_of(8), ZERO3), 1)
    store = store_at(folder)
    store.save(10, state, meta(10), blocking=True)
    store.close()
    return folder, state


@pytest.fixture
def copy(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of that folder, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


@pytest.mark.parametrize(("shape", "specs"), [((2, 2, 2), MIXED), ((1,), WHOLE), ((4,), ZERO3), ((8,), WHOLE)])
def test_any_layout_restores_any_other(saved: tuple[Path, Any], shape: tuple[int, ...], specs: Any) -> None:
    """Case CKP-01."""
    folder, state = saved
    like = state_like(mesh_of(*shape), specs)
    store = store_at(folder)
    restored, info = store.restore(None, like, config=CONFIG, fingerprint="sha256:abc")
    store.close()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert same_bits(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert leaf.sharding == wanted.sharding
    assert (info["step"], info["samples_seen"], info["seed"], info["config"]) == (10, 160, 7, CONFIG)
    assert {"jaxpar", "jax", "flax", "optax", "python"} <= info["versions"].keys()


def test_plain_arrays(saved: tuple[Path, Any]) -> None:
    folder, state = saved
    store = store_at(folder)
    restored, _ = store.restore(10, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
    store.close()
    assert {type(leaf) for leaf in jax.tree.leaves(restored)} == {np.ndarray}
    assert same_bits(restored, state)


def test_state_may_be_donated_right_after_save(tmp_path: Path) -> None:
    like = state_like(mesh_of(8), ZERO3)
    state, store = fill(like, 1), store_at(tmp_path)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    store.save(1, state, meta(1))
    for _ in range(3):
        state = overwrite(state)
    jax.block_until_ready(state)
    store.wait()
    assert same_bits(store.restore(1, like)[0], fill(like, 1))
    store.close()


@pytest.mark.parametrize("layers", [3, 5])
def test_another_depth_lists_every_path(saved: tuple[Path, Any], layers: int) -> None:
    """Case CKP-03."""
    store = store_at(saved[0])
    with pytest.raises(CheckpointError) as caught:
        store.restore(10, state_like(mesh_of(8), ZERO3, layers=layers), config=CONFIG | {"model": {"num_layers": layers, "embed_dim": 16}})
    text = str(caught.value)
    assert f"model.num_layers: the checkpoint has 4, this run {layers}" in text
    for path in ("params.blocks.kernel", "params.blocks.scale", "opt.0.mu.blocks.kernel", "opt.0.mu.blocks.scale"):
        assert f"{path}: shape differs" in text
    assert f"checkpoint float32[4, 16, 32], run float32[{layers}, 16, 32]" in text
    assert "table" not in text


def test_dtype_and_tree_are_never_bent(saved: tuple[Path, Any]) -> None:
    like = state_like(mesh_of(8), ZERO3)
    table = like["params"]["embed"].pop("table")
    like["params"]["embed"]["tokens"] = table
    kernel = like["params"]["blocks"]["kernel"]
    like["params"]["blocks"]["kernel"] = jax.ShapeDtypeStruct(kernel.shape, jnp.bfloat16, sharding=kernel.sharding)
    with pytest.raises(CheckpointError) as caught:
        store_at(saved[0]).restore(10, like, fingerprint="sha256:other")
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["data", "params.blocks.kernel", "params.embed.table", "params.embed.tokens"]
    assert "dtype differs: checkpoint float32[4, 16, 32], run bfloat16[4, 16, 32]" in lines[1]
    assert "unknown to the run" in lines[2]
    assert "missing in the checkpoint" in lines[3]


def data_file(folder: Path) -> Path:
    """The largest file of a checkpoint."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "emptied": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "were written"),
    "one bit": (damage_flip, "has other content than was written"),
    "removed": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("target", ["data", "meta.json"])
def test_damaged_file_is_named(copy: Path, damage: str, target: str) -> None:
    path = data_file(copy / "10") if target == "data" else copy / "10" / target
    act, reason = DAMAGE[damage]
    act(path)
    store = store_at(copy)
    assert store.latest() == 10  # found, so the run must stop: never start at 0
    with pytest.raises(CheckpointError) as caught:
        store.restore(None, state_like(mesh_of(8), ZERO3))
    assert f"{path.relative_to(copy / '10')} " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", '{"format": 99}', '{"format": 1, "step": 10}', "[]"])
def test_damaged_manifest(copy: Path, content: str) -> None:
    (copy / "10" / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"checkpoint 10 .*/manifest\.json cannot be read"):
        store_at(copy).restore(None, state_like(mesh_of(8), ZERO3))


def test_emptied_folder_stops_and_tells_the_way_back(copy: Path) -> None:
    (copy / "20").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint 20 .*manifest\.json is missing.*to go back to step 10, move .*20 away"):
        store_at(copy).restore(None, state_like(mesh_of(8), ZERO3))


def test_no_such_step(saved: tuple[Path, Any], tmp_path: Path) -> None:
    like = state_like(mesh_of(8), ZERO3)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store_at(tmp_path / "none").restore(None, like)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*: it has 10"):
        store_at(saved[0]).restore(5, like)
    assert store_at(tmp_path / "none").latest() is None


def test_steps_are_numbers(tmp_path: Path) -> None:
    """Case CKP-11: 10000 is newer than 9000, and keep_last 1 deletes only 9000."""
    like = state_like(mesh_of(8), ZERO3)
    store = store_at(tmp_path, keep_last=1)
    store.save(9000, fill(like, 1), meta(9000), blocking=True)
    store.save(10000, fill(like, 2), meta(10000), blocking=True)
    assert (store.steps(), store.latest()) == ([10000], 10000)
    store.close()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6]),
        ({"keep_last": 2, "keep_every": 2}, [2, 4, 5, 6]),
        ({"keep_last": -1}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_keep_policy(tmp_path: Path, fields: dict[str, int], kept: list[int]) -> None:
    store = store_at(tmp_path, **fields)
    for step in range(1, 7):
        store.save(step, {"step": jnp.asarray(step)}, meta(step))
    store.close()
    assert store.steps() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in kept]


def test_keep_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep at least 1, or -1"):
        CheckpointConfig(keep_last=0)


def test_a_step_of_this_run_is_saved_once(tmp_path: Path) -> None:
    state = {"step": jnp.asarray(5)}
    store = store_at(tmp_path)
    store.save(5, state, meta(5), blocking=True)
    before = (tmp_path / "5" / "manifest.json").stat().st_mtime_ns
    store.save(5, state, meta(5), blocking=True)
    again = store_at(tmp_path)
    again.restore(5, jax.eval_shape(lambda: state))
    again.save(5, state, meta(5), blocking=True)
    assert (tmp_path / "5" / "manifest.json").stat().st_mtime_ns == before
    store.close()
    again.close()


def test_checkpoints_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    """A run that starts afresh, or from an older step, must not be followed by another's newer checkpoints."""
    first = store_at(tmp_path, keep_last=-1)
    for step in (5, 10):
        first.save(step, {"step": jnp.asarray(step)}, meta(step))
    first.close()
    second = store_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints of another run at steps 5, 10, this one is at 0"):
        second.prepare(100)
    second.restore(5, {"step": jax.ShapeDtypeStruct((), jnp.int32)})
    with pytest.raises(CheckpointError, match=r"another run at steps 10, this one is at 5"):
        second.prepare(100, start_step=5)
    with pytest.raises(CheckpointError, match=r"another run at steps 10, this one is at 6"):
        second.save(6, {"step": jnp.asarray(6)}, meta(6))
    second.close()


def test_making_a_store_is_cheap(saved: tuple[Path, Any]) -> None:
    """Neither Orbax nor TensorStore is imported before the first save or restore."""
    result = run_script("assert store.latest() == 10; print(sorted({'orbax', 'tensorstore'} & sys.modules.keys()))", saved[0])
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr

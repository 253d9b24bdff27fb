"""Killed, out of space, not writable: the earlier checkpoint survives, the failure has a name, and later saves work."""

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import CheckpointError, CheckpointStore
from jaxpar.checkpoint.folder import check_space, remove_failed
from jaxpar.config.train import CheckpointConfig
from tests.checkpoint.helpers import ZERO3, fill, mesh_of, meta, run_script, same_bits, state_like


def store_at(folder: Path, **fields: Any) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig(**fields))


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_killed_while_saving(tmp_path: Path, delay_s: float) -> None:
    """Cases CKP-07, CKP-08: SIGKILL at some moment of the save of step 10; a new run goes on and all its steps are there."""
    body = """
store.save(5, fill(like, 5), meta(5), blocking=True)
store.save(10, fill(like, 10), meta(10))
time.sleep(float(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_script(body, tmp_path, delay_s)
    assert result.returncode == -9, result.stderr
    like = state_like(mesh_of(8), ZERO3)
    store = store_at(tmp_path, keep_last=-1)
    start = store.latest()
    assert start in (5, 10)
    state, info = store.restore(None, like)
    assert info["step"] == start
    assert same_bits(state, fill(like, start))
    store.prepare(1000, start_step=start)
    for step in (10, 15, 20):
        store.save(step, fill(like, step), meta(step))
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "15", "20", "5"]
    for step in (10, 15, 20):
        assert same_bits(store.restore(step, like)[0], fill(like, step))
    store.close()


def test_stale_temporary_of_the_same_step(tmp_path: Path) -> None:
    """Case CKP-08."""
    stale = tmp_path / "tmp.10" / "state" / "d"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x" * 100)
    (tmp_path / "tmp.probe.0").write_bytes(b"")
    store = store_at(tmp_path)
    assert store.latest() is None
    store.prepare(1000)
    store.save(10, {"step": jnp.asarray(10)}, meta(10), blocking=True)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_file_size_limit_stands_for_a_full_disk(tmp_path: Path) -> None:
    """Case CKP-10: the write fails in the background; `check` says so with the step, exit is not 0, step 5 is whole."""
    body = """
store.save(5, fill(like, 5), meta(5), blocking=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
store.save(10, fill(like, 10), meta(10))
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    store.check()
    time.sleep(0.01)
"""
    result = run_script(body, tmp_path)
    assert result.returncode == 1
    assert "CheckpointError: checkpoint of step 10 was not saved" in result.stderr
    assert "(step 5 is still there)" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["5"]  # what was half written is not left on a full disk
    like = state_like(mesh_of(8), ZERO3)
    store = store_at(tmp_path)
    assert same_bits(store.restore(None, like)[0], fill(like, 5))
    store.close()


def test_what_late_writers_make_after_a_failure_is_removed_too(tmp_path: Path) -> None:
    """Orbax raises the first failure while other writers of the same save are still at work."""
    failed = tmp_path / "tmp.10"

    def write() -> None:
        for number in range(20):
            folder = failed / "state" / str(number)
            with contextlib.suppress(FileNotFoundError):  # removed between the two lines
                folder.mkdir(parents=True)
                (folder / "array").write_bytes(b"x")
            time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    remove_failed(failed)
    writer.join()
    assert not failed.exists()


def save_ten(store: CheckpointStore) -> None:
    store.save(10, {"step": jnp.asarray(10)}, meta(10))
    store.wait()


def test_folder_lost_during_the_run(tmp_path: Path) -> None:
    """Case CKP-05: a lost save is an error at the next one, and at the end."""
    folder = tmp_path / "checkpoints"
    store = store_at(folder)
    store.save(5, {"step": jnp.asarray(5)}, meta(5), blocking=True)
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 10 was not saved .*no earlier one exists"):
        save_ten(store)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    store.save(15, {"step": jnp.asarray(15)}, meta(15))  # mended: the store works again
    store.close()
    assert store.steps() == [5, 15]


def test_failure_in_the_background_surfaces_at_the_next_save(tmp_path: Path) -> None:
    """meta that is no JSON fails in the worker: `wait`, the next `save` and `close` all tell the step."""
    for tell in (lambda s: s.wait(), lambda s: s.save(2, {"step": jnp.asarray(2)}, {}), lambda s: s.close()):
        store = store_at(tmp_path)
        store.save(1, {"step": jnp.asarray(1)}, {"bad": object()})
        with pytest.raises(CheckpointError, match=r"checkpoint of step 1 was not saved .*TypeError"):
            tell(store)
        store.close()
        assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*file/checkpoints: .*; set run\.dir"):
        store_at(tmp_path / "file" / "checkpoints").prepare(1000)


def test_space(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=2)
    assert check_space(tmp_path, 1000, config) is None
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match=r"a checkpoint takes about .* free: free some, or set run\.dir"):
        check_space(tmp_path, 2 * free, config)
    warning = check_space(tmp_path, free // 2, config)
    assert warning is not None
    assert "keep_last = 2 needs about" in warning
    assert "3 checkpoints of" in warning

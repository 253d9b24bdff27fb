"""Save and restore the state of a run: asynchronous, atomic, in global natural coordinates (law L5), verified.

Orbax copies the arrays and writes them behind the run's back into `tmp.<step>`; one thread of ours then adds what identifies them
(`meta.json`, `manifest.json`), waits for the disk, and renames the folder to `<step>`. So a folder named by a number was once whole.
"""

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpar.checkpoint import folder as folders
from jaxpar.checkpoint.compat import config_differences
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.manifest import FILE as MANIFEST_FILE
from jaxpar.checkpoint.manifest import Manifest, damaged_files, file_entry, read_manifest, scan_files
from jaxpar.config.train import CheckpointConfig
from jaxpar.core.tree import LeafType, leaf_types, named_leaves, tree_differences
from jaxpar.core.typing import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

META_FILE, STATE_FOLDER = "meta.json", "state"
_PEER_WAIT_S = 600  # how long other processes wait for process 0 to give a checkpoint its name


class CheckpointStore:
    """The checkpoints of one run. Making it, `steps` and `latest` touch neither Orbax nor a device."""

    def __init__(self, folder: Path | str, config: CheckpointConfig) -> None:
        self.folder = Path(folder).absolute()
        self.config = config
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: tuple[int, Future[None]] | None = None
        self._ours: set[int] = set()  # steps that this store has saved, or restored: this run's own past

    def steps(self) -> list[int]:
        """Steps in numeric order, damaged ones too."""
        return list(folders.saved_steps(self.folder))

    def latest(self) -> int | None:
        """The highest step, or None."""
        return max(self.steps(), default=None)

    def prepare(self, state_bytes: int, start_step: int = 0) -> str | None:
        """Before the first step: CheckpointError where saving cannot work; a warning about space, or None.

        start_step: where the run goes on from. Newer checkpoints in the folder are of another run, and would be taken for this one's.
        """
        folders.check_writable(self.folder, f"probe.{jax.process_index()}")
        if jax.process_index() == 0:
            folders.remove_temporary(self.folder)
        self._refuse_others([step for step in self.steps() if step > start_step], start_step)
        return folders.check_space(self.folder, state_bytes, self.config)

    def save(self, step: int, state: PyTree, meta: Mapping[str, Any], *, blocking: bool = False) -> None:
        """Save the state after `step` updates; returns when it is copied (blocking: when it is on the disk).

        The state may be donated after the call. A step that this run has saved, or was restored from, is not saved again. Raises
        CheckpointError for a failure of this save, or of the one before it, which names that one's step.
        """
        self.wait()
        if step in self._ours:
            return
        self._refuse_others([other for other in self.steps() if other >= step], step)
        arrays = named_leaves(state)
        target = folders.temporary(self.folder, step)
        try:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.remove_temporary(self.folder)
                target.mkdir()
            self._save_arrays(target / STATE_FOLDER, arrays)
        except (OSError, ValueError, RuntimeError) as error:
            if jax.process_index() == 0:
                folders.remove_failed(target)
            raise self._failure(step, error) from error
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = step, self._worker.submit(self._commit, step, target, leaf_types(state), {**meta, "step": step})
        if blocking:
            self.wait()

    def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed; never waits. For every step of the loop."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Until the save in the background is on the disk; CheckpointError, with its step, if it failed."""
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()
        self._pending = None
        if error is not None:
            self._orbax = None
            raise self._failure(step, error) from error
        self._ours.add(step)

    def close(self) -> None:
        """Wait, then let go of threads. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
            if self._orbax is not None:
                self._orbax.close()
            self._worker = self._orbax = None

    def restore(
        self, step: int | None, like: PyTree, *, config: Mapping[str, Any] | None = None, fingerprint: str | None = None
    ) -> tuple[PyTree, dict[str, Any]]:
        """(state, meta) of a step (None: the latest), in the tree, dtypes and shardings of `like`.

        like: `jax.ShapeDtypeStruct` leaves; without a sharding a leaf comes back as a numpy array. config, fingerprint: of this run, if
        it is to go on; compared with the checkpoint's. Raises CheckpointError where there is no such step, where it cannot be read
        (naming every damaged file), or where it does not fit (listing every difference). Nothing is cast or left out.
        """
        step, path = self._find(step)
        meta, manifest = self._read(step, path)
        differences = [] if config is None else config_differences(meta["config"], config)
        if fingerprint is not None and fingerprint != meta["data_fingerprint"]:
            differences.append(f"data: the checkpoint was trained on {meta['data_fingerprint']}, this run reads {fingerprint}")
        differences += tree_differences(manifest.arrays, leaf_types(like), found_in="checkpoint", wanted_in="run")
        if differences:
            raise CheckpointError(f"checkpoint {step} in {self.folder} does not fit this run:\n  " + "\n  ".join(differences))
        arrays = self._restore_arrays(path / STATE_FOLDER, named_leaves(like))
        self._ours.add(step)
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in named_leaves(like)]), meta

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """meta of a step (None: the latest) without its arrays; raises as `restore` does where it cannot be read."""
        step, path = self._find(step)
        return self._read(step, path)[0]

    def _find(self, step: int | None) -> tuple[int, Path]:
        found = folders.saved_steps(self.folder)
        if not found:
            raise CheckpointError(f"no checkpoint in {self.folder}")
        step = max(found) if step is None else step
        if step not in found:
            raise CheckpointError(f"no checkpoint of step {step} in {self.folder}: it has {', '.join(map(str, found))}")
        return step, found[step]

    def _read(self, step: int, path: Path) -> tuple[dict[str, Any], Manifest]:
        try:
            manifest = read_manifest(path)
            problems = damaged_files(path, manifest, part=jax.process_index(), parts=jax.process_count())
        except CheckpointError as error:
            manifest, problems = None, [str(error)]
        if problems or manifest is None:
            older = [other for other in self.steps() if other < step]
            advice = f"; to go back to step {older[-1]}, move {path} away" if older else ""
            raise CheckpointError(f"checkpoint {step} in {self.folder} is damaged: {'; '.join(problems)}{advice}")
        return json.loads((path / META_FILE).read_text()), manifest

    def _refuse_others(self, steps: list[int], here: int) -> None:
        others = [step for step in steps if step not in self._ours]
        if others:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of another run at steps {', '.join(map(str, others))}, this one is at {here}: "
                "go on from the latest (checkpoint.resume=auto), move them away, or set another run.dir"
            )

    def _failure(self, step: int, error: BaseException) -> CheckpointError:
        kept = self.latest()
        rest = "no earlier one exists" if kept is None else f"step {kept} is still there"
        return CheckpointError(f"checkpoint of step {step} was not saved to {self.folder}: {type(error).__name__}: {error} ({rest})")

    def _checkpointer(self) -> "ocp.AsyncCheckpointer":
        import orbax.checkpoint as ocp

        if self._orbax is None:
            # Weights hardly compress (8 % of random float32): not worth cores that train.
            self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        return self._orbax

    def _save_arrays(self, path: Path, arrays: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp

        self._checkpointer().save(path, args=ocp.args.PyTreeSave(arrays))

    def _restore_arrays(self, path: Path, like: dict[str, Any]) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        def how(leaf: Any) -> ocp.RestoreArgs:
            if leaf.sharding is None:
                return ocp.RestoreArgs(restore_type=np.ndarray)
            return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

        restore_args = {name: how(leaf) for name, leaf in like.items()}
        return self._checkpointer().restore(path, args=ocp.args.PyTreeRestore(item=like, restore_args=restore_args))

    def _commit(self, step: int, target: Path, arrays: dict[str, LeafType], meta: dict[str, Any]) -> None:
        """In the worker: from data on its way to a checkpoint with a name. Leaves no temporary folder behind, whatever fails."""
        final = self.folder / str(step)
        if jax.process_index() != 0:
            self._checkpointer().wait_until_finished()
            _wait_for(final)
            return
        with ExitStack() as on_failure:
            on_failure.callback(folders.remove_failed, target)
            self._checkpointer().wait_until_finished()
            (target / META_FILE).write_text(json.dumps(meta, indent=1))
            manifest = Manifest(step, arrays, scan_files(target, sync=True))
            (target / MANIFEST_FILE).write_text(manifest.as_text())
            file_entry(target / MANIFEST_FILE, sync=True)
            folders.sync_folders(target)
            target.rename(final)
            on_failure.pop_all()
        folders.sync_folder(self.folder)
        folders.prune(self.folder, self.config)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _PEER_WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process 0 has not finished {path} in {_PEER_WAIT_S} s")
        time.sleep(0.1)

"""Where a run starts: at step 0, at its own latest checkpoint, or at another run's; and whether going on from there is honest.

Going on is honest when the whole is the run that the present config would have made alone. So what changes the maths must be
as it was; how the run is laid out may change. `train.steps` may change where the learning rates of the steps already made
stay what they were (constant, or wsd before its decay), which is computed, not guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.build import Parts
from jaxpar.checkpoint.compat import config_changes, config_differences, make_meta
from jaxpar.checkpoint.store import CheckpointStore
from jaxpar.config.errors import ConfigError
from jaxpar.optim.schedule import learning_rate
from jaxpar.step.state import TrainState
from jaxpar.train.folder import set_aside

# Keys that the parameter tree would survive, but the loss curve would not.
CHANGES_CURVE = ("optimizer.", "compute_dtype", "z_loss")


@dataclass(frozen=True)
class Start:
    """make: the state, sharded as the run wants it. step: updates done. words: for people."""

    make: Callable[[], TrainState]
    step: int
    samples_seen: int
    words: str
    own: bool = True  # from this run's own checkpoints


def find_start(parts: Parts) -> Start:
    """Follow `checkpoint.resume`. A checkpoint that is there and cannot be read or used stops the run: it never begins anew in silence."""
    resume = parts.config.checkpoint.resume
    if resume == "never":
        aside = set_aside(parts.run_dir)
        moved = f"; what an earlier run left is now in {aside}" if aside else ""
        return Start(parts.init_state, 0, 0, f"step 0 (checkpoint.resume=never{moved})")
    if parts.checkpoints.latest() is not None:
        return restored(parts, parts.checkpoints)
    if resume != "auto":
        return restored(parts, CheckpointStore(Path(resume), parts.config.checkpoint), own=False)
    return Start(parts.init_state, 0, 0, "step 0")


def restored(parts: Parts, store: CheckpointStore, *, own: bool = True) -> Start:
    """The latest checkpoint of `store`; CheckpointError or ConfigError, with every difference, where it is not this run's."""
    meta = store.read_meta()
    refuse_changes(parts, meta, str(store.folder))
    config = parts.config.model_dump(mode="json")
    fingerprint = parts.train_data.fingerprint()
    layout = ("mesh", "zero_stage", "num_microbatches", "pipeline")
    told = [line for line in config_changes(meta["config"], config) if line.startswith(layout)]
    words = "\n  ".join([f"step {meta['step']}, from {store.folder}", *told])

    def make() -> TrainState:
        return parts.natural.to_run(store.restore(meta["step"], parts.natural.state, config=config, fingerprint=fingerprint)[0])

    return Start(make, meta["step"], meta["samples_seen"], words, own)


def refuse_changes(parts: Parts, meta: Mapping[str, Any], source: str) -> None:
    """ConfigError that lists every key whose change would bend the curve."""
    saved, current = meta["config"], parts.config.model_dump(mode="json")
    lines = config_differences(saved, current)
    bends = [line for line in config_changes(saved, current) if line.startswith(CHANGES_CURVE)]
    if not bends and saved["train"]["steps"] != parts.config.train.steps and not same_rates(parts, saved["train"]["steps"], meta["step"]):
        steps = f"the checkpoint has {saved['train']['steps']}, this run {parts.config.train.steps}"
        bends = [f"train.steps: {steps}: optimizer.schedule={parts.config.optimizer.schedule} had other learning rates so far"]
    if lines + bends:
        advice = "to go on, set what the checkpoint has; to start anew, another run.dir or checkpoint.resume=never"
        raise ConfigError(
            [*lines, *bends], f"cannot go on from step {meta['step']} in {source}: the curve would not be that of one run ({advice})"
        )


def same_rates(parts: Parts, saved_steps: int, done: int) -> bool:
    """Whether the first `done` updates had the same learning rates when the run was planned for `saved_steps`."""
    step_N = jnp.arange(done, dtype=jnp.int32)
    before = jax.vmap(learning_rate(parts.config.optimizer, saved_steps))(step_N)
    return bool(jnp.array_equal(before, jax.vmap(parts.learning_rate)(step_N)))


def meta_of(parts: Parts, step: int, samples_seen: int) -> dict[str, Any]:
    """What a checkpoint of this run says beside its arrays."""
    config = parts.config.model_dump(mode="json")
    return make_meta(config=config, fingerprint=parts.train_data.fingerprint(), step=step, samples_seen=samples_seen)

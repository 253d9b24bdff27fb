"""The train step compiled once, ahead: a call with other types is an error that names what changed, never a second compilation."""

import time
from collections.abc import Callable, Iterator, Mapping

import jax

from jaxpar.build import Parts
from jaxpar.core.tree import leaf_type, named_leaves
from jaxpar.core.typing import Array, PyTree
from jaxpar.step.state import TrainState
from jaxpar.train.background import Background
from jaxpar.train.errors import StepChangedError

ROOM = 2  # a program and the end of programs: a thread whose result nobody fetches still ends, and with it the process


class CompiledStep:
    """Callable as the step itself: (state, batch) -> (state, metrics)."""

    def __init__(self, step: jax.stages.Wrapped, state: TrainState, batch: Mapping[str, jax.ShapeDtypeStruct]):
        """state, batch: abstract, with shardings."""
        started = time.perf_counter()
        self._expected = {"state": state, "batch": dict(batch)}
        self.compiled = step.lower(state, dict(batch)).compile()
        self.compile_s = time.perf_counter() - started

    def __call__(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        try:
            return self.compiled(state, dict(batch))
        except (TypeError, ValueError) as error:
            if changed := differences(self._expected, {"state": state, "batch": dict(batch)}):
                text = "\n  ".join(["the train step was compiled for other inputs; what changed:", *changed])
                raise StepChangedError(text) from error
            raise


def compiling(parts: Parts) -> Background[CompiledStep]:
    """The train step of a run, being compiled on a thread while the state is made or read (quickstart: 2.6 s beside 6 s)."""

    def make() -> Iterator[CompiledStep]:
        batch = parts.feed.abstract(parts.config.data.global_batch_size, parts.config.num_microbatches)
        yield CompiledStep(parts.train_step, parts.placement.state, batch)

    return Background(make, ROOM, daemon=False)


def differences(expected: PyTree, given: PyTree) -> list[str]:
    """One line for each leaf that is missing, new, or of another shape, dtype or sharding."""
    wanted, found = named_leaves(expected), named_leaves(given)
    lines = [f"{name}: missing; compiled with {leaf_type(wanted[name])}" for name in wanted if name not in found]
    lines += [f"{name}: not there when compiled; now {leaf_type(found[name])}" for name in found if name not in wanted]
    for name in (name for name in wanted if name in found):
        was, now = wanted[name], found[name]
        if leaf_type(was) != leaf_type(now):
            lines.append(f"{name}: compiled with {leaf_type(was)}, now {leaf_type(now)}")
        elif isinstance(now, jax.Array) and not now.sharding.is_equivalent_to(was.sharding, len(was.shape)):
            lines.append(f"{name}: compiled with sharding {was.sharding.spec}, now {now.sharding}")
    return lines


def compile_eval(parts: Parts, give_up: Callable[[], bool]) -> jax.stages.Compiled | None:
    """The evaluation step, compiled on a thread; None when `give_up()` turned true first: a run asked to stop saves, it does not wait."""
    batch = parts.feed.abstract(parts.config.data.global_batch_size, parts.config.num_microbatches)

    def make() -> Iterator[jax.stages.Compiled]:
        yield parts.eval_step.lower(parts.placement.state.params, batch).compile()

    return Background(make, ROOM, daemon=False).next(give_up)

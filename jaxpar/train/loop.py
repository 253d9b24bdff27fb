"""The loop: host code around the compiled step. Its numbers are read one step late, so the devices never wait for the host.

At most two steps are in flight: one runs, the next is dispatched, and before a third the first has ended.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import jax

from jaxpar.build import Parts
from jaxpar.config.load import to_yaml
from jaxpar.core.records import Row, keep_until, read_records
from jaxpar.core.tree import named_leaves, tree_bytes
from jaxpar.core.typing import Array
from jaxpar.core.words import versions
from jaxpar.step.state import TrainState
from jaxpar.train.background import Background
from jaxpar.train.compiled import CompiledStep, compile_eval, compiling
from jaxpar.train.display import ConsoleDisplay, Display, reading
from jaxpar.train.errors import ExpertsError
from jaxpar.train.evaluate import evaluate
from jaxpar.train.experts import experts_note, limits_error, list_row, table_row, worst_row
from jaxpar.train.folder import check_writable, locked, replace_text, write_hosts
from jaxpar.train.metrics import Clock, MetricsLog, clock_of, fixed_row, scalars_and_tables, step_numbers
from jaxpar.train.nonfinite import NonFinitePolicy, last_good
from jaxpar.train.resume import Start, find_start, meta_of
from jaxpar.train.signals import StopSignals
from jaxpar.train.summary import facts_of


@dataclass(frozen=True)
class Result:
    """What a run gave. losses: of the steps that this call made, in order. eval_loss: of the last evaluation, if there was one."""

    step: int
    losses: list[float]
    eval_loss: float | None
    run_dir: Path
    preempted: bool
    state: TrainState


def fit(parts: Parts, *, stop: StopSignals | None = None, display: Display | None = None) -> Result:
    """Train to `train.steps`, from where the run folder says (`checkpoint.resume`), and leave everything in the run folder.

    Ctrl-C, SIGTERM and SIGUSR1 save after the current step and return with `preempted`; before the first step they end the
    process with status 75. stop: signals already listened to. display: default rich on standard output, `Quiet()` for none.
    Raises ConfigError or CheckpointError for what the user can mend, NonFiniteError where the policy stops the run.
    """
    display = display or ConsoleDisplay()
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopSignals())
        check_writable(parts.run_dir)
        if jax.process_index() == 0:
            stack.enter_context(locked(parts.run_dir))
        parts.progress = parts.progress or reading(display)
        start = find_start(parts)
        display.header(f"jaxpar {parts.config.name}: {parts.run_dir}", [*facts_of(parts), ("start", start.words)])
        if start.step >= parts.config.train.steps:
            return finished_before(parts, start, display)
        return train(parts, start, stop, display)


def train(parts: Parts, start: Start, stop: StopSignals, display: Display) -> Result:
    """Prepare the folder, compile, run the steps, close what was opened."""
    display.line("compiling the train step")
    compilation = compiling(parts)
    state = start.make()
    if warning := parts.checkpoints.prepare(tree_bytes(parts.placement.state), start.step if start.own else 0):
        display.line(warning)
    log = open_log(parts, start, display)
    data = Background(lambda: placed_batches(parts, start.samples_seen), parts.config.data.prefetch)
    try:
        step = compilation.next(lambda: False)
        assert step is not None  # nothing gives up: before the first step it is the listening thread that ends the process
        display.line(f"compiled in {step.compile_s:.1f} s")
        loop = Loop(parts, start, state, stop, display, log, step, data, clock_of(parts))
        stop.loop_acts()
        display.start(start.step, parts.config.train.steps)
        return loop.run()
    finally:
        display.stop()
        data.close()
        log.close()
        parts.checkpoints.close()


@dataclass
class Loop:
    """A run between its first and its last step."""

    parts: Parts
    start: Start
    state: TrainState
    stop: StopSignals
    display: Display
    log: MetricsLog
    train_step: CompiledStep
    data: Background[dict[str, Array]]
    clock: Clock
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    eval_limits: ExpertsError | None = None  # of the last evaluation
    eval_step: jax.stages.Compiled | None = None
    running: tuple[int, dict[str, Array]] | None = None  # the step whose numbers were not read yet

    def __post_init__(self) -> None:
        self.done = self.saved = self.start.step
        self.policy = NonFinitePolicy(self.parts.config.train, list(named_leaves(self.parts.placement.shapes)))

    def run(self) -> Result:
        self.clock.restart()
        while self.done < self.parts.config.train.steps:
            batch = None if self.stop.requested else self.next_batch()
            if batch is None:  # only a stop breaks off waiting for data
                return self.end(preempted=True)
            self.dispatch(batch)
            if self.pauses(self.done):
                self.pause()
            self.parts.checkpoints.check()
        self.settle()
        return self.end(preempted=False)

    def asked_to_stop(self) -> bool:
        return self.stop.requested

    def next_batch(self) -> dict[str, Array] | None:
        began = time.perf_counter()
        batch = self.data.next(self.asked_to_stop)
        self.clock.wait_s += time.perf_counter() - began
        return batch

    def dispatch(self, batch: dict[str, Array]) -> None:
        """Start a step, then read the numbers of the one before it."""
        self.state, metrics = self.train_step(self.state, batch)
        before, self.running = self.running, (self.done + 1, metrics)
        self.done += 1
        if before is not None:
            self.account(*before)

    def settle(self, ending: ExpertsError | None = None) -> Row | None:
        """Wait for the running step; its row if it is not written yet. ending: what the step before it ends the run with."""
        running, self.running = self.running, None
        return self.account(*running, write=False, ending=ending) if running else None

    def account(self, step: int, metrics: dict[str, Array], *, write: bool = True, ending: ExpertsError | None = None) -> Row | None:
        """Read a step's numbers: wait for it, time it, judge it, log it. A step that is worse than what ends the run ends it instead."""
        found = step_numbers(metrics)
        numbers = found.scalars
        self.clock.step_done()
        self.losses.append(numbers["loss"])
        bad = self.policy.is_bad(numbers)
        error = self.policy.error(step, numbers, found.leaf_norms) if bad else None
        limits = limits_error(self.parts.config.model.moe, f"step {step}", found.tables)
        limits = ending if ending is not None and not (limits and limits.lossy) else limits
        logged = step % self.parts.config.train.log_every == 0 or step == self.parts.config.train.steps
        rate, worst = self.clock.tokens_per_step * self.clock.steps / self.clock.train_s, worst_row(found.tables)
        self.display.step(step, numbers["loss"], rate, experts_note(worst))
        if not (logged or bad or limits or not write):
            return None
        row = {"step": step, **numbers, **list_row(found.tables), **worst, "tokens": step * self.clock.tokens_per_step}
        row |= {**self.clock.take(), **fixed_row(self.parts), **({"skipped": True} if bad else {})}
        if error is not None:
            self.log.write(row)
            self.save_last_good()
            raise error
        if limits is not None:
            self.log.write(row)
            if not limits.lossy:
                self.settle(ending=limits)  # the step that has begun meanwhile is saved too
            # After drops the state is as good as any; after a loss it is one that this layout alone would have made.
            self.stop_for(limits, save=not limits.lossy)
        if write:
            self.write(row)
        return row

    def pauses(self, step: int) -> bool:
        """Whether this step ends with an evaluation or a checkpoint."""
        return self.evaluates(step) or self.saves(step)

    def evaluates(self, step: int) -> bool:
        train = self.parts.config.train
        return self.parts.config.data.has_eval and (step == train.steps or bool(train.eval_every and step % train.eval_every == 0))

    def saves(self, step: int) -> bool:
        every = self.parts.config.checkpoint.save_every
        return step == self.parts.config.train.steps or bool(every and step % every == 0)

    def pause(self) -> None:
        """Evaluate and save after a step whose numbers are in; the row is written before the checkpoint exists."""
        row = self.settle() or {"step": self.done}
        if self.evaluates(self.done):
            row |= self.evaluation()
        self.write(row)
        if self.saves(self.done):
            self.save()
        if self.eval_limits is not None:
            self.stop_for(self.eval_limits, save=True)
        self.clock.restart()

    def evaluation(self) -> Row:
        """Means over the held-out set; nothing when a stop was asked meanwhile."""
        if self.eval_step is None:
            self.eval_step = compile_eval(self.parts, self.asked_to_stop)
        began = time.perf_counter()
        means = evaluate(self.parts, self.state.params, step=self.eval_step, give_up=self.asked_to_stop) if self.eval_step else None
        if means is None:
            return {}
        scalars, tables = scalars_and_tables({f"eval_{name}": value for name, value in means.items()})
        self.eval_loss = scalars["eval_loss"]
        self.eval_limits = limits_error(self.parts.config.model.moe, f"evaluation after step {self.done}", tables, "eval_")
        return {**scalars, **table_row(tables), "eval_s": time.perf_counter() - began}

    def write(self, row: Row) -> None:
        self.log.write(row)
        self.display.row(row)

    def save(self, *, blocking: bool = False) -> None:
        """The present state as a checkpoint, unless it is one already."""
        if self.done == self.saved:
            return
        samples = self.start.samples_seen + (self.done - self.start.step) * self.parts.config.data.global_batch_size
        state = self.parts.natural.from_run(self.state)
        self.parts.checkpoints.save(self.done, state, meta_of(self.parts, self.done, samples), blocking=blocking)
        self.saved = self.done

    def stop_for(self, limits: ExpertsError, *, save: bool) -> NoReturn:
        """End the run, and say from where it can go on."""
        if save:
            self.save(blocking=True)
        self.parts.checkpoints.wait()
        there = f"the last checkpoint is of step {self.saved}" if self.saved else "there is no checkpoint yet"
        raise ExpertsError(f"{limits}; {there}", lossy=limits.lossy)

    def save_last_good(self) -> None:
        """After a step that stopped the run: the state that it found."""
        self.state, self.done = last_good(self.state)
        self.save(blocking=True)

    def end(self, *, preempted: bool) -> Result:
        """Everything on disk."""
        if row := self.settle():
            self.write(row)
        self.save(blocking=True)
        self.parts.checkpoints.wait()
        if preempted:
            self.display.line(
                f"{self.stop.reason}: saved step {self.done} of {self.parts.config.train.steps}; run the same command to go on"
            )
        return Result(self.done, self.losses, self.eval_loss, self.parts.run_dir, preempted, self.state)


def placed_batches(parts: Parts, first_sample: int) -> Iterator[dict[str, Array]]:
    """Batches on the devices, from a sample on; runs on the thread that makes them ahead."""
    for rows in parts.train_data.iterate(first_sample=first_sample):
        yield parts.feed.place(rows, parts.config.num_microbatches)


def open_log(parts: Parts, start: Start, display: Display) -> MetricsLog:
    """config.yaml, hosts.json and the metrics of this attempt; rows past the start, of an attempt that was killed, are cut."""
    metrics = parts.run_dir / "metrics.jsonl"
    cut = keep_until(metrics, start.step if start.own else 0)
    if cut:
        display.line(f"{cut} rows of metrics.jsonl after step {start.step} were cut: those steps run again")
    attempt = max((row.get("attempt", 0) for row in read_records(metrics)), default=0) + 1
    replace_text(parts.run_dir / "config.yaml", to_yaml(parts.config))
    write_hosts(parts.run_dir, list(parts.mesh.devices.flat), versions())
    log = MetricsLog(parts.run_dir, attempt, parts.config.log.tensorboard, start.step)
    if log.missing:
        display.line(log.missing)
    return log


def finished_before(parts: Parts, start: Start, display: Display) -> Result:
    """A run that has all its steps: say so and change nothing."""
    steps = parts.config.train.steps
    display.line(f"already finished: step {start.step} of {steps}; for more steps set train.steps, for a new run another run.dir")
    evaluations = [row["eval_loss"] for row in read_records(parts.run_dir / "metrics.jsonl") if "eval_loss" in row]
    return Result(start.step, [], evaluations[-1] if evaluations else None, parts.run_dir, False, start.make())

"""Checks of a pipeline: what a schedule asks of microbatches, layers, chunks and remat.

What `pipeline:` says by itself must hold on any mesh. What it asks of other sections counts where mesh.pipe > 1, so that a config
made for a pipeline stays legal on one stage.
"""

import math
from collections.abc import Iterator

from jaxpar.config.axes import BATCH_AXES, MESH_KEYS
from jaxpar.config.check_moe import is_whole_blocks
from jaxpar.config.depth import layers_per_stage
from jaxpar.config.memory import head_operand_bytes, operand_bytes
from jaxpar.config.model import ModelConfig
from jaxpar.config.problem import Problem, divisors
from jaxpar.config.run import RunConfig
from jaxpar.config.stages import balanced_layers
from jaxpar.schedule.actions import Schedule, Shape
from jaxpar.schedule.errors import SHOWN, ScheduleError
from jaxpar.schedule.from_csv import read_csv
from jaxpar.schedule.library import FAMILIES, alternative, build_schedule, least_microbatches, schedule_problems
from jaxpar.schedule.measure import most_deferred

SECTION_KEYS = ("pipeline.schedule", "pipeline.chunks_per_stage")
KEYS = (*SECTION_KEYS, "num_microbatches", *MESH_KEYS)
DEPTH_KEYS = ("model.num_layers", "model.moe.every", "model.moe.leading_dense", "pipeline.layers_per_stage", *KEYS)


def pipeline_problems(config: RunConfig, pipe: int) -> Iterator[Problem]:
    """What does not fit on `pipe` stages."""
    named = list(_section_problems(config))
    yield from named
    if pipe == 1:
        yield from _layer_list_problems(config, None)
        return
    schedule = None
    if not named:
        yield from _size_problems(config, pipe)
        schedule = _schedule_once_mended(config, pipe)
    if not is_whole_blocks(config.model):  # reported with the experts; how many blocks there are to divide is not known
        return
    shape = schedule and schedule.shape
    too_few = list(_depth_problems(config, pipe))
    misfit = [] if too_few else list(_layer_list_problems(config, shape))
    yield from too_few + misfit
    if schedule is not None and not too_few and schedule.splits_backward and config.remat.policy == "full":
        layers = balanced_layers(config.model.num_blocks, schedule.shape.num_virtual, 0.0)
        yield _remat_problem(config, schedule, max(layers if misfit else layers_per_stage(config, schedule.shape)))


def _section_problems(config: RunConfig) -> Iterator[Problem]:
    """Names that are none, and chunks that a schedule cannot have."""
    name, chunks = config.pipeline.schedule, config.pipeline.chunks_per_stage
    if name.endswith(".csv"):
        return
    fixed = FAMILIES[name].num_chunks if name in FAMILIES else None
    if fixed is not None and chunks not in (None, fixed):
        text = f"pipeline.chunks_per_stage: {chunks}, but pipeline.schedule={name} always has {fixed}"
        yield Problem(SECTION_KEYS, f"{text}; pipeline.chunks_per_stage=null would work, or pipeline.schedule=interleaved")
        return
    # On one stage, with microbatches enough, every schedule can run: what is left lies in the section.
    for problem in schedule_problems(name, 1, least_microbatches(name, 1), chunks):
        yield Problem(SECTION_KEYS, f"pipeline.schedule: {problem}")


def _size_problems(config: RunConfig, pipe: int) -> Iterator[Problem]:
    """Stages and microbatches that a schedule cannot have."""
    name = config.pipeline.schedule
    if name.endswith(".csv"):
        yield from _csv_problems(config, pipe)
    elif config.num_microbatches < (need := least_microbatches(name, pipe)):
        text = f"num_microbatches: {config.num_microbatches}, but pipeline.schedule={name} needs {need} or more with mesh.pipe={pipe}"
        yield Problem(KEYS, f"{text}; {_more_microbatches(config, need)} would work, or pipeline.schedule={alternative(name)}")


def _more_microbatches(config: RunConfig, need: int) -> str:
    """The next number that divides the batch; a larger batch where there is none."""
    shards = math.prod(max(config.mesh.sizes[axis], 1) for axis in BATCH_AXES)
    fitting = [n for n in divisors(config.data.global_batch_size // shards) if n >= need]
    return f"num_microbatches={fitting[0]}" if fitting else f"num_microbatches={need} data.global_batch_size={need * shards}"


def _csv_problems(config: RunConfig, pipe: int) -> Iterator[Problem]:
    """A file that is no schedule, or one of other sizes."""
    path = config.pipeline.schedule
    try:
        shape = read_csv(path).shape
    except ScheduleError as error:
        for problem in error.problems[:SHOWN]:
            yield Problem(("pipeline.schedule",), f"pipeline.schedule: {path}: {problem}{_way_out(config, pipe, problem)}")
        if (more := len(error.problems) - SHOWN) > 0:
            yield Problem(("pipeline.schedule",), f"pipeline.schedule: {path}: and {more} more")
        return
    sizes = {
        "mesh.pipe": (pipe, shape.num_stages, "stages"),
        "num_microbatches": (config.num_microbatches, shape.num_microbatches, "microbatches"),
        "pipeline.chunks_per_stage": (config.pipeline.chunks_per_stage, shape.num_chunks, "chunks a stage"),
    }
    for key, (value, holds, what) in sizes.items():
        if value not in (None, holds):
            yield Problem(KEYS, f"{key}: {value}, but {path} is a schedule of {holds} {what}; {key}={holds} would work")


def _way_out(config: RunConfig, pipe: int, problem: str) -> str:
    """How to make a file that cannot be found."""
    if not problem.startswith("cannot be read: No such file"):
        return ""
    sizes = f"--stages {pipe} --microbatches {config.num_microbatches}"
    return f"; `jaxpar schedule 1f1b {sizes} --csv {config.pipeline.schedule}` writes one to start from"


def _schedule_once_mended(config: RunConfig, pipe: int) -> Schedule | None:
    """The schedule that there will be when its sizes are right; None where that cannot be told."""
    name, chunks = config.pipeline.schedule, config.pipeline.chunks_per_stage
    enough = max(config.num_microbatches, least_microbatches(name, pipe))
    try:
        return build_schedule(name, pipe, enough, chunks)
    except ScheduleError:
        return None


def _depth_problems(config: RunConfig, pipe: int) -> Iterator[Problem]:
    """Fewer layers than devices of a pipeline. Chunks may be without a layer: those of a V are given, and a device has others."""
    model, num_blocks = config.model, config.model.num_blocks
    if pipe > num_blocks:
        unset = " pipeline.layers_per_stage=null" if isinstance(config.pipeline.layers_per_stage, tuple) else ""
        own = config.pipeline.schedule.endswith(".csv")  # of one size only
        fewer = " ".join([f"mesh.pipe={num_blocks}", *(_with_1f1b(config) if own else [])])
        enough = model.num_layers + (pipe - num_blocks) * (model.moe.every if model.moe else 1)
        text = f"model.num_layers: {model.num_layers}{_in_blocks(model)}, fewer than the {pipe} stages of mesh.pipe={pipe}"
        yield Problem(DEPTH_KEYS, f"{text}; model.num_layers={enough}{unset} would work, or {fewer}{unset}")


def _in_blocks(model: ModelConfig) -> str:
    """What a pipeline divides, where that is not just the layers."""
    if model.num_blocks == model.num_layers:
        return ""
    keys = {"model.moe.every": model.moe.every if model.moe else 1, "model.moe.leading_dense": model.leading_dense}
    why = ", ".join(f"{key}={value}" for key, value in keys.items())
    return f" makes {model.num_blocks} {_unit(model)}s to divide ({why})"


def _unit(model: ModelConfig) -> str:
    return "block" if model.moe and model.moe.every > 1 else "layer"


def _with_1f1b(config: RunConfig) -> list[str]:
    """Overrides from another schedule to 1F1B, which fits any number of stages and microbatches."""
    chunked = config.pipeline.chunks_per_stage not in (None, 1)
    return ["pipeline.schedule=1f1b", *(["pipeline.chunks_per_stage=null"] if chunked else [])]


def _layer_list_problems(config: RunConfig, shape: Shape | None) -> Iterator[Problem]:
    """`pipeline.layers_per_stage` as a list. shape None: not known, or no pipeline, where nothing holds the layers to the list."""
    asked, model, num_blocks = config.pipeline.layers_per_stage, config.model, config.model.num_blocks
    if not isinstance(asked, tuple):
        return
    text, works = f"pipeline.layers_per_stage: {list(asked)}", "pipeline.layers_per_stage=null"
    if shape is not None:
        works = str(list(balanced_layers(num_blocks, shape.num_virtual, 0.0)))
    if negative := [count for count in asked if count < 0]:
        yield Problem(DEPTH_KEYS, f"{text} gives a stage {negative[0]} {_unit(model)}s, fewer than 0; {works} would work")
    elif shape is not None and len(asked) != shape.num_virtual:
        stages = _stages_in_words(shape.num_stages, shape.num_chunks)
        yield Problem(DEPTH_KEYS, f"{text} has {len(asked)} numbers, but {stages} makes {shape.num_virtual} stages; {works} would work")
    elif shape is not None and sum(asked) != num_blocks:
        held = f"model.num_layers={model.num_layers}{_in_blocks(model)}"
        yield Problem(DEPTH_KEYS, f"{text} is {sum(asked)} {_unit(model)}s, but {held}; {works} would work")
    elif shape is not None and (empty := sorted(set(range(shape.num_stages)) - {shape.stage(v) for v, n in enumerate(asked) if n})):
        rule = f"gives no {_unit(model)} to stage {', '.join(map(str, empty))} of mesh.pipe={shape.num_stages}, and each needs 1 or more"
        yield Problem(DEPTH_KEYS, f"{text} {rule}; {works} would work")


def _stages_in_words(pipe: int, chunks: int) -> str:
    return f"mesh.pipe={pipe}" + (f" x {chunks} chunks a stage" if chunks > 1 else "")


def _remat_problem(config: RunConfig, schedule: Schedule, layers: int) -> Problem:
    """A backward pass in two parts keeps what full remat would free. layers: of the largest chunk, or blocks."""
    one, head = operand_bytes(config), head_operand_bytes(config)
    text = f"remat.policy: full, but pipeline.schedule={config.pipeline.schedule} keeps the operands of every weight gradient from I to W"
    last = schedule.shape.num_virtual - 1
    peak = most_deferred(schedule) * layers * one + most_deferred(schedule, last) * head  # buffers of all devices are alike
    each = f"{_mib(one)} a {_unit(config.model)} and microbatch, {_mib(head)} of the head"
    cost = f"{each}, {_mib(peak)} at the peak on a device, whatever remat frees"
    changes = _with_1f1b(config)
    if schedule.shape.num_chunks > 1 and isinstance(config.pipeline.layers_per_stage, tuple):
        changes.append("pipeline.layers_per_stage=null")
    works = f"remat.policy=none or selective would work, or {' '.join(changes)}"
    return Problem(("remat.policy", *DEPTH_KEYS), f"{text}: {cost}; {works}")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"

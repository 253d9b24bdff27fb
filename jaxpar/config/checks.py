"""Cross-checks between sections, and the layout that a checked config means.

Each violation is one line: key, value, the rule, a value that would work. All are found in one pass.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from jaxpar.config.axes import MESH_KEYS
from jaxpar.config.check_mla import mla_problems
from jaxpar.config.check_moe import is_whole_blocks, moe_layout_problems, moe_problems
from jaxpar.config.check_pipeline import pipeline_problems
from jaxpar.config.check_sections import section_problems
from jaxpar.config.check_splits import rule_problems, split_problems
from jaxpar.config.depth import stages_of
from jaxpar.config.errors import ConfigError
from jaxpar.config.layout import DEFAULT_RULES, Layout
from jaxpar.config.mesh import MeshConfig
from jaxpar.config.model import ModelConfig
from jaxpar.config.problem import Problem, divisors
from jaxpar.config.run import RunConfig


def check(config: RunConfig, num_devices: int | None) -> list[str]:
    """Every violation; num_devices None: what can be told without knowing the devices."""
    return [problem.text for problem in find_problems(config, num_devices)]


def find_problems(config: RunConfig, num_devices: int | None) -> Iterator[Problem]:
    """`check` with the keys that each violation involves."""
    yield from mesh_problems(config.mesh, num_devices)
    wrong_rules = list(rule_problems(config.rules))
    yield from wrong_rules
    yield from section_problems(config)
    yield from mla_problems(config)
    yield from moe_problems(config)
    with_rules = config.model_copy(update={"rules": {}}) if wrong_rules else config
    sizes = _known_sizes(config.mesh, num_devices)
    wrong_stages = list(pipeline_problems(config, sizes["pipe"]))
    yield from wrong_stages
    stages = None if wrong_stages or not is_whole_blocks(config.model) else stages_of(config, sizes["pipe"])
    layout = replace(_layout(with_rules, sizes), stages=stages)
    yield from split_problems(config, layout)
    yield from moe_layout_problems(config, layout)


def resolve_sizes(mesh: MeshConfig, num_devices: int | None) -> dict[str, int]:
    """Every axis -> its size, -1 replaced by the devices that are left; raises ConfigError if they do not fit."""
    problems = [problem.text for problem in mesh_problems(mesh, num_devices)]
    if not problems and num_devices is None and -1 in mesh.sizes.values():
        (axis,) = [axis for axis, size in mesh.sizes.items() if size == -1]
        problems = [f"mesh.{axis}: -1 needs the number of devices, which is not known here; give its size"]
    if problems:
        raise ConfigError(problems, "mesh")
    return _known_sizes(mesh, num_devices)


def layout_of(config: RunConfig, num_devices: int | None) -> Layout:
    """How the run is spread over `num_devices` devices (None: as many as the mesh says)."""
    if problems := [problem.text for problem in rule_problems(config.rules)]:
        raise ConfigError(problems, "rules")
    sizes = resolve_sizes(config.mesh, num_devices)
    if problems := [problem.text for problem in pipeline_problems(config, sizes["pipe"])]:
        raise ConfigError(problems, "pipeline")
    return replace(_layout(config, sizes), stages=stages_of(config, sizes["pipe"]))


def mesh_problems(mesh: MeshConfig, num_devices: int | None) -> Iterator[Problem]:
    """Axis sizes: one -1 at most, the others at least 1, the product equal to the devices."""
    sizes = mesh.sizes
    bad = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    for axis in bad:
        yield Problem((f"mesh.{axis}",), f"mesh.{axis}: {sizes[axis]} is not a size; 1 or more, or -1 for the devices that are left; try 1")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        names = " and ".join(f"mesh.{axis}" for axis in open_axes)
        yield Problem(MESH_KEYS, f"{names} are -1; only one axis can take the devices that are left; set the others to 1")
    elif num_devices is not None and not bad:
        yield from _product_problem(sizes, open_axes, num_devices)


def _product_problem(sizes: dict[str, int], open_axes: list[str], num_devices: int) -> Iterator[Problem]:
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "all axes 1"
    if open_axes and num_devices % fixed:
        works = [str(n) for n in divisors(num_devices)]
        text = f"mesh.{open_axes[0]}: -1, but {num_devices} devices do not divide by the other axes: {shown} = {fixed}"
        yield Problem(MESH_KEYS, f"{text}; their product may be {', '.join(works)}")
    elif not open_axes and fixed != num_devices:
        less = "; a mesh smaller than the devices would leave some idle" if fixed < num_devices else ""
        yield Problem(MESH_KEYS, f"mesh: {shown} = {fixed}, but {_devices(num_devices)}{less}; {_fitting(sizes, num_devices)}")


def _devices(count: int) -> str:
    return "there is 1 device" if count == 1 else f"there are {count} devices"


def _fitting(sizes: dict[str, int], num_devices: int) -> str:
    """One axis changed so that the product fits, `data` first; or one that fits alone and the others 1."""
    if num_devices in sizes.values():
        changed = [f"mesh.{axis}=1" for axis, size in sizes.items() if size not in (1, num_devices)]
        return f"{' '.join(changed)} would work"
    for axis in ("data", "tensor", "context", "replica"):
        others = math.prod(size for other, size in sizes.items() if other != axis)
        if num_devices % others == 0:
            return f"mesh.{axis}={num_devices // others} would work"
    return f"mesh.data={num_devices} with all others 1 would work"


def _known_sizes(mesh: MeshConfig, num_devices: int | None) -> dict[str, int]:
    """Sizes with -1 resolved; what cannot be known or makes no sense counts as 1, which divides everything."""
    sizes = {axis: max(size, 1) if size != -1 else -1 for axis, size in mesh.sizes.items()}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    left = num_devices // fixed if num_devices is not None and num_devices % fixed == 0 else 1
    one_open = list(sizes.values()).count(-1) == 1
    return {axis: (left if one_open else 1) if size == -1 else size for axis, size in sizes.items()}


def _layout(config: RunConfig, sizes: dict[str, int]) -> Layout:
    rules = dict(DEFAULT_RULES)
    for dim, axes in config.rules.items():
        rules[dim] = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    if replicates_kv_heads(config.model, math.prod(sizes[axis] for axis in rules["kv_heads"])):
        rules["kv_heads"] = ()
    return Layout(sizes, rules, config.zero_stage, config.sequence_parallel)


def replicates_kv_heads(model: ModelConfig, ways: int) -> bool:
    """More parts than key-value heads: each device keeps all of them and picks those of its query heads."""
    return ways > model.kv_heads and ways % model.kv_heads == 0

"""Dimension names -> mesh axes: the one rules table, and what follows from it for every parameter.

Pure Python: the run (through `mesh.specs`) and the planner read the same answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxpar.config.axes import BATCH_AXES, ZERO_AXES
from jaxpar.config.dims import is_vector
from jaxpar.config.stages import Stages

DEFAULT_RULES: Mapping[str, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("tensor",),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "latent": (),  # what heads are made from: whole on every device
    "mlp": ("tensor",),
    "experts": ("expert",),  # of a layer: each device holds whole experts
    "router": (),  # outputs of a router, one an expert: every device scores all experts
    "positions": (),
    "batch": BATCH_AXES,
    "seq": ("context",),
}


class LayoutError(ValueError):
    """A dim name, a size or a rule that the user can mend."""


@dataclass(frozen=True)
class Layout:
    """How one run is spread over devices.

    sizes: every mesh axis -> its size, resolved (no -1). rules: dim -> axes, resolved over the defaults. stages: which layers each
    pipeline stage holds; None without a pipeline.
    """

    sizes: Mapping[str, int]
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(DEFAULT_RULES))
    zero_stage: int = 0
    sequence_parallel: bool = True
    stages: Stages | None = None

    def live(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of size > 1: an axis of one device needs no collective and appears in no spec."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def split(self, dim: str) -> tuple[str, ...]:
        """Live mesh axes that split `dim`, outer to inner."""
        if dim not in self.rules:
            raise LayoutError(f"unknown dim {dim!r}: known dims are {', '.join(sorted(self.rules))}; name a new one under rules:")
        return self.live(self.rules[dim])

    def ways(self, dim: str) -> int:
        """Into how many parts `dim` is cut."""
        return self.size(self.split(dim))

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return self.split("batch")

    @property
    def context_axes(self) -> tuple[str, ...]:
        return self.split("seq")

    @property
    def block_seq_axes(self) -> tuple[str, ...]:
        """Axes that split the sequence at block boundaries: `context`, and `tensor` under sequence parallelism."""
        return self.context_axes + (self.live(("tensor",)) if self.sequence_parallel else ())

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes over which tokens differ at block boundaries: there, every parameter's gradient is a partial sum."""
        return self.batch_axes + self.block_seq_axes

    @property
    def zero_axes(self) -> tuple[str, ...]:
        return self.live(ZERO_AXES)

    @property
    def pipe_axes(self) -> tuple[str, ...]:
        return self.live(("pipe",))

    def free_zero_axes(self, axes: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """ZeRO axes that `axes`, those of a parameter's dims, leave over. Experts are split over `expert` already."""
        return tuple(axis for axis in self.zero_axes if not any(axis in dim_axes for dim_axes in axes))

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    def stored_shape(self, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in which a parameter is stored: a pipeline keeps room for as many layers in every chunk as the largest has."""
        return (self.stages.num_rows, *shape[1:]) if self.stages is not None and names[0] == "layers" else shape


@dataclass(frozen=True)
class LeafPlan:
    """Where one parameter lives.

    axes: for each dim, the axes that split it by the rules. zero_dim: the dim that ZeRO shards further, if any, over zero_axes.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    zero_dim: int | None
    zero_axes: tuple[str, ...] = ()

    def spec(self, *, sharded: bool) -> tuple[tuple[str, ...], ...]:
        """Axes of each dim; sharded: by ZeRO as well."""
        if self.zero_dim is None or not sharded:
            return self.axes
        return tuple(axes + self.zero_axes if i == self.zero_dim else axes for i, axes in enumerate(self.axes))


def plan_leaf(layout: Layout, path: str, names: tuple[str, ...], shape: tuple[int, ...]) -> LeafPlan:
    """Plan for one parameter whose dims are `names`; raises LayoutError with sizes that would work."""
    if len(names) != len(shape):
        raise LayoutError(f"{path}: {len(names)} dim names {names} for shape {shape}")
    axes = tuple(layout.split(name) for name in names)
    spent: dict[str, str] = {}
    for name, dim_axes in zip(names, axes, strict=True):
        for axis in dim_axes:
            if axis in spent:
                raise LayoutError(f"{path}: dims {spent[axis]!r} and {name!r} are both split over mesh axis {axis!r}; change rules:")
            spent[axis] = name
    for name, size, dim_axes in zip(names, shape, axes, strict=True):
        ways = layout.size(dim_axes)
        if size % ways:
            legal = [n for n in range(1, ways + 1) if size % n == 0]
            raise LayoutError(f"{path}: dim {name!r} of size {size} does not divide over {' x '.join(dim_axes)} = {ways}; legal: {legal}")
    return LeafPlan(path, names, shape, axes, *_zero_split(layout, names, shape, axes))


def _zero_split(
    layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...]
) -> tuple[int | None, tuple[str, ...]]:
    """The outermost dim of a matrix or table that is free and divides over the ZeRO axes, and those axes.

    Outermost, because shards along it are contiguous: gathering and scattering need no transposition (3 to 5 % of a
    ZeRO-3 step on CPU, against the largest dim). `layers` is scanned, so never. A vector (norm scale, bias) stays whole: a
    collective for it costs more than its bytes. What is not stacked over layers (embedding, head) would be the same on every
    stage of a pipeline, so `pipe` shards it too where the dim divides.
    """
    if is_vector(names):
        return None, ()
    pipe = () if "layers" in names else layout.pipe_axes
    zero = layout.free_zero_axes(axes)
    for over in dict.fromkeys((pipe + zero, zero)):
        free = (i for i, name in enumerate(names) if name != "layers" and not axes[i] and shape[i] % layout.size(over) == 0)
        if over and (dim := next(free, None)) is not None:
            return dim, over
    return None, ()

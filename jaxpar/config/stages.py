"""Which layers each stage of a pipeline holds, and in which row of the stored (stacked) parameters each layer lies."""

from dataclasses import dataclass
from functools import cached_property

from jaxpar.schedule.actions import Shape

EMPTY = -1


@dataclass(frozen=True)
class Stages:
    """Layers of each virtual stage, in the order in which a microbatch passes them.

    A device holds its chunks one after the other, each with room for as many layers as the largest chunk of the model has; rows that
    are left over belong to no layer, hold zeros and are never computed with.
    """

    shape: Shape
    layers_per_stage: tuple[int, ...]  # one a virtual stage

    @property
    def rows_per_chunk(self) -> int:
        return max(self.layers_per_stage)

    @property
    def num_rows(self) -> int:
        return self.shape.num_virtual * self.rows_per_chunk

    @property
    def even(self) -> bool:
        """True where every chunk is full."""
        return min(self.layers_per_stage) == self.rows_per_chunk

    @property
    def empty(self) -> int:
        """Virtual stages without a layer: what a microbatch passes on its way and is not changed by."""
        return self.layers_per_stage.count(0)

    def first_layer(self, virtual: int) -> int:
        return sum(self.layers_per_stage[:virtual])

    @cached_property
    def layer_of_row(self) -> tuple[int, ...]:
        """For each stored row its layer, or EMPTY."""
        rows: list[int] = []
        for stage in range(self.shape.num_stages):
            for chunk in range(self.shape.num_chunks):
                virtual = self.shape.virtual(stage, chunk)
                first, count = self.first_layer(virtual), self.layers_per_stage[virtual]
                rows += [first + i if i < count else EMPTY for i in range(self.rows_per_chunk)]
        return tuple(rows)

    @cached_property
    def row_of_layer(self) -> tuple[int, ...]:
        """For each layer its stored row."""
        rows = {layer: row for row, layer in enumerate(self.layer_of_row) if layer != EMPTY}
        return tuple(rows[layer] for layer in range(len(rows)))


def balanced_layers(num_layers: int, num_virtual: int, head_layers: float, first_layers: float = 0.0) -> tuple[int, ...]:
    """Layers of each virtual stage such that the slowest is as fast as it can be, and the others as even as they can be.

    head_layers: what the output head of the last virtual stage costs, in layers; first_layers: what the first one has before its layers.
    Every virtual stage gets one layer at least; of fewer layers than that, the first stages get one each, which gives each device as
    many as any other or one less, in a loop and in a V.
    What is balanced is F and B together. Not seen: that the head runs in B (or I) alone and not in F, that of a split backward pass
    I has more of the head than W, that remat computes layers again and never the head, and memory.
    """
    counts = [1 if i < num_layers else 0 for i in range(num_virtual)]
    extra = [0.0] * num_virtual
    extra[0] += first_layers
    extra[-1] += head_layers
    for _ in range(num_layers - num_virtual):
        # The last stage is filled last among equals: its head comes on top, and the embedding costs next to nothing.
        cost = [count + more for count, more in zip(counts, extra, strict=True)]
        counts[min(range(num_virtual), key=lambda i: cost[i])] += 1
    return tuple(counts)

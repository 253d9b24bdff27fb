"""The reference: no communication. Every device holds all experts and works on its own tokens, sorted by expert."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxpar.config.layout import Layout, LayoutError
from jaxpar.core.protocols import Experts
from jaxpar.parallel.dispatch.grouped import tiles_for
from jaxpar.parallel.dispatch.routed import Routed
from jaxpar.parallel.dispatch.sorted import through_experts


@dataclass(frozen=True)
class Local:
    """A dispatcher. native: by the kernels of `grouped_gpu`."""

    native: bool

    def __call__(self, layout: Layout, x_nD: Float[Array, "n D"], routed: Routed, experts: Experts) -> tuple[Array, None]:
        """(every token's experts' outputs, weighted and summed, a partial sum where `mlp` is split; None: no row can be cut off)."""
        if axes := layout.split("experts"):
            raise LayoutError(f"dispatch local needs all experts on every device, but they are split over {', '.join(axes)}")
        tiles = tiles_for(routed.most_choices, routed.num_experts, native=self.native)
        return through_experts(x_nD, routed, experts, tiles), None

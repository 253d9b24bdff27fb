"""The reference: no communication. Every device holds all experts and works on its own tokens, sorted by expert."""

from jaxtyping import Array, Float

from jaxpar.config.layout import Layout, LayoutError
from jaxpar.core.protocols import Experts
from jaxpar.parallel.dispatch.permute import collect, rows_of, spread
from jaxpar.parallel.dispatch.routed import Routed
from jaxpar.parallel.dispatch.sorted import by_expert, ragged_product


def local(layout: Layout, x_nD: Float[Array, "n D"], routed: Routed, experts: Experts) -> tuple[Array, None]:
    """(every token's experts' outputs, weighted and summed, a partial sum where `mlp` is split; None: no row can be cut off)."""
    if axes := layout.split("experts"):
        raise LayoutError(f"dispatch local needs all experts on every device, but they are split over {', '.join(axes)}")
    row_nk, sizes_E = by_expert(routed)
    rows = rows_of(row_nk, row_nk.size)
    y_ND = experts(spread(x_nD, rows), ragged_product(sizes_E))
    return collect(y_ND, routed.gate_nk, rows), None

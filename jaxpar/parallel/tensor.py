"""Entering and leaving a region whose dim is split: the tensor-parallel pair of collectives, from the dim's name.

Without sequence parallelism: identity forward and all-reduce backward on entry, the reverse on exit (Megatron-LM,
arXiv 1909.08053, section 3). With it: all-gather and reduce-scatter of the sequence (arXiv 2205.05198, section 4.2.2).
Backward rules are JAX's own transposes.
"""

from jax import lax
from jaxtyping import Array, Float

from jaxpar.config.layout import Layout, LayoutError
from jaxpar.core.vma import vary

SEQ_DIM = 1  # activations are [b, S, D]


def enter(layout: Layout, x_bSD: Float[Array, "b S D"], dim: str) -> Float[Array, "b T D"]:
    """This device's tokens -> all tokens that its part of `dim` works on."""
    axes = split_for_sequence(layout, dim)
    seq_axes = layout.live(("tensor",)) if layout.sequence_parallel else ()
    if seq_axes:
        return lax.all_gather(x_bSD, seq_axes, axis=SEQ_DIM, tiled=True)
    return vary(x_bSD, axes)


def split_for_sequence(layout: Layout, dim: str) -> tuple[str, ...]:
    """Axes that split `dim`; LayoutError where it is whole while `tensor` splits the sequence."""
    axes = layout.split(dim)
    if layout.sequence_parallel and layout.live(("tensor",)) and not axes:
        raise LayoutError(
            f"dim {dim!r} is not split, but sequence_parallel splits the sequence over 'tensor': give {dim!r} that axis under "
            f"rules:, or set sequence_parallel: false"
        )
    return axes


def leave(layout: Layout, y_bTD: Float[Array, "b T D"], dim: str) -> Float[Array, "b S D"]:
    """Partial sums over this device's part of `dim` -> this device's tokens, summed."""
    axes = layout.split(dim)
    if not axes:
        return y_bTD
    if layout.sequence_parallel:
        return lax.psum_scatter(y_bTD, axes, scatter_dimension=SEQ_DIM, tiled=True)
    return lax.psum(y_bTD, axes)


def index(axes: tuple[str, ...]) -> Array | int:
    """Which part of something split over `axes` this device holds; 0 when nothing is split."""
    return lax.axis_index(axes) if axes else 0


def select(layout: Layout, w: Array, array_dim: int, dim: str, of: str) -> Array:
    """The part of an unsplit `dim` that serves this device's share of dim `of`; all of it when both are split alike.

    Key-value heads when `tensor` is a multiple of them: device r of n serves head floor(r * heads / n).
    """
    axes = layout.split(of)
    if layout.split(dim) == axes:
        return w
    ways, size = layout.size(axes), w.shape[array_dim]
    if ways % size:
        raise LayoutError(f"{dim} of size {size} cannot serve {ways} parts of {of}: {ways} must be a multiple of it")
    start = lax.axis_index(axes) * size // ways
    return lax.dynamic_slice_in_dim(w, start, 1, array_dim)

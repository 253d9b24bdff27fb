"""A sequence that is not split: no collective."""

from jaxtyping import Array, Float, Int

from jaxpar.ops.attention import AttentionSpec, DropoutWords, Kernel


def attend(
    q_bSHK: Float[Array, "b S H K"],
    k_bSGK: Float[Array, "b S G K"],
    v_bSGK: Float[Array, "b S G K"],
    *,
    kernel: Kernel,
    spec: AttentionSpec,
    axis: str = "context",
    ways: int = 1,
    index_S: Int[Array, " S"],
    segments_bS: Int[Array, "b S"] | None = None,
    dropout_words: DropoutWords | None = None,
) -> Float[Array, "b S H K"]:
    """Attention over rows that the device holds whole, in natural order."""
    assert ways == 1, f"rows are split over {axis}"
    return kernel(
        q_bSHK,
        k_bSGK,
        v_bSGK,
        spec=spec,
        q_index_S=index_S,
        k_index_T=index_S,
        q_segments_bS=segments_bS,
        k_segments_bT=segments_bS,
        aligned=True,
        dropout_words=dropout_words,
    )

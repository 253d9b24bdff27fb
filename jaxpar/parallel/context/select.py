"""The ways to split attention over `context`, by the name that `context.method` uses."""

from functools import partial
from typing import Protocol

from jaxtyping import Array, Float, Int

from jaxpar.ops.attention import AttentionSpec, DropoutWords, Kernel
from jaxpar.parallel.context import all_gather, local, ring, ulysses


class Attend(Protocol):
    """One signature for all: local queries, keys and values of `axis`'s rank -> local outputs."""

    def __call__(
        self,
        q_bSHK: Float[Array, "b S H K"],
        k_bSGK: Float[Array, "b S G K"],
        v_bSGK: Float[Array, "b S G K"],
        *,
        kernel: Kernel,
        spec: AttentionSpec,
        axis: str,
        ways: int,
        index_S: Int[Array, " S"],
        segments_bS: Int[Array, "b S"] | None = None,
        dropout_words: DropoutWords | None = None,
    ) -> Float[Array, "b S H K"]: ...


METHODS: dict[str, Attend] = {"ring": ring.attend, "all_gather": all_gather.attend, "ulysses": ulysses.attend}


def select(method: str, ways: int, *, staged: bool = False) -> Attend:
    """The method by name; with `context` of one device, attention of whole rows. staged: on the stages of a pipeline."""
    if method not in METHODS:
        raise ValueError(f"context.method: unknown {method!r}: one of {', '.join(METHODS)}")
    if ways == 1:
        return local.attend
    return partial(ring.attend, staged=True) if method == "ring" and staged else METHODS[method]

"""Source `synthetic`: tokens computed from the seed and their position; nothing is stored."""

import numpy as np
from jaxtyping import Int

from jaxpar.data.corpus import Corpus
from jaxpar.data.hashing import mix

DOCUMENT_TOKENS = 512


class SyntheticStore:
    """Token i is floor(vocab * u^2) with u uniform: independent, low ids more frequent.

    The best loss is the entropy, about ln(vocab) - 0.307 (the density 1 / (2 sqrt x) has differential entropy ln 2 - 1).
    """

    def __init__(self, seed: int, num_ids: int):
        self._seed, self._num_ids = seed, num_ids

    def gather(self, index_N: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        uniform = mix(self._seed, index_N) >> np.uint64(32)
        square = (uniform * uniform) >> np.uint64(32)
        return ((square * np.uint64(self._num_ids)) >> np.uint64(32)).astype(np.int64)


def synthetic_corpus(seed: int, num_tokens: int, num_ids: int) -> Corpus:
    """`num_tokens` tokens below `num_ids` in documents of DOCUMENT_TOKENS."""
    starts_N = np.arange(0, num_tokens, DOCUMENT_TOKENS)
    return Corpus(
        name=f"synthetic (seed {seed}, ids below {num_ids})",
        store=SyntheticStore(seed, num_ids),
        starts_N=starts_N,
        lengths_N=np.minimum(DOCUMENT_TOKENS, num_tokens - starts_N),
        keys_N=mix(seed, 1, np.arange(len(starts_N))),
        num_empty=0,
        fingerprint=f"synthetic-{seed}-{num_tokens}-{num_ids}",
    )

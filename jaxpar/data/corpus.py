"""A corpus: documents with known lengths over a store; its parts for training and evaluation."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int, UInt64

from jaxpar.data.errors import DataError
from jaxpar.data.hashing import mix
from jaxpar.data.store import Store


@dataclass(frozen=True)
class Corpus:
    """Documents of one source.

    starts_N, lengths_N: where each lies in the store, in tokens. keys_N: what decides whether it is held out.
    num_empty: documents without a token, left out. fingerprint: changes when the tokens do, not when files move.
    """

    name: str
    store: Store
    starts_N: Int[np.ndarray, " N"]
    lengths_N: Int[np.ndarray, " N"]
    keys_N: UInt64[np.ndarray, " N"]
    num_empty: int
    fingerprint: str

    @property
    def num_documents(self) -> int:
        return len(self.lengths_N)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_N.sum())

    def nonempty(self) -> "Corpus":
        """Without the documents that hold no token. DataError when nothing is left."""
        keep = self.lengths_N > 0
        if not keep.any():
            raise DataError(
                f"{self.name}: no tokens: {len(keep)} documents found, all of them empty; give data.path a file with text in it"
            )
        return replace(self._only(keep), num_empty=self.num_empty + int((~keep).sum()))

    def cut(self, piece_tokens: int) -> "Corpus":
        """Documents longer than `piece_tokens` become several; no token is lost."""
        counts_N = -(-self.lengths_N // piece_tokens)
        document = np.repeat(np.arange(self.num_documents), counts_N)
        piece = within(counts_N)
        lengths = np.minimum(self.lengths_N[document] - piece * piece_tokens, piece_tokens)
        keys = np.where(piece == 0, self.keys_N[document], mix(self.keys_N[document], piece))
        return replace(self, starts_N=self.starts_N[document] + piece * piece_tokens, lengths_N=lengths, keys_N=keys)

    def held_out(self, fraction: float) -> "Corpus":
        """The documents for evaluation. DataError, with a fraction that would do, when there is none."""
        held_N = self._is_held(fraction)
        if not held_N.any():
            nearest = (float(self.keys_N.min()) / 2.0**64) * 1.01 + 1e-9
            fix = "hold out other files with data.eval_path, cut long documents with data.piece_tokens, or set data.eval_fraction=0"
            more = f"data.eval_fraction={nearest:.3g} would hold out one; or " if self.num_documents > 1 and nearest < 0.5 else ""
            raise DataError(f"{self.name}: nothing is held out for evaluation: {self._split_facts(fraction)}; {more}{fix}")
        return self._only(held_N)

    def kept(self, fraction: float) -> "Corpus":
        """The documents for training. DataError when there is none."""
        held_N = self._is_held(fraction)
        if held_N.all():
            fix = "lower data.eval_fraction, set data.eval_path, or cut long documents with data.piece_tokens"
            raise DataError(f"{self.name}: nothing is left to train on: {self._split_facts(fraction)}, all held out; {fix}")
        return self._only(~held_N)

    def _is_held(self, fraction: float) -> np.ndarray:
        return self.keys_N < np.uint64(fraction * 2.0**64)

    def _split_facts(self, fraction: float) -> str:
        plural = "document" if self.num_documents == 1 else "documents"
        return f"{self.num_documents} {plural}, data.eval_fraction {fraction:g}, chosen by hash"

    def _only(self, keep: np.ndarray) -> "Corpus":
        return replace(self, starts_N=self.starts_N[keep], lengths_N=self.lengths_N[keep], keys_N=self.keys_N[keep])


def within(counts: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """0, 1, ..., count - 1 for each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)

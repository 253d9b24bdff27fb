"""Sample number -> window of tokens: documents concatenated in a new order each epoch, cut into windows, windows shuffled.

The stream is endless: epoch after epoch, every document followed by the end-of-document id. Window w covers seq_len + 1
tokens from w * seq_len on, so every token of the stream is an input exactly once and no tail is lost, also where an epoch ends
within a window. (Megatron-LM's sample index, computed by search in place of stored tables.)
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Int

from jaxpar.data.corpus import Corpus, within
from jaxpar.data.hashing import mix, permute


class Stream:
    """The endless stream of one corpus, a pure function of (seed, window)."""

    def __init__(self, corpus: Corpus, *, seed: int, seq_len: int, eod: int | None):
        self.corpus, self.seed, self.seq_len, self.eod = corpus, seed, seq_len, eod
        self._spans_N = corpus.lengths_N + (eod is not None)  # tokens of each document with what ends it
        self.epoch_tokens = int(self._spans_N.sum())
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    @property
    def num_windows(self) -> int:
        """Windows that hold at least one target of epoch 0; the last one may be partly beyond it."""
        return max(1, -(-(self.epoch_tokens - 1) // self.seq_len))

    def starts(self, sample_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Where in the stream each sample begins. Samples of an epoch are its windows, shuffled."""
        epoch_B = sample_B * self.seq_len // self.epoch_tokens
        window_B = sample_B.copy()
        for epoch in np.unique(epoch_B):
            first, last = (-(-int(e) * self.epoch_tokens // self.seq_len) for e in (epoch, epoch + 1))
            mine = epoch_B == epoch
            window_B[mine] = first + permute(sample_B[mine] - first, last - first, self.seed, 2, int(epoch))
        return window_B * self.seq_len

    def windows(self, start_B: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, "B W"], Int[np.ndarray, "B W"]]:
        """(tokens, segments) of W = seq_len + 1 from each place in the stream; segments number documents in a row from 1."""
        size = self.seq_len + 1
        target, length, document, offset = self._cover(start_B, size)
        row = target // size
        segment = np.arange(len(row)) - np.searchsorted(row, np.arange(len(start_B)))[row] + 1
        flat = np.arange(len(start_B) * size) + np.repeat(self.corpus.starts_N[document] + offset - target, length)
        ends = (offset + length > self.corpus.lengths_N[document]).nonzero()[0]
        end_at = target[ends] + length[ends] - 1
        flat[end_at] = self.corpus.starts_N[document[ends]]  # any place that exists: overwritten below
        tokens = self.corpus.store.gather(flat).astype(np.int32)
        if self.eod is not None:
            tokens[end_at] = self.eod
        return tokens.reshape(-1, size), np.repeat(segment, length).astype(np.int32).reshape(-1, size)

    def _cover(self, start_B: np.ndarray, size: int) -> np.ndarray:
        """Spans that make up the rows, in order: [4, n] = place in the flattened rows, length, document, offset in it."""
        first_epoch = start_B // self.epoch_tokens
        num_epochs = (start_B + size - 1) // self.epoch_tokens - first_epoch + 1
        row = np.repeat(np.arange(len(start_B)), num_epochs)
        epoch = np.repeat(first_epoch, num_epochs) + within(num_epochs)
        begin = start_B[row] - epoch * self.epoch_tokens
        low, high = np.maximum(begin, 0), np.minimum(begin + size, self.epoch_tokens)
        spans = []
        for number in np.unique(epoch):
            mine = np.flatnonzero(epoch == number)
            order_N, bounds_N = self._epoch(int(number))
            first = np.searchsorted(bounds_N, low[mine], "right") - 1
            counts = np.searchsorted(bounds_N, high[mine], "left") - first
            part, k = np.repeat(mine, counts), np.repeat(first, counts) + within(counts)
            start, stop = np.maximum(low[part], bounds_N[k]), np.minimum(high[part], bounds_N[k + 1])
            spans.append(np.stack([row[part] * size + start - begin[part], stop - start, order_N[k], start - bounds_N[k]]))
        joined = np.concatenate(spans, axis=1)
        return joined[:, np.argsort(joined[0])]

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in the order of this epoch, and where each begins (and the last ends) in it."""
        order_N = np.argsort(mix(self.seed, 1, epoch, np.arange(self.corpus.num_documents)), kind="stable")
        return order_N, np.concatenate([[0], np.cumsum(self._spans_N[order_N])])

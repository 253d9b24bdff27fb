"""The data of a run: any row of any step on demand (law L2), in the background through Grain, and the fixed evaluation set."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxpar.config.data import DataConfig
from jaxpar.data.cache import Progress
from jaxpar.data.errors import DataError
from jaxpar.data.hashing import permute
from jaxpar.data.mixture import assign, whole_weights
from jaxpar.data.order import Stream
from jaxpar.data.pack import Batch, pack
from jaxpar.data.sources import Split, open_parts
from jaxpar.data.tokenizer import Tokenizer

_MAX_SAMPLES = 1 << 32  # sample ids are uint32: random bits take them as they are (law L3)
_EVAL_SEED = 0  # the evaluation set is the same for every seed of a run
_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Dataset:
    """Batches of one split.

    A batch is {tokens, targets: int32 [rows, S], weights: float32 [rows, S], positions, segments: int32 [rows, S],
    samples: uint32 [rows]}. The row at (step, row) is sample step * global_batch_size + row, whatever the hosts: each process
    asks for its own rows. After a change of batch size, go on by samples seen: `first_sample`.
    """

    config: DataConfig
    split: Split
    seed: int
    tokenizer: Tokenizer
    eod: int | None
    streams: Sequence[Stream]  # one per part of the mixture
    weights: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the split once through, with the ends of documents."""
        return sum(stream.epoch_tokens for stream in self.streams)

    def samples(self, sample_B: Int[np.ndarray, " B"]) -> Batch:
        """The rows of these global sample numbers."""
        if len(sample_B) and int(sample_B.max()) >= _MAX_SAMPLES:
            raise DataError(f"sample {int(sample_B.max())} is beyond 2^32 rows of data.seq_len {self.config.seq_len}; use longer rows")
        source_B, number_B = assign(sample_B, self.weights)
        starts_B = np.zeros(len(sample_B), np.int64)
        for i in np.unique(source_B):
            starts_B[source_B == i] = self.streams[i].starts(number_B[source_B == i])
        window_BW, segments_BW = self._windows(source_B, starts_B)
        return self._pack(window_BW, segments_BW, sample_B)

    def batch(self, step: int, start: int = 0, stop: int | None = None, *, first_sample: int | None = None) -> Batch:
        """Rows [start, stop) of the global batch of a step. first_sample: the sample of row 0, where it is not step * batch size."""
        size = self.config.global_batch_size
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise DataError(f"rows {start} to {stop} are not within the batch: data.global_batch_size is {size}")
        first = step * size if first_sample is None else first_sample
        return self.samples(np.arange(first + start, first + stop))

    def iterate(self, first_step: int = 0, start: int = 0, stop: int | None = None, *, first_sample: int | None = None) -> Iterator[Batch]:
        """Batches of first_step, first_step + 1, ... for rows [start, stop), prepared ahead on a thread; close() ends it."""
        import grain

        size = self.config.global_batch_size
        first = first_step * size if first_sample is None else first_sample
        source = _Steps(self, first, start, size if stop is None else stop)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self.config.prefetch)
        iterator = iter(grain.MapDataset.source(source).to_iter_dataset(options))
        try:
            yield from iterator
        finally:
            iterator.close()

    def num_eval_batches(self, limit: int | None = None) -> int:
        """Batches that `eval_batches` gives."""
        whole = -(-self._num_examples // self.config.global_batch_size)
        return whole if limit is None else min(limit, whole)

    def eval_batches(self, start: int = 0, stop: int | None = None, *, limit: int | None = None) -> Iterator[Batch]:
        """Rows [start, stop) of each batch of the evaluation set: the same every time, every example once, whatever was trained.

        Examples come in a fixed shuffled order, so that the first `limit` batches stand for all; the last batch is filled up
        with rows of weight 0. Without a limit every token of the split but the first of each source is a target (isolated
        documents: but the first of each document in each row).
        """
        size = self.config.global_batch_size
        stop = size if stop is None else stop
        bounds = np.cumsum([0, *(stream.num_windows for stream in self.streams)])
        for number in range(self.num_eval_batches(limit)):
            example_B = np.arange(number * size + start, number * size + stop)
            exists_B = example_B < self._num_examples
            chosen_B = np.where(exists_B, example_B, 0)
            chosen_B = permute(chosen_B, self._num_examples, _EVAL_SEED)
            source_B = np.searchsorted(bounds, chosen_B, "right") - 1
            starts_B = (chosen_B - bounds[source_B]) * self.config.seq_len
            window_BW, segments_BW = self._windows(source_B, starts_B)
            ends_B = np.where(exists_B, np.array([stream.epoch_tokens for stream in self.streams])[source_B], 0)
            beyond_BW = starts_B[:, None] + np.arange(window_BW.shape[1]) >= ends_B[:, None]
            yield self._pack(window_BW, np.where(beyond_BW, 0, segments_BW), example_B)

    def fingerprint(self) -> str:
        """What fixes every row of every step but the batch size: kept in checkpoints, compared on resume."""
        parts = [(stream.corpus.fingerprint, stream.seed) for stream in self.streams]
        facts = (1, self.split, self.seed, self.eod, self.tokenizer.fingerprint(), self.config.seq_len, self.config.eval_fraction)
        cut = [(part.piece_tokens, bool(part.eval_path)) for part in self.config.parts]
        return hashlib.blake2b(repr((facts, parts, cut, list(self.weights))).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """A line a source, for people."""
        total = sum(self.weights)
        lines = []
        for stream, weight in zip(self.streams, self.weights, strict=True):
            corpus = stream.corpus
            share = f", {100 * weight / total:.4g} % of the samples" if len(self.streams) > 1 else ""
            empty = f", {corpus.num_empty:,} empty ones skipped" if corpus.num_empty else ""
            rows = f"{stream.epoch_tokens:,} tokens (none dropped, {stream.num_windows:,} rows of {self.config.seq_len})"
            lines.append(f"{self.split}: {corpus.name}: {corpus.num_documents:,} documents{empty}, {rows}{share}")
        eod = "no end-of-document token" if self.eod is None else f"end of document {self.eod}"
        return "\n".join([*lines, f"tokenizer {self.tokenizer.name} (vocabulary {self.tokenizer.vocab_size:,}, {eod})"])

    @property
    def _num_examples(self) -> int:
        return sum(stream.num_windows for stream in self.streams)

    def _windows(self, source_B: np.ndarray, starts_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(self.streams) == 1:
            return self.streams[0].windows(starts_B)
        window_BW = np.zeros((len(starts_B), self.config.seq_len + 1), np.int32)
        segments_BW = np.zeros_like(window_BW)
        for i in np.unique(source_B):
            mine = source_B == i
            window_BW[mine], segments_BW[mine] = self.streams[i].windows(starts_B[mine])
        return window_BW, segments_BW

    def _pack(self, window_BW: np.ndarray, segments_BW: np.ndarray, sample_B: np.ndarray) -> Batch:
        packed = pack(window_BW, segments_BW, isolate_documents=self.config.isolate_documents)
        return {**packed, "samples": sample_B.astype(np.uint32)}


@dataclass(frozen=True)
class _Steps:
    """Random access over steps, as Grain reads it."""

    dataset: Dataset
    first_sample: int
    start: int
    stop: int

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        first = self.first_sample + int(index) * self.dataset.config.global_batch_size
        return self.dataset.batch(0, self.start, self.stop, first_sample=first)


def open_dataset(
    config: DataConfig,
    *,
    seed: int,
    vocab_size: int,
    split: Split = "train",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Open all sources of a split; text is tokenised on first use and kept in `cache_dir` (None: in a temporary file).

    vocab_size: the model's; ids at or above it are an error. DataError for what is wrong in files or settings.
    """
    if split == "eval" and not config.has_eval:
        raise DataError("no evaluation set: data.eval_fraction is 0 and no eval_path is set; set one of them, or do not evaluate")
    tokenizer, eod, corpora = open_parts(config, seed=seed, vocab_size=vocab_size, split=split, cache_dir=cache_dir, progress=progress)
    kept = [(corpus, part) for corpus, part in zip(corpora, config.parts, strict=True) if corpus is not None]
    stream_seed = seed if split == "train" else _EVAL_SEED
    streams = [Stream(corpus, seed=(stream_seed << 16) + i, seq_len=config.seq_len, eod=eod) for i, (corpus, _) in enumerate(kept)]
    return Dataset(config, split, seed, tokenizer, eod, streams, whole_weights([part.weight for _, part in kept]))

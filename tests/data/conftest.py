"""Corpora whose tokens say where they come from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config.data import DataConfig
from jaxpar.data.loader import Dataset, open_dataset
from jaxpar.data.megatron import write_megatron
from jaxpar.data.sources import Split

VOCAB = 1 << 20


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents of the ids 1, 2, 3, ...: every token of the corpus is another one."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) + 1 for end, length in zip(ends, lengths, strict=True)]


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Dataset]:
    """Open numbered documents of these lengths as a dataset; eod (id 0) only if asked for."""

    def open_numbered(lengths: list[int], *, split: Split = "train", seed: int = 0, batch: int = 4, **settings: object) -> Dataset:
        prefix = tmp_path / f"numbered{len(list(tmp_path.iterdir()))}"
        write_megatron(prefix, ([document] for document in numbered(lengths)), VOCAB)
        fields = {"source": "tokens", "path": f"{prefix}.bin", "global_batch_size": batch, "eval_fraction": 0.0, **settings}
        return open_dataset(DataConfig.model_validate(fields), seed=seed, vocab_size=VOCAB, split=split)

    return open_numbered

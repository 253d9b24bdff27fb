"""A run of seconds: a small model in float32 with SGD on a few text files, whose curve must be the same under every layout."""

import random
from pathlib import Path

WORDS = [
    "the",
    "a",
    "mesh",
    "axis",
    "splits",
    "rows",
    "of",
    "tensors",
    "and",
    "sums",
    "what",
    "it",
    "split",
    "over",
    "devices",
    "in",
    "one",
    "step",
    "then",
    "goes",
    "on",
]
CONFIG = """\
model: {num_layers: 2, embed_dim: 32, num_heads: 4, mlp_dim: 64, vocab_size: 257, vocab_multiple: 8}
compute_dtype: float32
data: {source: text, path: PATH, seq_len: 32, global_batch_size: 8, eval_fraction: 0.2}
optimizer: {name: sgd, lr: 0.3, warmup_steps: 2, weight_decay: 0.0}
train: {steps: 12, sample_tokens: 8, eval_batches: 3}
checkpoint: {save_every: 0}
log: {tensorboard: false}
"""


def write_texts(folder: Path, num_files: int = 40) -> Path:
    """Documents of different lengths, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for i in range(num_files):
        (folder / f"{i:02}.txt").write_text(" ".join(draw.choices(WORDS, k=draw.randint(5, 60))))
    return folder


def write_config(folder: Path) -> Path:
    """The texts and a config file that reads them."""
    texts = write_texts(folder / "texts")
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.replace("PATH", str(texts)))
    return path

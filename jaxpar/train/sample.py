"""Text from a model as it is laid out for training."""

import jax.numpy as jnp
import numpy as np

from jaxpar.build import Parts
from jaxpar.core.typing import Params


def sample(parts: Parts, params: Params, prompt: str, num_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
    """The prompt and `num_tokens` tokens that follow it; temperature 0 takes the likeliest. The same under every layout.

    An empty prompt starts a document (after an end-of-document token). ValueError where both do not fit into data.seq_len.
    """
    data, tokenizer = parts.config.data, parts.train_data.tokenizer
    prompt_ids = ids_of(parts, prompt)
    if len(prompt_ids) + num_tokens > data.seq_len:
        room = f"{max(data.seq_len - len(prompt_ids), 0)} tokens would fit" if len(prompt_ids) < data.seq_len else "use a shorter prompt"
        text = f"prompt of {len(prompt_ids)} tokens and {num_tokens} more do not fit into data.seq_len={data.seq_len}; {room}"
        raise ValueError(text)
    if temperature < 0:
        raise ValueError(f"temperature: {temperature} is negative; 0 takes the likeliest token, 0.8 is usual")
    batch = parts.feed.place(rows_of(parts, prompt_ids, seed), None)
    start, count = (jnp.asarray(n, jnp.int32) for n in (len(prompt_ids), num_tokens))
    tokens_BS = parts.sample_step(params, batch, start, count, jnp.asarray(temperature, jnp.float32))
    return tokenizer.decode(np.asarray(tokens_BS)[0, : len(prompt_ids) + num_tokens][0 if prompt else 1 :])


def ids_of(parts: Parts, prompt: str) -> np.ndarray:
    """Tokens of a prompt; of an empty one the end of the document before it."""
    tokenizer = parts.train_data.tokenizer
    return np.asarray(tokenizer.encode(prompt) if prompt else [tokenizer.eod], np.int32)


def room_for(parts: Parts, prompt: str) -> int:
    """Tokens that fit behind a prompt."""
    return parts.config.data.seq_len - len(ids_of(parts, prompt))


def rows_of(parts: Parts, prompt_ids: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """As many rows as the batch axes want, all with the prompt; each has its own sample number, from which its noise follows.

    With experts a whole routing group for each: who shares capacity with the first row is then the same under every layout.
    """
    moe = parts.config.model.moe
    num_rows = parts.layout.size(parts.layout.batch_axes) * (moe.routing_group_sequences if moe else 1)
    seq_len = parts.config.data.seq_len
    tokens_BS = np.zeros((num_rows, seq_len), np.int32)
    tokens_BS[:, : len(prompt_ids)] = prompt_ids
    return {
        "tokens": tokens_BS,
        "positions": np.broadcast_to(np.arange(seq_len, dtype=np.int32), tokens_BS.shape),
        "segments": np.ones_like(tokens_BS),
        "samples": (np.arange(num_rows) + seed * 65_536).astype(np.uint32),
    }

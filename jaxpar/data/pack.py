"""Windows -> what a step needs: inputs, targets, weights, positions, segments."""

import numpy as np
from jaxtyping import Int

Batch = dict[str, np.ndarray]


def pack(window_BW: Int[np.ndarray, "B W"], segments_BW: Int[np.ndarray, "B W"], *, isolate_documents: bool) -> Batch:
    """Rows of S = W - 1 tokens. segments_BW: document of each token in its row, from 1; 0: padding.

    Targets are shifted here, before anything splits the sequence. weights: 0 for padding and, with isolate_documents, where the
    target belongs to another document than its input. Then positions restart with each document; without, a row is one segment.
    """
    real_BW = segments_BW > 0
    tokens_BS = np.where(real_BW[:, :-1], window_BW[:, :-1], 0)
    targets_BS = np.where(real_BW[:, 1:], window_BW[:, 1:], 0)
    segments_BS = segments_BW[:, :-1] if isolate_documents else real_BW[:, :-1]
    valid_BS = real_BW[:, 1:] & real_BW[:, :-1]
    index_S = np.arange(tokens_BS.shape[1], dtype=np.int32)
    positions_BS = np.broadcast_to(index_S, tokens_BS.shape)
    if isolate_documents:
        valid_BS &= segments_BW[:, 1:] == segments_BW[:, :-1]
        begins_BS = np.zeros(tokens_BS.shape, bool)
        begins_BS[:, 1:] = segments_BW[:, 1:-1] != segments_BW[:, :-2]
        positions_BS = index_S - np.maximum.accumulate(np.where(begins_BS, index_S, 0), axis=1)
    return {
        "tokens": tokens_BS.astype(np.int32),
        "targets": targets_BS.astype(np.int32),
        "weights": valid_BS.astype(np.float32),
        "positions": positions_BS.astype(np.int32),
        "segments": segments_BS.astype(np.int32),
    }

"""How evenly shares fall: of choices on experts, [..., experts]."""

import numpy as np


def over_mean(shares: np.ndarray) -> np.ndarray:
    """Shares / their mean, 1 where they are even; NaN where there are none."""
    mean = shares.mean(axis=-1, keepdims=True)
    return np.divide(shares, mean, out=np.full(shares.shape, np.nan), where=mean > 0)


def entropy(shares: np.ndarray) -> np.ndarray:
    """-sum f log f in nats: ln E where E are even, 0 where one has all and where there are none."""
    total = shares.sum(axis=-1, keepdims=True)
    f = shares / np.where(total > 0, total, 1.0)
    return -np.sum(f * np.log(np.where(f > 0, f, 1.0)), axis=-1)

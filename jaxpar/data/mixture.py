"""Which source a sample comes from: closed-form counts, so that any sample is known without those before it.

The first source takes sample i when floor(i * p) rises there, the next ones share what is left in the same way (Beatty
sequences, nested). After any number of samples each count is within k of its exact share, for k sources, and all are exact
whenever that number is a multiple of the sum of the weights as whole numbers. Megatron-LM's greedy rule has the same shares but
must be run from the start.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int

from jaxpar.data.errors import DataError

_MAX_TOTAL = 1 << 31  # with sample numbers below 2^32, products stay within int64


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers in the same ratio (0.7, 0.2, 0.1 -> 7, 2, 1), exact in decimal."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    common = math.gcd(*whole)
    if sum(whole) // common >= _MAX_TOTAL:
        raise DataError(f"data.mixture: weights {', '.join(map(str, weights))} have too many digits; round them to six")
    return [number // common for number in whole]


def assign(sample_B: Int[np.ndarray, " B"], weights: Sequence[int]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
    """(source, number of the sample within its source) for each global sample number."""
    source_B = np.full(len(sample_B), len(weights) - 1)
    number_B = sample_B.copy()
    open_B = np.ones(len(sample_B), bool)
    left = sum(weights)
    for source, weight in enumerate(weights[:-1]):
        before_B = number_B * weight // left  # samples of this source before this one
        takes_B = open_B & ((number_B + 1) * weight // left > before_B)
        source_B[takes_B] = source
        number_B = np.where(takes_B, before_B, np.where(open_B, number_B - before_B, number_B))
        open_B &= ~takes_B
        left -= weight
    return source_B, number_B

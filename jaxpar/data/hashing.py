"""Stateless random bits and permutations: the data order must not change with the version of a library (law L2)."""

import numpy as np
from jaxtyping import Int, UInt64

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 4  # of the Feistel network; four are enough to be indistinguishable from random (Luby & Rackoff 1988)


def mix(*parts: int | np.ndarray) -> UInt64[np.ndarray, "*N"]:
    """64 random bits for each tuple of parts, broadcast (the finaliser of SplitMix64: Steele, Lea & Flood 2014)."""
    hashed = np.zeros(1, np.uint64)
    for part in parts:
        word = np.uint64(part & _MASK) if isinstance(part, int) else part.astype(np.uint64)
        hashed = (hashed ^ word) + np.uint64(0x9E3779B97F4A7C15)
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashed = hashed ^ (hashed >> np.uint64(31))
    return hashed


def permute(index_N: Int[np.ndarray, " N"], size: int, *key: int) -> Int[np.ndarray, " N"]:
    """Images of `index_N` under a random permutation of range(size), chosen by `key`, without making the whole of it.

    A Feistel network on the smallest square domain that holds `size`, walked until the image is inside
    (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half_bits = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    seed = int(mix(*key)[0])
    image_N = index_N.astype(np.uint64)
    outside = np.ones(len(image_N), bool)
    while outside.any():
        left, right = image_N[outside] >> half_bits, image_N[outside] & mask
        for round_number in range(_NUM_ROUNDS):
            left, right = right, left ^ (mix(seed, round_number, right) & mask)
        image_N[outside] = (left << half_bits) | right
        outside = image_N >= size
    return image_N.astype(np.int64)

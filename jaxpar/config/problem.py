"""One violation and the keys that it involves; the whole numbers that a message offers instead."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """keys: a violation is not reported when one of these is already broken by itself."""

    keys: tuple[str, ...]
    text: str


def divisors(n: int) -> list[int]:
    """All of them, rising."""
    return [d for d in range(1, n + 1) if n % d == 0]


def near_multiples(n: int, of: int) -> str:
    """The multiples of `of` around n: "8 or 12"."""
    below = n // of * of
    return f"{below} or {below + of}" if below else str(of)

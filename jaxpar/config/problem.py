"""One violation and the keys that it involves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """keys: a violation is not reported when one of these is already broken by itself."""

    keys: tuple[str, ...]
    text: str

"""Colours of actions: Okabe and Ito's palette, which people with any common colour blindness can tell apart.

Chunks are shades of the colour of their kind, the first the darkest.
"""

from jaxpar.schedule.actions import Kind

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COLOURS: dict[Kind, tuple[int, int, int]] = {"F": (86, 180, 233), "B": (213, 94, 0), "I": (230, 159, 0), "W": (0, 158, 115)}
PALEST = 0.62  # how much white the last of many chunks has


def colour(kind: Kind, chunk: int = 0, num_chunks: int = 1) -> str:
    """`#rrggbb` of an action."""
    return shade(COLOURS[kind], chunk, num_chunks)


def shade(base: tuple[int, int, int], chunk: int, num_chunks: int) -> str:
    """The base colour for the first chunk, paler for each after."""
    white = PALEST * chunk / max(2, num_chunks - 1)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in base)

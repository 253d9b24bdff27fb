"""Load of experts in plain text: a bar for each expert, and what stands out in words. Blocks and experts count from 0."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpar.core.shares import over_mean
from jaxpar.core.words import percent, times

# Eighths of a full bar, which is twice the mean: a balanced expert fills half. The first is for next to nothing.
LEVELS = "·▁▂▃▄▅▆▇█"
PLAIN_LEVELS = "012345678"  # for output that has ASCII only
GROUP, MOST_IN_A_LINE = 16, 64  # experts: a space after so many, a line break after so many
BUSY, IDLE = 1.5, 0.5  # x the mean: what a verdict calls uneven
STARVED = 0.1  # x the mean
MOST_BLOCKS = 8


def load_lines(
    load: Sequence[Sequence[float]] | np.ndarray,
    dropped: Sequence[float] | np.ndarray | None,
    *,
    levels: str = LEVELS,
    most_blocks: int = MOST_BLOCKS,
) -> list[str]:
    """What one step's load [blocks, experts] and dropped fractions [blocks] look like: a legend, a line a block, a verdict on all blocks.

    Of more than `most_blocks` blocks, so many are shown, evenly chosen.
    """
    relative = over_mean(np.asarray(load, dtype=np.float64))
    gone = None if dropped is None else np.asarray(dropped, dtype=np.float64)
    shown = evenly_chosen(len(relative), most_blocks)
    some = "" if len(shown) == len(relative) else f"{len(shown)} of {len(relative)} blocks; "
    lines = [f"load of {relative.shape[1]} experts ({some}{legend(levels)})"]
    drawn = bar_lines(relative, shown, levels)
    each = len(drawn) // len(shown)
    for i, block in enumerate(shown):
        words = f"{extremes(relative[block])}{_dropped_words(gone, block)}"
        beside = drawn[i * each : (i + 1) * each]
        lines += [f"{beside[0]}  {words}"] if relative.shape[1] <= GROUP else [f"block {block}: {words}", *beside]
    return [*lines, verdict(relative, gone)]


def levels_for(encoding: str | None) -> str:
    """The bars, or digits where an output's encoding lacks them."""
    try:
        LEVELS.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_LEVELS
    return LEVELS


def legend(levels: str = LEVELS) -> str:
    """What the bars mean."""
    return f"{levels[4]} the mean, {levels[8]} twice that or more, {levels[0]} next to nothing"


def bars(relative: np.ndarray, levels: str = LEVELS) -> str:
    """One character an expert, of its load / mean load; a space between groups of experts."""
    eighths = np.clip(np.floor(np.nan_to_num(relative) * 4 + 0.5), 0, 8).astype(int)
    text = "".join(levels[i] for i in eighths)
    return " ".join(text[i : i + GROUP] for i in range(0, len(text), GROUP))


def bar_lines(relative: np.ndarray, blocks: Sequence[int], levels: str = LEVELS) -> list[str]:
    """`block 3  ▄▅▃▄`; many experts go on below, a line starting with the number of its first expert."""
    num_experts = relative.shape[1]
    if num_experts <= MOST_IN_A_LINE:
        width = len(f"block {max(blocks)}")
        return [f"{f'block {block}':<{width}}  {bars(relative[block], levels)}" for block in blocks]
    starts = range(0, num_experts, MOST_IN_A_LINE)
    width = len(f"block {max(blocks)}, expert {starts[-1]}")
    return [
        f"{f'block {block}, expert {start}':<{width}}  {bars(relative[block, start : start + MOST_IN_A_LINE], levels)}"
        for block in blocks
        for start in starts
    ]


def extremes(relative: np.ndarray) -> str:
    """The busiest and the least loaded expert of a block."""
    if np.isnan(relative).any():
        return "nothing was routed"
    return f"max {times(relative.max())} x the mean, min {times(relative.min())} x (expert {int(relative.argmin())})"


def verdict(relative: np.ndarray, dropped: np.ndarray | None) -> str:
    """One line about the blocks [blocks, experts] of one step: what is furthest from balance, and what that cost."""
    return "; ".join([_furthest(relative), *_starved(relative), *_worst_drop(dropped)])


def _furthest(relative: np.ndarray) -> str:
    if np.isnan(relative).all():
        return "no token was routed"
    largest, least = (np.unravel_index(pick(relative), relative.shape) for pick in (np.nanargmax, np.nanargmin))
    for far, (block, expert) in ((relative[largest] >= BUSY, largest), (relative[least] <= IDLE, least)):
        if far:
            return f"block {block}: expert {expert} gets {times(relative[block, expert])} x the mean"
    return f"balanced: every expert gets {times(relative[least])} to {times(relative[largest])} x the mean of its block"


def _starved(relative: np.ndarray) -> Iterator[str]:
    if num_starved := int(np.count_nonzero(relative < STARVED)):
        yield f"{num_starved} of {relative.size} experts {'get' if num_starved > 1 else 'gets'} less than {STARVED:g} x the mean"


def _worst_drop(dropped: np.ndarray | None) -> Iterator[str]:
    if dropped is not None and np.nan_to_num(dropped).max() > 0:
        block = int(np.nanargmax(dropped))
        yield f"{percent(dropped[block])} of the choices of block {block} are dropped{', the most' if len(dropped) > 1 else ''}"


def _dropped_words(dropped: np.ndarray | None, block: int) -> str:
    return "" if dropped is None or np.isnan(dropped[block]) else f", {percent(dropped[block])} dropped"


def evenly_chosen(count: int, most: int) -> list[int]:
    """All of 0 .. count - 1, or `most` of them with the first and the last."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]

"""ZB-V (Qi et al., arXiv 2401.10241, section 6): no bubble at the memory of 1F1B, from two chunks a stage that run there and back.

The V placement puts the first and the last virtual stage on one device, so the loss, and with it the first gradient, is where the
first forward was: no stage waits for a gradient to cross the pipeline. In steady state a stage does one F, I, W of each chunk in
turn. Each stage holds at most 2p half-size chunks, which is p microbatches of a whole stage, and the same on every stage.
"""

from typing import cast

from jaxpar.schedule.actions import Action, Kind, Schedule, Shape


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """The hand-made order, for F = I = W: no idle inside any stage's span from 2p - 1 microbatches on.

    The order is that of at least 2p - 1 microbatches without the actions of those that do not exist: leaving a whole
    microbatch out breaks no dependency, and leaves each stage idle by no more than what it would have done for it.
    """
    shape = Shape(num_stages, num_microbatches, 2, "v")
    padded = max(num_microbatches, 2 * num_stages - 1)
    orders = (_order(num_stages, stage, padded) for stage in range(num_stages))
    real = (tuple(action for action in order if action.microbatch < num_microbatches) for order in orders)
    return Schedule("zb_v", shape, tuple(real))


def _order(num_stages: int, stage: int, num_microbatches: int) -> list[Action]:
    """Stage `stage` of p, with at least 2p - 1 microbatches. Microbatches go in order within a kind and a chunk."""
    after = num_stages - stage  # this stage and those between it and the turn of the V
    ahead = 2 * after - 1  # forwards of the first chunk until the first microbatch is back from the turn
    last_forwards = num_stages - stage - 1  # forwards of the second chunk that are left when the first chunk has none
    parts = [
        (ahead, "F0"),
        (stage, "F1 F0"),
        (after, "F1 I1 W1"),
        (num_microbatches - ahead - stage, "F0 I0 W0 F1 I1 W1"),
        (last_forwards, "I0 W0 F1 I1 W1"),
        (stage, "I0 I1"),
        (after, "I0 W0"),
        (stage, "W1"),
        (stage, "W0"),
    ]
    return _numbered(parts)


def _numbered(parts: list[tuple[int, str]]) -> list[Action]:
    """Repeats of a pattern of (kind, chunk), each numbered by how often it came before."""
    seen: dict[str, int] = {}
    order = []
    for repeats, pattern in parts:
        for word in pattern.split() * repeats:
            number = seen[word] = seen.get(word, -1) + 1
            order.append(Action(cast(Kind, word[0]), number, int(word[1])))
    return order

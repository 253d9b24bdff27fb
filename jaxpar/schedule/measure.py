"""What a schedule costs whatever its actions take: activations held, messages sent."""

from collections.abc import Sequence

from jaxpar.schedule.actions import Action, Schedule, producer


def peak_in_flight(order: Sequence[Action], until: str = "W") -> int:
    """Chunk forwards of a stage whose activations are held at once; 1 / num_chunks of a whole stage each.

    until "W": from F to B or W, what memory must hold. until "I": from F to B or I, how far forwards run ahead of gradients (the
    figure of the zero-bubble paper's warm-ups); from I to W only the inputs of linear maps and their output gradients remain.
    """
    held = peak = 0
    for action in order:
        held += (action.kind == "F") - (action.kind in ("B", until))
        peak = max(peak, held)
    return peak


def count_messages(schedule: Schedule) -> int:
    """Activations and gradients that go to another stage in one step."""
    shape = schedule.shape
    sources = ((stage, producer(shape, stage, action)) for stage, order in enumerate(schedule.orders) for action in order)
    return sum(source is not None and source[0] != stage for stage, source in sources)

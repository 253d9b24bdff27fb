"""What a schedule costs whatever its actions take: activations held, messages sent."""

from collections.abc import Sequence

from jaxpar.schedule.actions import Action, Schedule
from jaxpar.schedule.dependencies import message_of


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


def most_deferred(schedule: Schedule, virtual: int | None = None) -> int:
    """The most (microbatch, chunk) pairs between their I and their W on one stage; of this virtual stage alone, if one is given."""
    shape, most = schedule.shape, 0
    for stage, order in enumerate(schedule.orders):
        waiting = 0
        for action in order:
            if virtual in (None, shape.virtual(stage, action.chunk)):
                waiting += (action.kind == "I") - (action.kind == "W")
                most = max(most, waiting)
    return most


def count_messages(schedule: Schedule) -> int:
    """Activations and gradients that go to another stage in one step."""
    shape = schedule.shape
    sent = ((stage, message_of(shape, stage, action)) for stage, order in enumerate(schedule.orders) for action in order)
    return sum(message is not None and message.to != stage for stage, message in sent)

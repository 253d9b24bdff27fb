"""What each action waits for and sends, and an order in which all can run.

B and I give the same thing to others, the gradient of a chunk's input: here "B" stands for both.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxpar.schedule.actions import Action, Shape

Place = tuple[int, Action]  # (stage, action)
Unit = tuple[Action, ...]  # actions that start and end together: one, or a forward overlapped with a backward


class Message(NamedTuple):
    """What an action sends: to which stage and action, and whether it goes up (from stage s to s + 1) or down."""

    to: int
    reader: Action
    up: bool


def gives(action: Action) -> Action:
    """The action as others wait for it."""
    return action._replace(kind="B") if action.kind == "I" else action


def along(shape: Shape, stage: int, action: Action, steps: int) -> Place | None:
    """The same action `steps` virtual stages further on its way, which F goes up and B and I come down; None where there is none."""
    forward = action.kind == "F"
    virtual = shape.virtual(stage, action.chunk) + (steps if forward else -steps)
    if action.kind == "W" or not 0 <= virtual < shape.num_virtual:
        return None
    return shape.stage(virtual), Action("F" if forward else "B", action.microbatch, shape.chunk(virtual))


def message_of(shape: Shape, stage: int, action: Action) -> Message | None:
    """What becomes of an action's output; `to` may be its own stage. None: W, I of the first virtual stage, F of the last."""
    reader = along(shape, stage, action, 1)
    return reader and Message(*reader, up=(action.kind == "F") != shape.runs_back(action.chunk))


def needs(shape: Shape, stage: int, action: Action) -> list[Place]:
    """What must be done before: the action whose message it reads; F before B or I; I before W."""
    found = [place] if (place := along(shape, stage, action, -1)) else []
    if action.kind != "F":
        found.append((stage, action._replace(kind="B" if action.kind == "W" else "F")))
    return found


def run(orders: Sequence[Sequence[Unit]], needed: Callable[[int, Action], Iterable[Place]]) -> tuple[list[tuple[int, Unit]], list[int]]:
    """(stage, unit) in an order in which all needs are met, and how far each stage came: less than its order is a deadlock."""
    done: set[Place] = set()
    came = [0] * len(orders)
    ran: list[tuple[int, Unit]] = []
    before = -1
    while before < len(ran):
        before = len(ran)
        for stage, order in enumerate(orders):
            while came[stage] < len(order):
                unit = order[came[stage]]
                if any(place not in done for action in unit for place in needed(stage, action)):
                    break
                done.update((stage, gives(action)) for action in unit)
                ran.append((stage, unit))
                came[stage] += 1
    return ran, came

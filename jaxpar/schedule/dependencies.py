"""What each action waits for, and an order in which all can run.

B and I give the same thing to others, the gradient of a chunk's input: here "B" stands for both.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxpar.schedule.actions import Action, Shape, producer

Place = tuple[int, Action]  # (stage, action)
Unit = tuple[Action, ...]  # actions that start and end together: one, or a forward overlapped with a backward


def gives(action: Action) -> Action:
    """The action as others wait for it."""
    return action._replace(kind="B") if action.kind == "I" else action


def needs(shape: Shape, stage: int, action: Action) -> list[Place]:
    """What must be done before: the message from the virtual stage before or after; F before B or I; I before W."""
    found = [place] if (place := producer(shape, stage, action)) else []
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

"""Is a schedule right? Every violation as a line; none means that the executor can run it.

Messages may overtake each other: the executor moves each in the tick that makes it and keeps it in a slot until it is used, so unlike
point-to-point queues (Megatron, torch) it does not ask two neighbours to send and to use messages in one order.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxpar.schedule.actions import KINDS, Action, Kind, Schedule
from jaxpar.schedule.dependencies import Place, gives, needs, run

SHOWN = 8  # microbatches listed in a message


class Fault(NamedTuple):
    """A violation, and where it is seen: a stage and a position in its order (None: something is not there)."""

    stage: int
    position: int | None
    text: str


class Words(NamedTuple):
    """How messages name a stage, a chunk of a stage, an action of a stage; a file has its own notation."""

    stage: Callable[[int], str] = lambda stage: f"stage {stage}"
    chunk: Callable[[int, int], str] = lambda _, chunk: f"chunk {chunk}"
    action: Callable[[int, Action], str] = lambda _, action: str(action)


def check_schedule(schedule: Schedule) -> list[str]:
    """Every violation: sizes, coverage, the order on each stage, deadlock. Lines name stage, chunk and action."""
    if problems := list(_size_problems(schedule)):
        return problems
    return [f"stage {stage}: {text}" for stage, _, text in find_faults(schedule)]


def find_faults(schedule: Schedule, words: Words | None = None) -> Iterator[Fault]:
    """The violations of a schedule whose actions all exist."""
    words = words or Words()
    yield from _coverage_faults(schedule, words)
    yield from _order_faults(schedule, words)
    yield from _deadlock(schedule, words)


def _size_problems(schedule: Schedule) -> Iterator[str]:
    """Actions that do not exist; the other rules have no meaning for them."""
    shape = schedule.shape
    sizes = {"stages": shape.num_stages, "microbatches": shape.num_microbatches, "chunks": shape.num_chunks}
    for name, size in sizes.items():
        if size < 1:
            yield f"{size} {name}: 1 or more are needed"
    if len(schedule.orders) != shape.num_stages:
        yield f"{len(schedule.orders)} orders for {shape.num_stages} stages: each stage needs one"
    for stage, order in enumerate(schedule.orders):
        for action in order:
            if action.kind not in KINDS:
                yield f"stage {stage}: {action} is no action; kinds are {', '.join(KINDS)}"
            if not 0 <= action.microbatch < shape.num_microbatches:
                yield f"stage {stage}: {action} is of microbatch {action.microbatch}; they run from 0 to {shape.num_microbatches - 1}"
            if not 0 <= action.chunk < shape.num_chunks:
                yield f"stage {stage}: {action} is of chunk {action.chunk}; a stage holds chunks 0 to {shape.num_chunks - 1}"


def _coverage_faults(schedule: Schedule, words: Words) -> Iterator[Fault]:
    """Each microbatch, on each chunk of each stage: one F, and one B or one I with one W."""
    for stage, order in enumerate(schedule.orders):
        seen: set[Action] = set()
        for position, action in enumerate(order):
            if action in seen:
                yield Fault(stage, position, f"{words.action(stage, action)} comes again; once is right")
            seen.add(action)
        for chunk in range(schedule.shape.num_chunks):
            lacking: dict[str, list[int]] = {}
            for i in range(schedule.shape.num_microbatches):
                for fault in _faults({kind for kind in KINDS if Action(kind, i, chunk) in seen}):
                    lacking.setdefault(fault, []).append(i)
            for fault, microbatches in lacking.items():
                yield Fault(stage, None, f"{words.chunk(stage, chunk)}: {fault} for {_listed(microbatches)}")


def _faults(found: set[Kind]) -> Iterator[str]:
    if "F" not in found:
        yield "no F"
    if "B" in found and found & {"I", "W"}:
        yield f"B as well as {' and '.join(sorted(found & {'I', 'W'}))} (B is both I and W)"
    elif not found & {"B", "I", "W"}:
        yield "no backward (B, or I and W)"
    elif "B" not in found and found & {"I", "W"} != {"I", "W"}:
        yield "I without W" if "I" in found else "W without I"


def _listed(microbatches: list[int]) -> str:
    shown = ", ".join(map(str, microbatches[:SHOWN]))
    more = f" and {len(microbatches) - SHOWN} more" if len(microbatches) > SHOWN else ""
    return f"microbatch{'es' if len(microbatches) > 1 else ''} {shown}{more}"


def _order_faults(schedule: Schedule, words: Words) -> Iterator[Fault]:
    """What an action needs from its own stage comes before it."""
    for stage, order in enumerate(schedule.orders):
        first: dict[Action, int] = {}
        for position, action in enumerate(order):
            first.setdefault(gives(action), position)
        for position, action in enumerate(order):
            for place, needed in needs(schedule.shape, stage, action):
                if place == stage and first.get(needed, -1) > position:
                    late = words.action(stage, order[first[needed]])
                    yield Fault(stage, position, f"{words.action(stage, action)} comes before {late}, which it needs")


def _deadlock(schedule: Schedule, words: Words) -> Iterator[Fault]:
    """The cycle that keeps stages waiting for one another; what is missing, or late on its own stage, is reported elsewhere."""
    shape, orders = schedule.shape, schedule.orders
    exists = {(stage, gives(action)): action for stage, order in enumerate(orders) for action in order}

    def messages(stage: int, action: Action) -> list[Place]:
        return [place for place in needs(shape, stage, action) if place[0] != stage and place in exists]

    ran, came = run([[(action,) for action in order] for order in orders], messages)
    if len(ran) == sum(map(len, orders)):
        return
    done = {(stage, gives(action)) for stage, (action,) in ran}

    def waits_for(stage: int) -> Place:
        return next(place for place in messages(stage, orders[stage][came[stage]]) if place not in done)

    path = [next(stage for stage, order in enumerate(orders) if came[stage] < len(order))]
    while (after := waits_for(path[-1])[0]) not in path:
        path.append(after)
    path = path[path.index(after) :]
    waits = []
    for stage in path:
        place = waits_for(stage)
        at, awaited = words.action(stage, orders[stage][came[stage]]), words.action(place[0], exists[place])
        waits.append(f"{words.stage(stage)} at {at} waits for {awaited} of {words.stage(place[0])}")
    yield Fault(path[0], came[path[0]], f"deadlock: {'; '.join(waits)}")

"""Event simulation: each stage runs its order, an action starts when its stage is free and its inputs have arrived."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jaxpar.schedule.actions import Action, Schedule
from jaxpar.schedule.check import check_schedule
from jaxpar.schedule.dependencies import Place, Unit, gives, needs, run
from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.measure import count_messages, peak_in_flight


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of a whole stage in any unit; a chunk takes 1 / num_chunks of them. Field names are those of the actions.

    comm: from the end of an action to when its message has reached another stage; it keeps no stage busy.
    B: None is I + W. FB: a forward and the backward of another chunk right behind it, overlapped as one unit (DualPipe) that starts
    when both can and whose messages leave at its end; None runs them one after the other.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    comm: float = 0.0
    B: float | None = None
    FB: float | None = None

    def of(self, unit: Unit) -> float:
        """Time of an action or an overlapped pair, as if the stage had one chunk."""
        if len(unit) == 2 and self.FB is not None:
            return self.FB
        backward = self.I + self.W if self.B is None else self.B
        return sum({"F": self.F, "I": self.I, "W": self.W, "B": backward}[action.kind] for action in unit)


class Span(NamedTuple):
    """When an action runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. Idle time is all of the makespan in which a stage does not work, before its first action too."""

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]  # one tuple a stage, in order

    @property
    def makespan(self) -> float:
        return max(spans[-1].end for spans in self.spans)

    @property
    def work(self) -> tuple[float, ...]:
        """Busy time of each stage; an overlapped pair counts once."""
        return tuple(sum(end - start for start, end in {(span.start, span.end) for span in spans}) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each stage."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Idle time of each stage between its first and its last action: without the skew of start and end."""
        return tuple(spans[-1].end - spans[0].start - work for spans, work in zip(self.spans, self.work, strict=True))

    @property
    def bubble_of_ideal(self) -> float:
        """Idle / ideal time m(F + B): Megatron-LM's bubble fraction, (p - 1) / m for 1F1B."""
        return sum(self.idle) / sum(self.work)

    @property
    def bubble_of_makespan(self) -> float:
        """Idle / makespan: GPipe's, (p - 1) / (m + p - 1) for 1F1B."""
        return sum(self.idle) / (self.makespan * len(self.spans))

    @property
    def bubble_rate(self) -> float:
        """Zero Bubble's (arXiv 2401.10241, section 5): gaps / span of the stage with the longest span, as if steps could overlap."""
        gap, work = max(zip(self.gaps, self.work, strict=True), key=sum)
        return gap / (gap + work)

    @property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Most microbatches of activations held by each stage, in whole stages: chunks / num_chunks."""
        return tuple(peak_in_flight(order) / self.schedule.shape.num_chunks for order in self.schedule.orders)

    @property
    def num_messages(self) -> int:
        return count_messages(self.schedule)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run it with these costs, F = I = W = 1 if none are given; ValueError with every violation if it cannot run."""
    costs = costs or Costs()
    shape = schedule.shape
    orders = [_units(order, costs) for order in schedule.orders]
    ran, came = run(orders, partial(needs, shape))
    if came != list(map(len, orders)):
        problems = check_schedule(schedule) or ["FB: an overlapped pair would wait for itself; leave FB out"]
        raise ScheduleError(problems, f"schedule {schedule.name}")
    free = [0.0] * shape.num_stages
    ends: dict[Place, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    for stage, unit in ran:
        sources = [place for action in unit for place in needs(shape, stage, action)]
        start = max([free[stage], *(ends[place] + (costs.comm if place[0] != stage else 0.0) for place in sources)])
        free[stage] = start + costs.of(unit) / shape.num_chunks
        ends.update({(stage, gives(action)): free[stage] for action in unit})
        spans[stage] += [Span(action, start, free[stage]) for action in unit]
    return Timeline(schedule, costs, tuple(map(tuple, spans)))


def _units(order: tuple[Action, ...], costs: Costs) -> list[Unit]:
    """Single actions; with a cost for FB, each F with a B of another chunk right behind it is one unit."""
    units: list[Unit] = []
    for action in order:
        last = units[-1] if units else ()
        overlaps = action.kind == "B" and len(last) == 1 and last[0].kind == "F" and last[0].chunk != action.chunk
        if costs.FB is not None and overlaps:
            units[-1] = (*last, action)
        else:
            units.append((action,))
    return units

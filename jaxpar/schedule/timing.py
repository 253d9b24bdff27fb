"""When: the tick of every action, and the tick at whose end its message is exchanged."""

from dataclasses import dataclass, field
from functools import partial

from jaxpar.schedule.actions import Action, Kind, Schedule
from jaxpar.schedule.dependencies import Message, Place, gives, message_of, needs, run

UNITS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}  # time of an action that exchanges are planned for


@dataclass
class Timing:
    """ticks: of each stage's actions. exchanges: of the message of (stage, action), kind B standing for B or I."""

    ticks: list[dict[Action, int]]
    exchanges: dict[Place, int] = field(default_factory=dict)


def fewest_ticks(schedule: Schedule) -> Timing:
    """Each action as early as the ticks allow, each message at the end of its action's tick."""
    timing = Timing([{} for _ in schedule.orders])
    order, _ = run([[(action,) for action in stage] for stage in schedule.orders], partial(needs, schedule.shape))
    for stage, (action,) in order:
        before = [max(timing.ticks[stage].values(), default=-1)]
        before += [timing.exchanges[place] for place in needs(schedule.shape, stage, action)]
        timing.ticks[stage][action] = timing.exchanges[stage, gives(action)] = max(before) + 1
    return timing


def meetings(schedule: Schedule) -> Timing:
    """Messages wait until both stages are between two actions, so that neither waits for the other.

    Played in unit time. A tick is a moment at which something ends or is exchanged; an action belongs to the moment of its end.
    """
    shape, play = schedule.shape, _Play(schedule)
    now, moments = 0, []
    while play.busy:
        if any([*play.finish(now), *play.exchange(now)]):
            moments.append(now)
        play.start(now)
        now += 1
    number = {moment: tick for tick, moment in enumerate(moments)}
    ticks = [{action: number[end] for action, end in ends.items()} for ends in play.ends]
    exchanged = {place: number[moment] for place, moment in play.exchanged.items()}
    return Timing(ticks, {(s, gives(a)): t for s in range(shape.num_stages) for a, t in ticks[s].items()} | exchanged)


class _Play:
    """The stages in unit time: what each runs, has done and received, and still has to send."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, count = schedule, range(schedule.shape.num_stages)
        self.running: list[tuple[Action, int] | None] = [None for _ in count]  # with the moment of its end
        self.came = [0 for _ in count]
        self.here: list[set[Place]] = [set() for _ in count]  # outputs that a stage has, its own and those received
        self.waiting: list[list[tuple[Place, Message]]] = [[] for _ in count]
        self.ends: list[dict[Action, int]] = [{} for _ in count]
        self.exchanged: dict[Place, int] = {}

    @property
    def busy(self) -> bool:
        left = any(came < len(order) for came, order in zip(self.came, self.schedule.orders, strict=True))
        return left or any(self.running) or any(self.waiting)

    def start(self, now: int) -> None:
        """Every free stage begins its next action, if its inputs are there."""
        for stage, order in enumerate(self.schedule.orders):
            if self.running[stage] is None and self.came[stage] < len(order):
                action = order[self.came[stage]]
                if self.here[stage].issuperset(needs(self.schedule.shape, stage, action)):
                    self.running[stage] = (action, now + UNITS[action.kind])
                    self.came[stage] += 1

    def finish(self, now: int) -> list[Action]:
        """Actions that end now."""
        ended = []
        for stage, current in enumerate(self.running):
            if current is not None and current[1] == now:
                action = current[0]
                ended.append(action)
                self.running[stage], self.ends[stage][action] = None, now
                self.here[stage].add((stage, gives(action)))
                message = message_of(self.schedule.shape, stage, action)
                if message is not None and message.to != stage:
                    self.waiting[stage].append(((stage, gives(action)), message))
        return ended

    def exchange(self, now: int) -> list[Place]:
        """Messages that pass now: between free stages, one a stage and direction, the oldest first."""
        passed = []
        for stage, waiting in enumerate(self.waiting):
            sent: set[bool] = set()
            for place, message in list(waiting) if self.running[stage] is None else []:
                if self.running[message.to] is None and message.up not in sent:
                    sent.add(message.up)
                    waiting.remove((place, message))
                    self.here[message.to].add(place)
                    self.exchanged[place] = now
                    passed.append(place)
        return passed

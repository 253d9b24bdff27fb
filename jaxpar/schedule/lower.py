"""Lowering: in which tick each action of a schedule runs, and which slot holds what it reads and makes."""

from dataclasses import replace

import numpy as np

from jaxpar.schedule.actions import KINDS, Action, Schedule
from jaxpar.schedule.dependencies import Message, gives, message_of
from jaxpar.schedule.simulate import simulate
from jaxpar.schedule.ticks import COLUMNS, NONE, POOLS, Pairs, Pool, TickTable, simulate_ticks
from jaxpar.schedule.timing import Timing, fewest_ticks, meetings

TOLERANCE = 1.01  # of the ideal makespan: what fewer ticks may cost


def lower(schedule: Schedule, *, keep_inputs: bool = False) -> TickTable:
    """The table of a schedule; ScheduleError where it cannot run. keep_inputs: F stashes nothing, B or I computes it again.

    The fewest ticks, unless stages would then wait for one another (interleaved: by a sixth); else messages wait until both stages
    are between two actions. And as few patterns as cost nothing. All of it is judged at F = I = W = 1.
    """
    ideal = simulate(schedule).makespan
    table = _Lowering(schedule, fewest_ticks(schedule), keep_inputs).table()
    if simulate_ticks(table) > TOLERANCE * ideal:
        table = min(table, _Lowering(schedule, meetings(schedule), keep_inputs).table(), key=simulate_ticks)
    fewer = fewer_patterns(table)
    return fewer if simulate_ticks(fewer) <= simulate_ticks(table) else table


def fewer_patterns(table: TickTable) -> TickTable:
    """The same table where more pairs exchange than have something to say: those of a direction's even, odd, or all stages.

    Each pattern is a branch of the program. Exact ones grow with the stages (zb_v: 24, 77, 365 on 4, 8, 32), these do not; but whoever
    exchanges waits, and where messages go round the ring (interleaved) that costs more than half, so there they stay exact.
    """
    up, down = (sorted({pair for pattern in table.patterns for pair in pattern[i]}) for i in (0, 1))

    def wider(pairs: Pairs, all_pairs: list[tuple[int, int]]) -> Pairs:
        senders = {source % 2 for source, _ in pairs}
        return tuple(pair for pair in all_pairs if pair[0] % 2 in senders)

    number: dict[tuple[Pairs, Pairs], int] = {}
    new = [number.setdefault((wider(a, up), wider(b, down)), len(number)) for a, b in (table.patterns[i] for i in table.pattern)]
    return replace(table, pattern=np.asarray(new, np.int32), patterns=tuple(number))


class _Lowering:
    """One pass over the ticks: gives slots out when something is made, takes them back when it is read for the last time."""

    def __init__(self, schedule: Schedule, timing: Timing, keep_inputs: bool) -> None:
        self.shape, self.timing, self.keep_inputs = schedule.shape, timing, keep_inputs
        self.num_ticks = 1 + max([*(t for stage in timing.ticks for t in stage.values()), *timing.exchanges.values()], default=-1)
        self.pools: dict[Pool, list[_Slots]] = {pool: [_Slots() for _ in timing.ticks] for pool in POOLS}
        self.columns = {name: np.full((self.num_ticks, len(timing.ticks)), NONE, np.int32) for name in COLUMNS}
        self.pattern = np.zeros(self.num_ticks, np.int32)
        self.patterns: dict[tuple[Pairs, Pairs], int] = {}

    def table(self) -> TickTable:
        actions: list[list[tuple[int, Action]]] = [[] for _ in range(self.num_ticks)]
        exchanges: list[list[tuple[int, Action, Message]]] = [[] for _ in range(self.num_ticks)]
        for stage, ticks in enumerate(self.timing.ticks):
            for action, tick in ticks.items():
                actions[tick].append((stage, action))
                message = message_of(self.shape, stage, action)
                if message is not None and message.to != stage:
                    exchanges[self.timing.exchanges[stage, gives(action)]].append((stage, action, message))
        for tick in range(self.num_ticks):
            for stage, action in actions[tick]:
                self._run(tick, stage, action)
            self._exchange(tick, exchanges[tick])
            for stage, action in actions[tick]:
                self._keep(tick, stage, action)
        left = [held for stages in self.pools.values() for one in stages for held in one.held_now()]
        assert not left or all(action.kind == "F" for order in self.timing.ticks for action in order), f"never read: {left}"
        slots: dict[Pool, int] = {pool: max(one.size for one in stages) for pool, stages in self.pools.items()}
        return TickTable(self.shape, **self.columns, pattern=self.pattern, patterns=tuple(self.patterns), num_slots=slots)

    def _set(self, tick: int, stage: int, **values: int) -> None:
        for name, value in values.items():
            self.columns[name][tick, stage] = value

    def _run(self, tick: int, stage: int, action: Action) -> None:
        """What an action reads and frees, and what it leaves for a later one on its own stage."""
        messages, stash, deferred, head = (self.pools[pool][stage] for pool in POOLS)
        kind, where = action.kind, (action.microbatch, action.chunk)
        virtual = self.shape.virtual(stage, action.chunk)
        first, last = virtual == 0, virtual == self.shape.num_virtual - 1
        self._set(tick, stage, kind=KINDS.index(kind), microbatch=action.microbatch, chunk=action.chunk)
        if kind == "F":
            if not first:
                self._set(tick, stage, reads=messages.held("x", where) if self.keep_inputs else messages.free("x", where))
            if not self.keep_inputs:
                self._set(tick, stage, stash=stash.take("residuals", where))
        elif kind == "W":
            self._set(tick, stage, deferred=deferred.free("operands", where))
            if not self.keep_inputs:
                self._set(tick, stage, stash=stash.free("residuals", where))
            if last:
                self._set(tick, stage, head=head.free("operands", where))
        else:
            self._set(tick, stage, reads=messages.free("dx", where))
            if not self.keep_inputs:
                self._set(tick, stage, stash=(stash.free if kind == "B" else stash.held)("residuals", where))
            elif not first:
                self._set(tick, stage, inputs=messages.free("x", where))
            if kind == "I":
                self._set(tick, stage, deferred=deferred.take("operands", where))
                if last:
                    self._set(tick, stage, head=head.take("operands", where))

    def _exchange(self, tick: int, exchanges: list[tuple[int, Action, Message]]) -> None:
        """Messages at the end of a tick: out of the slot in which they waited, if they did, and into one of the reader's."""
        pairs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for stage, action, message in exchanges:
            pairs[message.up].append((stage, message.to))
            if self.timing.ticks[stage][action] < tick:
                slot = self.pools["messages"][stage].free("out", (gives(action), stage))
                self._set(tick, stage, **{"sends_up" if message.up else "sends_down": slot})
        for _, _, message in exchanges:
            slot = self._slot_for(message)
            self._set(tick, message.to, **{"from_below" if message.up else "from_above": slot})
        self.pattern[tick] = self.patterns.setdefault((tuple(sorted(pairs[True])), tuple(sorted(pairs[False]))), len(self.patterns))

    def _keep(self, tick: int, stage: int, action: Action) -> None:
        """Where a stage puts its own output: for a later exchange, for its own next chunk, or (last F) for the head."""
        messages, message = self.pools["messages"][stage], message_of(self.shape, stage, action)
        if message is None:
            if action.kind == "F":
                self._set(tick, stage, keeps=messages.take("dx", (action.microbatch, action.chunk)))
        elif message.to == stage:
            self._set(tick, stage, keeps=self._slot_for(message))
        elif self.timing.exchanges[stage, gives(action)] > tick:
            self._set(tick, stage, keeps=messages.take("out", (gives(action), stage)))

    def _slot_for(self, message: Message) -> int:
        what = "x" if message.reader.kind == "F" else "dx"
        return self.pools["messages"][message.to].take(what, (message.reader.microbatch, message.reader.chunk))


class _Slots:
    """Numbered slots of one pool on one stage: the lowest free one is given out."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[int] = []
        self._held: dict[tuple[str, tuple], int] = {}

    def take(self, what: str, where: tuple) -> int:
        if not self._free:
            self._free.append(self.size)
            self.size += 1
        assert (what, where) not in self._held, f"{what} {where} is made twice"
        slot = min(self._free)
        self._free.remove(slot)
        self._held[what, where] = slot
        return slot

    def held(self, what: str, where: tuple) -> int:
        return self._held[what, where]

    def held_now(self) -> list[tuple[str, tuple]]:
        """What has been put down and not yet read for the last time."""
        return list(self._held)

    def free(self, what: str, where: tuple) -> int:
        slot = self._held.pop((what, where))
        self._free.append(slot)
        return slot

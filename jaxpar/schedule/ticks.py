"""The table of ticks that the executor (`parallel.pipeline`) follows without knowing any schedule.

All stages go through the ticks together; in each, a stage runs at most one action, then messages pass between neighbours. Only
the pairs that have something to say take part in a tick's exchange, so a stage waits for a neighbour only when it hears from it,
or is heard. (Exchanging on all pairs in every tick, 1F1B with p microbatches in flight would take 4 units for 3 of work: each
tick would last as long as the longer of F and B. Packing F and B into one tick instead would need 2p - 1 in flight.)

Arrays wait in numbered slots, given out by lifetime:
- `messages`: an activation from the end of the tick in which it was sent to the F that reads it (with `keep_inputs`, to the B or I
  that computes its stage again), a cotangent to its B or I. What a stage needs from itself (the output of the last virtual stage,
  which its B takes to the head; the turn of a V) waits there too;
- `stash`: what F keeps for B, or for I and W;
- `deferred`: what I adds for W; `head`: the same of the output head, on the last virtual stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxpar.schedule.actions import KINDS, Action, Kind, Shape
from jaxpar.schedule.simulate import Costs

Pairs = tuple[tuple[int, int], ...]
Pool = Literal["messages", "stash", "deferred", "head"]
POOLS: tuple[Pool, ...] = ("messages", "stash", "deferred", "head")
Array = np.ndarray
NONE = -1
COLUMNS = (
    *("kind", "microbatch", "chunk", "reads", "inputs", "stash", "deferred", "head"),
    *("keeps", "sends_up", "sends_down", "from_below", "from_above"),
)


@dataclass(frozen=True)
class TickTable:
    """Arrays [ticks, stages] of int32, NONE where there is nothing.

    kind: index into KINDS. reads: the message slot of an action's input; NONE for F of the first virtual stage, which takes
    tokens. inputs: for B and I, the message slot that still holds F's input (`keep_inputs` only). keeps: where a stage puts its own
    output, if it needs it later. sends_up, sends_down: the slot of a message that has waited; NONE: if something goes there, it is
    the tick's own output. from_below, from_above: where what arrives from stage s - 1, s + 1 is put. pattern [ticks]: which of
    `patterns`, (pairs that send up, pairs that send down), exchange at the end of the tick.
    """

    shape: Shape
    kind: Array
    microbatch: Array
    chunk: Array
    reads: Array
    inputs: Array
    stash: Array
    deferred: Array
    head: Array
    keeps: Array
    sends_up: Array
    sends_down: Array
    from_below: Array
    from_above: Array
    pattern: Array
    patterns: tuple[tuple[Pairs, Pairs], ...]
    num_slots: dict[Pool, int]

    @property
    def num_ticks(self) -> int:
        return self.kind.shape[0]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of actions that occur."""
        return tuple(kind for i, kind in enumerate(KINDS) if (self.kind == i).any())

    def actions(self, tick: int) -> Iterator[tuple[int, Action]]:
        """(stage, action) of everything that runs in a tick."""
        for stage in range(self.shape.num_stages):
            if (kind := self.kind[tick, stage]) != NONE:
                yield stage, Action(KINDS[kind], int(self.microbatch[tick, stage]), int(self.chunk[tick, stage]))


def simulate_ticks(table: TickTable, costs: Costs | None = None) -> float:
    """Makespan of the table as it is executed: at the end of a tick, stages that exchange wait for one another.

    costs: as for `simulate`, of a whole stage; FB is not used, for a tick runs one action.
    """
    costs = costs or Costs()
    clock = np.zeros(table.shape.num_stages)
    for tick in range(table.num_ticks):
        for stage, action in table.actions(tick):
            clock[stage] += costs.of((action,)) / table.shape.num_chunks
        arrived = clock.copy()
        for pairs in table.patterns[table.pattern[tick]]:
            for source, target in pairs:
                meet = max(clock[source], clock[target]) + costs.comm
                arrived[source], arrived[target] = max(arrived[source], meet), max(arrived[target], meet)
        clock = arrived
    return float(clock.max())

"""The table of ticks: it computes what the schedule says, holds no more than it, and takes no longer."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.schedule.actions import Action, Schedule, Shape
from jaxpar.schedule.evaluation import forward_schedule
from jaxpar.schedule.library import NAMES, build_schedule, least_microbatches
from jaxpar.schedule.lower import lower
from jaxpar.schedule.measure import peak_in_flight
from jaxpar.schedule.simulate import simulate
from jaxpar.schedule.ticks import COLUMNS, NONE, TickTable, simulate_ticks

SIZES = ((4, 8), (8, 16), (8, 32))
# How far above the ideal at most, in per cent, as the README says.
ABOVE = {"gpipe": 0, "1f1b": 0, "interleaved:2": 3.8, "interleaved:4": 3.8, "zb_h1": 0, "zb_h2": 0, "zb_v": 0, "dualpipe_v": 6.8}


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ABOVE)
def test_makespan_in_ticks(name: str, stages: int, microbatches: int) -> None:
    """F = I = W = 1, messages take no time. All makespans here are whole quarters: exact in floating point."""
    schedule = build_schedule(name, stages, microbatches)
    ideal, found = simulate(schedule).makespan, simulate_ticks(lower(schedule))
    assert ideal <= found <= (1 + ABOVE[name] / 100) * ideal


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ABOVE)
def test_stash_slots_are_the_peak_of_the_schedule(name: str, stages: int, microbatches: int) -> None:
    schedule = build_schedule(name, stages, microbatches)
    assert lower(schedule).num_slots["stash"] == max(map(peak_in_flight, schedule.orders))


def test_one_f_one_b_holds_as_much_however_many_microbatches() -> None:
    for keep_inputs in (False, True):
        few, many = (lower(build_schedule("1f1b", 4, m), keep_inputs=keep_inputs).num_slots for m in (8, 64))
        assert few == many
    assert few == {"messages": 5, "stash": 0, "deferred": 0, "head": 0}


Value = tuple[str, int, int]  # what ("x" enters a virtual stage, "dx" its gradient, ...), microbatch, virtual stage


class Replay:
    """Runs a table on names instead of arrays: every read must find exactly what the action needs."""

    def __init__(self, table: TickTable, *, keep_inputs: bool) -> None:
        self.table, self.shape, self.keep_inputs = table, table.shape, keep_inputs
        self.slots: list[dict[str, dict[int, Value]]] = [{pool: {} for pool in table.num_slots} for _ in range(self.shape.num_stages)]
        self.ran: Counter[tuple[str, int, int]] = Counter()

    def run(self) -> None:
        for tick in range(self.table.num_ticks):
            made = {stage: self.act(tick, stage, action) for stage, action in self.table.actions(tick)}
            self.exchange(tick, made)

    def at(self, column: str, tick: int, stage: int) -> int:
        return int(getattr(self.table, column)[tick, stage])

    def read(self, pool: str, column: str, tick: int, stage: int) -> Value | None:
        slot = self.at(column, tick, stage)
        return None if slot == NONE else self.slots[stage][pool][slot]

    def write(self, pool: str, column: str, tick: int, stage: int, value: Value) -> None:
        slot = self.at(column, tick, stage)
        assert slot < self.table.num_slots[pool]  # type: ignore[index]
        self.slots[stage][pool][slot] = value

    def act(self, tick: int, stage: int, action: Action) -> Value | None:
        virtual, m = self.shape.virtual(stage, action.chunk), action.microbatch
        first, last = virtual == 0, virtual == self.shape.num_virtual - 1
        self.ran[action.kind, m, virtual] += 1
        if action.kind == "F":
            assert self.read("messages", "reads", tick, stage) == (None if first else ("x", m, virtual))
            if not self.keep_inputs:
                self.write("stash", "stash", tick, stage, ("residuals", m, virtual))
            return ("y", m, virtual) if last else ("x", m, virtual + 1)
        if not self.keep_inputs:
            assert self.read("stash", "stash", tick, stage) == ("residuals", m, virtual)
        if action.kind == "W":
            assert self.read("deferred", "deferred", tick, stage) == ("operands", m, virtual)
            assert self.read("head", "head", tick, stage) == (("operands", m, virtual) if last else None)
            return None
        assert self.read("messages", "reads", tick, stage) == (("y", m, virtual) if last else ("dx", m, virtual))
        if self.keep_inputs:
            assert self.read("messages", "inputs", tick, stage) == (None if first else ("x", m, virtual))
        if action.kind == "I":
            self.write("deferred", "deferred", tick, stage, ("operands", m, virtual))
            if last:
                self.write("head", "head", tick, stage, ("operands", m, virtual))
        return None if first else ("dx", m, virtual - 1)

    def exchange(self, tick: int, made: dict[int, Value | None]) -> None:
        """All sends read before anything is put down, as in the executor."""
        arrived: list[tuple[str, int, Value | None]] = []
        pairs_up, pairs_down = self.table.patterns[self.table.pattern[tick]]
        for pairs, column, into in ((pairs_up, "sends_up", "from_below"), (pairs_down, "sends_down", "from_above")):
            assert len({s for s, _ in pairs}) == len({t for _, t in pairs}) == len(pairs)
            for source, target in pairs:
                assert (source - target) % self.shape.num_stages in (1, self.shape.num_stages - 1)
                arrived.append((into, target, self.read("messages", column, tick, source) or made.get(source)))
        told = {(into, target) for into, target, _ in arrived}
        for stage in range(self.shape.num_stages):
            for into in ("from_below", "from_above"):
                assert self.at(into, tick, stage) == NONE or (into, stage) in told
            if self.at("keeps", tick, stage) != NONE:
                arrived.append(("keeps", stage, made[stage]))
        for into, stage, value in arrived:
            if self.at(into, tick, stage) != NONE:  # more pairs may exchange than have something to say
                assert value is not None
                self.write("messages", into, tick, stage, value)


def replay(schedule: Schedule, *, keep_inputs: bool = False) -> Replay:
    table = lower(schedule, keep_inputs=keep_inputs)
    for column in COLUMNS:
        assert getattr(table, column).shape == (table.num_ticks, schedule.shape.num_stages)
    played = Replay(table, keep_inputs=keep_inputs)
    played.run()
    shape = schedule.shape
    wanted = Counter((a.kind, a.microbatch, shape.virtual(s, a.chunk)) for s, order in enumerate(schedule.orders) for a in order)
    assert played.ran == wanted
    for stage, order in enumerate(schedule.orders):
        ran = [action for tick in range(table.num_ticks) for s, action in table.actions(tick) if s == stage]
        assert tuple(ran) == order
    return played


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 14), st.integers(1, 4), st.booleans())
def test_every_read_finds_what_was_written_for_it(name: str, stages: int, microbatches: int, chunks: int, keep_inputs: bool) -> None:
    microbatches += least_microbatches(name, stages) - 1
    replay(build_schedule(name, stages, microbatches, chunks if name == "interleaved" else None), keep_inputs=keep_inputs)


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_forward_passes_of_an_evaluation(placement: str) -> None:
    shape = Shape(4, 6, 2, placement)  # type: ignore[arg-type]
    played = replay(forward_schedule(shape))
    assert set(played.ran) == {("F", m, v) for m in range(6) for v in range(8)}
    assert lower(forward_schedule(replace(shape, num_microbatches=1))).num_ticks == 8

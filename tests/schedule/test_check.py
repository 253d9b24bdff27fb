"""The checker accepts every schedule that is built, and refuses every one that is damaged.

What depends on what is written down here once more, by virtual stage.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.schedule.actions import Action, Schedule, Shape
from jaxpar.schedule.check import check_schedule
from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.library import build_schedule
from jaxpar.schedule.simulate import Costs, simulate
from tests.schedule.built import schedules

Orders = list[list[Action]]
Event = tuple[str, int, int]  # kind, microbatch, virtual stage


def event(schedule: Schedule, stage: int, action: Action) -> Event:
    return action.kind, action.microbatch, schedule.shape.virtual(stage, action.chunk)


def dependencies(schedule: Schedule) -> dict[Event, list[Event]]:
    """F: F of the virtual stage before. B or I: its own F, and B or I of the virtual stage after. W: its own I."""
    last = schedule.shape.num_virtual - 1
    events = {event(schedule, stage, action) for stage, order in enumerate(schedule.orders) for action in order}

    def direct(kind: str, m: int, v: int) -> list[Event]:
        if kind == "F":
            return [("F", m, v - 1)] if v > 0 else []
        if kind == "W":
            return [("I", m, v)]
        after = [(k, m, v + 1) for k in "BI" if (k, m, v + 1) in events]
        assert len(after) == (v < last)
        return [("F", m, v), *after]

    return {one: direct(*one) for one in events}


def with_orders(schedule: Schedule, orders: Orders) -> Schedule:
    return replace(schedule, orders=tuple(map(tuple, orders)))


@settings(deadline=None, max_examples=150)
@given(schedules())
def test_what_is_built_is_right(schedule: Schedule) -> None:
    assert check_schedule(schedule) == []


@settings(deadline=None, max_examples=60)
@given(schedules(most_stages=5, most_microbatches=10), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 2))
def test_time_keeps_the_order(schedule: Schedule, forward: float, inputs: float, weights: float, comm: float) -> None:
    """No stage does two things at once, nothing starts before what it needs, and a stage works as long as its actions take."""
    found = simulate(schedule, Costs(F=forward, I=inputs, W=weights, comm=comm))
    needed, shape = dependencies(schedule), schedule.shape
    ends = {event(schedule, stage, span.action): span.end for stage, spans in enumerate(found.spans) for span in spans}
    for stage, spans in enumerate(found.spans):
        assert all(before.end <= after.start for before, after in pairwise(spans))
        for span in spans:
            for before in needed[event(schedule, stage, span.action)]:
                assert ends[before] + (comm if shape.stage(before[2]) != stage else 0) <= span.start
    work = schedule.shape.num_microbatches * (forward + inputs + weights)
    assert found.work == pytest.approx((work,) * schedule.shape.num_stages)


@settings(deadline=None, max_examples=150)
@given(schedules(most_stages=4, most_microbatches=6), st.data())
def test_a_damaged_schedule_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    """An action removed, run twice, moved to another stage, given another chunk, microbatch or kind."""
    orders: Orders = [list(order) for order in schedule.orders]
    stage = data.draw(st.integers(0, len(orders) - 1))
    position = data.draw(st.integers(0, len(orders[stage]) - 1))
    action = orders[stage][position]
    damage = data.draw(st.sampled_from(["remove", "repeat", "stage", "chunk", "microbatch", "kind"]))
    if damage == "repeat":
        orders[stage].insert(data.draw(st.integers(0, len(orders[stage]))), action)
    elif damage in ("remove", "stage"):
        del orders[stage][position]
    else:
        other = {
            "chunk": action._replace(chunk=action.chunk + data.draw(st.sampled_from([-1, 1]))),
            "microbatch": action._replace(microbatch=action.microbatch + data.draw(st.sampled_from([-1, 1]))),
            "kind": action._replace(kind=data.draw(st.sampled_from([kind for kind in "FBIW" if kind != action.kind]))),
        }
        orders[stage][position] = other[damage]
    if damage == "stage" and len(orders) > 1:
        target = data.draw(st.sampled_from([other for other in range(len(orders)) if other != stage]))
        orders[target].insert(data.draw(st.integers(0, len(orders[target]))), action)
    assert check_schedule(with_orders(schedule, orders))


def ancestors(schedule: Schedule) -> dict[Event, set[Event]]:
    """All that must be done before each action, on any stage, by what it needs and not by the order of its stage."""
    needed = dependencies(schedule)
    found: dict[Event, set[Event]] = {}
    while len(found) < len(needed):
        for one, direct in needed.items():
            if one not in found and all(before in found for before in direct):
                found[one] = set(direct).union(*(found[before] for before in direct))
    return found


@settings(deadline=None, max_examples=150)
@given(schedules(most_stages=4, most_microbatches=6), st.data())
def test_a_swap_across_a_dependency_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    """Two actions of a stage of which the later needs the earlier, directly or by way of other stages."""
    before = ancestors(schedule)
    stage = data.draw(st.integers(0, schedule.shape.num_stages - 1))
    order = list(schedule.orders[stage])
    events = [event(schedule, stage, action) for action in order]
    pairs = [(i, j) for j in range(len(order)) for i in range(j) if events[i] in before[events[j]]]
    i, j = data.draw(st.sampled_from(pairs))
    order[i], order[j] = order[j], order[i]
    damaged = replace(schedule, orders=(*schedule.orders[:stage], tuple(order), *schedule.orders[stage + 1 :]))
    assert check_schedule(damaged)
    with pytest.raises(ScheduleError):
        simulate(damaged)


def test_a_deadlock_names_its_cycle() -> None:
    """Stage 0 wants the gradient of microbatch 0 before it sends microbatch 1; stage 1 wants microbatch 1 first."""
    orders = ((Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)), tuple(Action(k, i) for k in ("F", "B") for i in (1, 0)))
    (problem,) = check_schedule(Schedule("own", Shape(2, 2), orders))
    assert problem == "stage 0: deadlock: stage 0 at B0 waits for B0 of stage 1; stage 1 at F1 waits for F1 of stage 0"


def test_a_deadlock_of_a_split_schedule_names_actions_that_it_has() -> None:
    first = (Action("F", 0), Action("I", 0), Action("W", 0), Action("F", 1), Action("B", 1))
    second = (Action("F", 1), Action("F", 0), Action("I", 0), Action("W", 0), Action("B", 1))
    (problem,) = check_schedule(Schedule("own", Shape(2, 2), (first, second)))
    assert problem == "stage 0: deadlock: stage 0 at I0 waits for I0 of stage 1; stage 1 at F1 waits for F1 of stage 0"


def test_all_violations_at_once() -> None:
    orders: Orders = [list(order) for order in build_schedule("zb_h1", 2, 4).orders]
    orders[0].remove(Action("W", 2))
    orders[0].remove(Action("F", 3))
    orders[1].insert(0, Action("I", 0))
    orders[1][-1] = Action("B", 1)
    found = check_schedule(Schedule("own", Shape(2, 4), tuple(map(tuple, orders))))
    assert found == [
        "stage 0: chunk 0: I without W for microbatch 2",
        "stage 0: chunk 0: no F for microbatch 3",
        "stage 1: I0 comes again; once is right",
        "stage 1: chunk 0: B as well as I and W (B is both I and W) for microbatch 1",
        "stage 1: chunk 0: I without W for microbatch 3",
        "stage 1: I0 comes before F0, which it needs",
    ]


def test_actions_that_do_not_exist() -> None:
    orders = ((Action("F", 1), Action("B", 0, 1)),)
    assert check_schedule(Schedule("own", Shape(2, 1), orders)) == [
        "1 orders for 2 stages: each stage needs one",
        "stage 0: F1 is of microbatch 1; they run from 0 to 0",
        "stage 0: B0.1 is of chunk 1; a stage holds chunks 0 to 0",
    ]


# (name, stages, microbatches, chunks) -> every line
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("1f1c", 4, 8, None), ["'1f1c' is no schedule; did you mean 1f1b?"]),
        (("zb_h1", 0, 0, 2), ["0 stages: 1 or more", "0 microbatches: 1 or more", "2 chunks a stage: zb_h1 has 1; 1 would work"]),
        (("zb_v", 4, 8, 3), ["3 chunks a stage: zb_v has 2; 2 would work"]),
        (("interleaved:2", 4, 8, 4), ["interleaved:2 says 2 chunks a stage, and 4 are asked for; write interleaved, or interleaved:4"]),
        (("interleaved:x", 4, 8, None), ["interleaved:x: chunks a stage are a number of 1 or more; interleaved:2 would work"]),
        (("zb_h2:2", 4, 8, None), ["zb_h2 has a fixed number of chunks a stage, 1; write zb_h2"]),
        (
            ("dualpipe_v", 4, 7, None),
            ["7 microbatches on 4 stages: dualpipe_v needs 8 or more; 8 microbatches would work, or 3 stages, or zb_v"],
        ),
        (("gone.csv", 4, 7, None), ["gone.csv: cannot be read: No such file or directory"]),
    ],
)
def test_bad_names_and_sizes(asked: tuple[str, int, int, int | None], said: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        build_schedule(*asked)
    assert len(error.value.problems) == len(said)
    for line, words in zip(error.value.problems, said, strict=True):
        assert words in line

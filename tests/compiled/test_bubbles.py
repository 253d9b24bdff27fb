"""Bubbles run nothing in the compiled program: XLA must not take work out of the loops that stages run or skip.

It did: what a loop of at most one trip computes from things it does not change was moved before it, so that every stage computed it in
every tick (chunks of one layer: all products of F, and of W).
"""

import re

import pytest

from tests.compiled.test_collectives import trace
from tests.equivalence.harness import FLOAT32, config, parts_of
from tests.programs import hlo_computations, hlo_dots


@pytest.mark.parametrize("stash", ["residuals", "inputs"])
@pytest.mark.parametrize(("schedule", "num_layers"), [("1f1b", 4), ("interleaved", 8), ("zb_h1", 4), ("zb_v", 8), ("dualpipe_v", 11)])
def test_no_product_stands_in_a_tick_itself(schedule: str, num_layers: int, stash: str) -> None:
    change = {
        "mesh": {"pipe": 4},
        "num_microbatches": 8,
        "model": {"num_layers": num_layers},
        "pipeline": {"schedule": schedule, "stash": stash},
    }
    computations = hlo_computations(trace(parts_of(config(FLOAT32, change))).lower().compile())
    bodies = {body for lines in computations.values() for line in lines for body in re.findall(r" while\(.*body=(%[\w.\-]+)", line)}

    def loops(name: str) -> list[str]:
        return [body for line in computations[name] for body in re.findall(r" while\(.*body=(%[\w.\-]+)", line)]

    # The body of a tick stands in no other loop, exchanges messages in the branches of its patterns, and has a loop for each kind of action.
    outer = bodies.difference(*map(loops, bodies))
    ticks = [name for name in outer if any(" conditional(" in line for line in computations[name]) and len(loops(name)) >= 2]
    assert len(ticks) == 1
    assert hlo_dots(computations, ticks[0]) == 0
    products = sum(hlo_dots(computations, name) for name in bodies - set(ticks))
    assert products >= 7 * 3  # seven matrices a layer, each forward, for the input and for the weights

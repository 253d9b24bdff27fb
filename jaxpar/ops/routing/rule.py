"""What a router says: for every token its experts and their gates. One signature for all routers.

A router is three functions of float32 arrays (float64 in a float64 run), so that a choice that needs a whole group can be made from
the group's scores while gates and gradients stay with the device that holds a token:

- `scores(logits)`: differentiable, any leading dims: what gates are made of;
- `choose(scores, ...)`: the experts of each token of whole groups [g, T, k], -1 where there is none; no gradient flows;
- `gates(logits, scores, expert)`: differentiable, any leading dims: the weight of each chosen expert, 0 where there is none.

Ties go to the lowest index, of experts as of tokens (`lax.top_k`, stable sorts): the same under any layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.core.typing import Array


@dataclass(frozen=True)
class Seen:
    """What a choice may look at. Arrays are [g, T] or [g, T, n]: groups of tokens; a router that needs no group takes any g.

    valid: False for padding, which is given no expert. tokens: their ids. uniform: random numbers in [0, 1), one a token; None in
    evaluation. bias: added to scores for the choice only. capacity: tokens an expert takes of a group.
    """

    valid_gT: Array
    tokens_gT: Array
    uniform_gT: Array | None
    bias_E: Array | None
    training: bool
    capacity: int


@dataclass(frozen=True)
class RoutingRule:
    """One way to route; `probabilities` sum to 1 over experts and are what balance losses see."""

    scores: Callable[[Array], Array]  # logits [..., E] -> [..., E]
    choose: Callable[[Array, Seen], Array]  # (scores [g, T, E], seen) -> experts [g, T, k]
    gates: Callable[[Array, Array, Array], Array]  # (logits, scores [..., E], experts [..., k]) -> [..., k]
    probabilities: Callable[[Array], Array]  # logits [..., E] -> [..., E]

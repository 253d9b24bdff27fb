"""What a dispatcher is given: for the tokens of this device, who goes to which expert, with which gate, in which place."""

from typing import NamedTuple

from jaxpar.core.typing import Array


class Routed(NamedTuple):
    """Choices of the n tokens of this device. expert_nk: -1 for none. place_nk: among the tokens of its expert and group, below `capacity`
    (-1: dropped). group_n: which of this device's groups the token belongs to.
    """

    expert_nk: Array
    gate_nk: Array
    place_nk: Array
    group_n: Array
    num_groups: int
    capacity: int
    num_experts: int

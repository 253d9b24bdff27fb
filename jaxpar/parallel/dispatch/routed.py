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

    @property
    def most_choices(self) -> int:
        """Choices that can have a place: no token goes to an expert twice, and no expert takes more than `capacity` of a group."""
        tokens = self.expert_nk.shape[0] // self.num_groups  # of a group, on this device
        return min(self.expert_nk.size, self.num_groups * self.num_experts * min(self.capacity, tokens))

    def balanced_choices(self, shards: int) -> int:
        """Of them, those of one device if the `shards` that share the groups had equally many."""
        return min(self.most_choices, -(-self.num_groups * self.num_experts * self.capacity // shards))

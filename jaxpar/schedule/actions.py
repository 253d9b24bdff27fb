"""What a pipeline schedule is: for each stage, the order in which it runs its actions. Pure data; no JAX.

A model's layers are cut into `num_stages * num_chunks` virtual stages, numbered in the order in which a microbatch passes them.
A stage (a device along the mesh axis `pipe`) holds `num_chunks` of them; its placement says which. An action is one of

F  forward of one microbatch through one chunk
B  full backward: gradient of the input, then of the weights
I  gradient of the input only          (zero-bubble schedules: Qi et al., arXiv 2401.10241, split B into I and W)
W  gradient of the weights, any time after the I of the same microbatch and chunk
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Placement = Literal["loop", "v"]


class Action(NamedTuple):
    """One action of a stage; prints as `F3` or, in a chunk after the first, `F3.1`."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Shape:
    """The sizes of a schedule, and where each virtual stage lives.

    loop: virtual stage s of chunk c on stage s: 0 1 2 3 | 0 1 2 3. v: every second chunk runs back: 0 1 2 3 | 3 2 1 0.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    placement: Placement = "loop"

    @property
    def num_virtual(self) -> int:
        return self.num_stages * self.num_chunks

    def virtual(self, stage: int, chunk: int) -> int:
        """Number of the virtual stage that is chunk `chunk` of `stage`."""
        return chunk * self.num_stages + (self.num_stages - 1 - stage if self.runs_back(chunk) else stage)

    def stage(self, virtual: int) -> int:
        """The stage that holds a virtual stage."""
        chunk, place = divmod(virtual, self.num_stages)
        return self.num_stages - 1 - place if self.runs_back(chunk) else place

    def chunk(self, virtual: int) -> int:
        """Which chunk of its stage a virtual stage is."""
        return virtual // self.num_stages

    def runs_back(self, chunk: int) -> bool:
        """True where the chunk's virtual stages are numbered from the last stage to the first."""
        return self.placement == "v" and chunk % 2 == 1


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every stage."""

    name: str
    shape: Shape
    orders: tuple[tuple[Action, ...], ...]  # one a stage

    @property
    def splits_backward(self) -> bool:
        """True where some backward passes are split into I and W."""
        return any(action.kind in "IW" for order in self.orders for action in order)

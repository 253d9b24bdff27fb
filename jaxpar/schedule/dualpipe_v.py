"""DualPipeV (DeepSeek, github.com/deepseek-ai/DualPipe; DualPipe: arXiv 2412.19437, section 3.2.1): forwards beside backwards.

DualPipe feeds microbatches from both ends of the pipeline at once and keeps two copies of the parameters for it; on the V placement
half the devices do the same with one copy. In the main part a stage always has a forward of one chunk next to a backward of the
other, whose communication can hide behind each other's work; here they are neighbours in the order. W is split off only
where a bubble can take it, at the start and at the end.
Idle (p - 1)(F&B + B - 3W) on p stages, F&B the time of such a pair, at 2p + 1 chunks in flight.
"""

from collections import deque

from jaxpar.schedule.actions import Action, Kind, Schedule, Shape


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """The eight steps of the published code."""
    assert num_microbatches >= min_microbatches(num_stages)  # the library refuses fewer, with a message
    orders = tuple(_Stage().run(num_stages, stage, num_microbatches) for stage in range(num_stages))
    return Schedule("dualpipe_v", Shape(num_stages, num_microbatches, 2, "v"), orders)


def min_microbatches(num_stages: int) -> int:
    """The forwards that fill the V before its main part."""
    return 2 * num_stages


class _Stage:
    """The order of one stage while it grows: numbers microbatches as they come, remembers which W it owes."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.seen: dict[tuple[Kind, int], int] = {}
        self.owed: deque[Action] = deque()

    def add(self, kind: Kind, chunk: int) -> None:
        counted: Kind = "B" if kind == "I" else kind
        number = self.seen[counted, chunk] = self.seen.get((counted, chunk), -1) + 1
        self.order.append(Action(kind, number, chunk))
        if kind == "I":
            self.owed.append(Action("W", number, chunk))

    def add_owed(self) -> None:
        self.order.append(self.owed.popleft())

    def run(self, num_stages: int, stage: int, num_microbatches: int) -> tuple[Action, ...]:
        """Step numbers as in the published code."""
        after = num_stages - stage - 1
        for _ in range(2 * after):  # 1
            self.add("F", 0)
        for _ in range(stage + 1):  # 2
            self.add("F", 0)
            self.add("F", 1)
        for _ in range(after):  # 3
            self.add("I", 1)
            self.add_owed()
            self.add("F", 1)
        for _ in range(num_microbatches - 2 * num_stages + stage + 1):  # 4: the main part, two pairs a turn
            self.add("F", 0)
            self.add("B", 1)
            self.add("F", 1)
            self.add("B", 0)
        for _ in range(after):  # 5
            self.add("B", 1)
            self.add("F", 1)
            self.add("B", 0)
        for i in range(2 * (stage + 1)):  # 6: the second half splits
            self.add("I" if i >= stage + 1 else "B", 1 - i % 2)
        for _ in range(after):  # 7
            self.add_owed()
            self.add("I", 0)
        while self.owed:  # 8
            self.add_owed()
        return tuple(self.order)

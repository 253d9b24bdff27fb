"""A schedule that cannot be built or read."""

from collections.abc import Sequence


class ScheduleError(ValueError):
    """What the user can mend, all of it at once; problems: one line each."""

    def __init__(self, problems: Sequence[str], source: str) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))

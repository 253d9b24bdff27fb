"""A schedule that cannot be built or read."""

from collections.abc import Sequence

SHOWN = 20  # lines of a message; a damaged schedule of 64 microbatches easily breaks 64 rules


class ScheduleError(ValueError):
    """What the user can mend, all of it at once; problems: one line each."""

    def __init__(self, problems: Sequence[str], source: str) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        more = [f"  and {len(self.problems) - SHOWN} more"] if len(self.problems) > SHOWN else []
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems[:SHOWN]), *more]))

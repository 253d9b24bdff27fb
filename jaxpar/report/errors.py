"""A run that cannot be reported on."""

from collections.abc import Sequence

SHOWN = 10  # lines of a message; a damaged file of 10,000 rows easily breaks a rule in each


class ReportError(ValueError):
    """What the user can mend, all of it at once; problems: one line each."""

    def __init__(self, problems: Sequence[str], source: str) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        more = [f"  and {len(self.problems) - SHOWN} more"] if len(self.problems) > SHOWN else []
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems[:SHOWN]), *more]))

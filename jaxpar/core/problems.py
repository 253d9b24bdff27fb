"""An error that names everything the user can mend, all of it at once."""

from collections.abc import Sequence


class ProblemsError(ValueError):
    """problems: one line each. source: what they are about. `shown`: lines of a message, for one cause easily breaks a rule many times."""

    shown = 10

    def __init__(self, problems: Sequence[str], source: str) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        more = [f"  and {len(self.problems) - self.shown} more"] if len(self.problems) > self.shown else []
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems[: self.shown]), *more]))

"""A schedule that cannot be built or read."""

from jaxpar.core.problems import ProblemsError

SHOWN = 20  # lines of a message; a damaged schedule of 64 microbatches easily breaks 64 rules


class ScheduleError(ProblemsError):
    """What the user can mend."""

    shown = SHOWN

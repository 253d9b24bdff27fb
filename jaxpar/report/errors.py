"""A run that cannot be reported on."""

from jaxpar.core.problems import ProblemsError


class ReportError(ProblemsError):
    """What the user can mend; a damaged file of 10,000 rows easily breaks a rule in each."""

"""What ends a run that is not the user's input."""


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number, and the policy says stop. The command exits 3."""


class StepChangedError(RuntimeError):
    """The compiled train step was called with other types: a second compilation is never made in silence."""

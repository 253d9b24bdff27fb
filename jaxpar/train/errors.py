"""What ends a run that is not the user's input."""


class RunStoppedError(RuntimeError):
    """What a run found in its own numbers and must not go on with. The command exits 3."""


class NonFiniteError(RunStoppedError):
    """A loss or gradient that is not a number, and the policy says stop."""


class ExpertsError(RunStoppedError):
    """More tokens dropped than the config allows. lossy: a full buffer cut off some, so the loss depends on the layout."""

    def __init__(self, message: str, *, lossy: bool) -> None:
        super().__init__(message)
        self.lossy = lossy


class StepChangedError(RuntimeError):
    """The compiled train step was called with other types: a second compilation is never made in silence."""

"""The one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used: what, where, why, and what to do."""

"""What is wrong with the user's data."""


class DataError(ValueError):
    """A file, a token or a setting that the user can mend."""

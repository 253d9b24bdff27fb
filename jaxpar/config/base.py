"""What every config section is: frozen, strict about unknown keys, inert."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config; cross-checks between sections live in `checks.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

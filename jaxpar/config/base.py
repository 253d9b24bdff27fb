"""What every config section is: frozen, strict about unknown keys, inert."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the config; cross-checks between sections live in `checks.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, no, on, off as booleans, and Python counts True as 1: `mesh.data: yes` must not mean 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("bool_as_value", "true, false, yes, no, on and off are booleans; put quotes around a word")
        return value

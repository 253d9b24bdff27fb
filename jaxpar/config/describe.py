"""What each key means, for editors: read from the comments beside the fields, so that it is written once."""

import inspect
import re
from typing import Any

from jaxpar.config.base import Section

_FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")
_COMMENT = re.compile(r"^    # (.*)$")


def descriptions(section: type[Section]) -> dict[str, str]:
    """Field -> the comment on its line, or on the lines right above it; fields without one are left out."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        if comment := _COMMENT.match(line):
            above.append(comment[1])
        elif (field := _FIELD.match(line)) and field[1] in section.model_fields:
            if text := field[2] or " ".join(above):
                found[field[1]] = text
            above = []
        else:
            above = []
    return found


def describe(schema: dict[str, Any], root: type[Section]) -> None:
    """Write the descriptions of all sections into the JSON schema that pydantic made of `root`."""
    sections = [root, *(section for section in all_sections(Section) if section.__name__ in schema["$defs"])]
    for section in sections:
        part = schema if section is root else schema["$defs"][section.__name__]
        for name, text in descriptions(section).items():
            part["properties"][name]["description"] = text


def all_sections(base: type[Section]) -> list[type[Section]]:
    """Every class that derives from `base`, however far."""
    return [found for section in base.__subclasses__() for found in (section, *all_sections(section))]

"""YAML as people mean it: `1e-4` is a number, `017` and a key written twice are errors, what is written loads back equal.

PyYAML follows YAML 1.1, where `1e-4` is text, `017` is 15 and `1:30` is 90.
"""

import re
from typing import Any

import yaml

from jaxpar.config.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_EXPONENT = r"[eE][-+]?[0-9]+"
_FLOAT = re.compile(
    rf"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:{_EXPONENT})?|[0-9][0-9_]*{_EXPONENT}|\.[0-9][0-9_]*(?:{_EXPONENT})?|\.(?:inf|nan))$"
)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)$")
_OCTAL = re.compile(r"[-+]?0[0-9_]+$")  # 15 in YAML 1.1, 17 in YAML 1.2
_PLAIN_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*$")
_RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class _Loader(yaml.SafeLoader):
    """SafeLoader with our numbers and without repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is not text; put quotes around it", key.start_mark)
            if key.value in seen and not key.tag.endswith(":merge"):
                text = f"key {key.value!r} is written twice, on lines {seen[key.value]} and {line}; keep one"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen[key.value] = line
        return super().construct_mapping(node, deep)


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(node.value).replace("_", "")
    if _OCTAL.match(str(node.value)):
        digits = text.lstrip("+-0") or "0"
        hint = f"write {digits}, or '{node.value}' in quotes for text"
        raise yaml.constructor.ConstructorError(None, None, f"{node.value} could be octal: {hint}", node.start_mark)
    return int(text, 0)


def _float(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(node.value).replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.removeprefix(_TAG) not in ("int", "float", "timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "int", _OCTAL, list("-+0"))
_Loader.add_constructor(_TAG + "int", _integer)
_Loader.add_constructor(_TAG + "float", _float)


def parse(text: str, source: str) -> Any:
    """The value of a YAML text; raises ConfigError with the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError([f"{where}{error.problem or error.context}"], source) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"not YAML: {' '.join(str(error).split())}"], source) from None


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever is not a plain word: PyYAML would write the text 1e-4 bare."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN_WORD.match(text) is not None and text.lower() not in _RESERVED and not text.startswith(".")
    # A literal "${" must not be read as an interpolation: OmegaConf wants it, and backslashes before it, escaped.
    escaped = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    return dumper.represent_scalar(_TAG + "str", escaped, style=None if plain else '"')


_Dumper.add_representer(str, _write_text)


def dump(tree: dict[str, Any]) -> str:
    """Block-style YAML in the order of `tree`."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)

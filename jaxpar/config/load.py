"""A YAML file, the files that it includes and `key=value` overrides -> a checked `RunConfig`; and back to YAML.

Later wins: the includes in their order, then the file, then the overrides.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from jaxpar.config import yaml_text
from jaxpar.config.checks import find_problems
from jaxpar.config.describe import describe
from jaxpar.config.errors import ConfigError, dotted, field_at, placeholder, translate
from jaxpar.config.run import RunConfig

Tree = dict[str, Any]
Loc = tuple[str | int, ...]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of `path` after includes and overrides, with everything checked that needs no device.

    overrides: `mesh.data=8` and the like; the value is YAML. Raises ConfigError that lists every violation.
    """
    path = Path(path)
    tree, problems = _apply_overrides(read(path), overrides)
    tree.setdefault("name", path.stem)
    if isinstance(run := tree.setdefault("run", {}), dict) and run.get("dir") is None:
        run["dir"] = f"runs/{tree['name']}"
    return validate(_resolve(tree, str(path)), str(path), problems)


def validate(tree: Tree, source: str = "config", problems: Sequence[str] = ()) -> RunConfig:
    """A plain tree -> RunConfig; raises ConfigError with `problems`, the violations of fields and those between sections together."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = translate(RunConfig, tree, error)
        raise ConfigError([*problems, *lines.values(), *_cross_checks_of_the_rest(tree, list(lines))], source) from None
    problems = [*problems, *(problem.text for problem in find_problems(config, None))]
    if problems:
        raise ConfigError(problems, source)
    return config


def to_yaml(config: RunConfig) -> str:
    """The whole config, nothing left to defaults; `load_config` of this text gives an equal config."""
    return yaml_text.dump(config.model_dump(mode="json"))


def json_schema() -> Tree:
    """JSON schema of a config file, for editors. Nothing is required: a file may be a part that others include."""
    schema = RunConfig.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
    describe(schema, RunConfig)
    include = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "description": "files merged before this one"}
    schema["properties"]["include"] = include
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def read(path: Path, chain: tuple[Path, ...] = ()) -> Tree:
    """One file with its includes merged, interpolations still open."""
    source = str(path)
    if path.resolve() in chain:
        raise ConfigError([f"include: the files include each other: {' -> '.join(file.name for file in (*chain, path))}"], source)
    tree = yaml_text.parse(_read_text(path), source)
    if tree is None:
        raise ConfigError(["the file is empty; a config needs at least model:, data:, optimizer: and train:"], source)
    if not isinstance(tree, dict):
        raise ConfigError([f"the file must hold `key: value` lines, not a {type(tree).__name__}"], source)
    names = tree.pop("include", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"include: {names!r} is not a list of files; e.g. [model/tiny.yaml, mesh/one.yaml]"], source)
    merged: Tree = {}
    for name in names:
        merged = _merge(merged, read(_find_include(path, name), (*chain, path.resolve())))
    return _merge(merged, tree)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = sorted(str(file) for file in path.parent.glob("*.yaml"))[:8] if path.parent.is_dir() else []
        raise ConfigError([f"no such file; beside it: {', '.join(near) or 'no YAML files'}"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from None


def _find_include(path: Path, name: str) -> Path:
    """`name` under the file's folder or one of its parents, there also under `configs`: the nearest wins."""
    folders = [path.resolve().parent, *path.resolve().parent.parents]
    for folder in folders:
        for candidate in (folder / name, folder / "configs" / name):
            if candidate.is_file():
                return candidate
    raise ConfigError([f"include: no file {name!r} in {folders[0]} or its parents, nor under a folder `configs` there"], str(path))


def _apply_overrides(tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if key.startswith("-"):
            problems.append(f"{text}: overrides have no dashes; write {key.lstrip('-') or 'key'}={value or 'value'}")
        elif not equals or not all(key.split(".")):
            problems.append(f"{text}: not an override; write key=value, e.g. mesh.data=8")
        elif key == "include":
            problems.append(f"{text}: include belongs in a file, not in an override")
        elif not value.strip():
            problems.append(f"{text}: no value; write {key}=null for none, {key}='' for empty text")
        else:
            try:
                tree = _merge(tree, _nest(key.split("."), yaml_text.parse(value, "override")))
            except ConfigError as error:
                problems += [f"{text}: {problem.removeprefix('line 1, column 1: ')}" for problem in error.problems]
    return tree, problems


def _nest(keys: list[str], value: Any) -> Tree:
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(under: Tree, over: Tree) -> Tree:
    """`over` wins; sections merge, anything else (lists too) is replaced. Digits reach into a list: data.mixture.0.weight=2."""
    merged = dict(under)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        elif isinstance(old, list) and isinstance(value, dict) and all(k.isdigit() and int(k) < len(old) for k in value):
            new = list(old)
            for index, item in value.items():
                both = isinstance(new[int(index)], dict) and isinstance(item, dict)
                new[int(index)] = _merge(new[int(index)], item) if both else item
            merged[key] = new
        elif isinstance(old, dict) != isinstance(value, dict) and old is not None and value is not None:
            raise ConfigError([f"{key}: {value!r} cannot replace {old!r}; one is a section with keys of its own, the other is not"])
        else:
            merged[key] = value
    return merged


def _resolve(tree: Tree, source: str) -> Tree:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError([f"{error.full_key}: {text}" if error.full_key else text], source) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _cross_checks_of_the_rest(tree: Tree, broken: list[Loc]) -> list[str]:
    """Violations between sections that do not involve the broken keys, which get stand-in values."""
    repaired = copy.deepcopy(tree)
    for loc in broken:
        _repair(repaired, loc)
    try:
        config = RunConfig.model_validate(repaired)
    except ValidationError:
        return []  # the violations already listed come first
    keys = [dotted(loc) for loc in broken]
    return [p.text for p in find_problems(config, None) if not any(_touches(key, used) for key in keys for used in p.keys)]


def _touches(broken: str, used: str) -> bool:
    return used == broken or used.startswith((f"{broken}.", f"{broken}[")) or broken.startswith((f"{used}.", f"{used}["))


def _repair(tree: Any, loc: Loc) -> None:
    for part in loc[:-1]:
        tree = tree[part]
    info = field_at(RunConfig, loc)
    if isinstance(tree, dict):
        tree.pop(loc[-1], None)
        if info is not None and info.is_required():
            tree[str(loc[-1])] = placeholder(info)

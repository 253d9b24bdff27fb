"""Schedules by name: what each asks of its sizes, and which chunks it has."""

import difflib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxpar.schedule.actions import Schedule
from jaxpar.schedule.dualpipe_v import dualpipe_v, min_microbatches
from jaxpar.schedule.errors import ScheduleError
from jaxpar.schedule.from_csv import read_csv
from jaxpar.schedule.gpipe import gpipe
from jaxpar.schedule.interleaved import interleaved
from jaxpar.schedule.one_f_one_b import one_f_one_b
from jaxpar.schedule.zb_h import zb_h1, zb_h2
from jaxpar.schedule.zb_v import zb_v


class Family(NamedTuple):
    """num_chunks: the only one that works; None for any, 2 if nothing is said. min_microbatches: of a number of stages."""

    build: Callable[[int, int, int], Schedule]  # stages, microbatches, chunks
    num_chunks: int | None
    min_microbatches: Callable[[int], int] = lambda _: 1


FAMILIES: dict[str, Family] = {
    "gpipe": Family(lambda p, m, _: gpipe(p, m), 1),
    "1f1b": Family(lambda p, m, _: one_f_one_b(p, m), 1),
    "interleaved": Family(interleaved, None),
    "zb_h1": Family(lambda p, m, _: zb_h1(p, m), 1),
    "zb_h2": Family(lambda p, m, _: zb_h2(p, m), 1),
    "zb_v": Family(lambda p, m, _: zb_v(p, m), 2),
    "dualpipe_v": Family(lambda p, m, _: dualpipe_v(p, m), 2, min_microbatches),
}
NAMES = tuple(FAMILIES)


def build_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """A schedule of `NAMES`, `interleaved:V` for V chunks a stage, or a path that ends in .csv; ScheduleError with every violation."""
    if problems := schedule_problems(name, num_stages, num_microbatches, num_chunks):
        raise ScheduleError(problems, f"schedule {name}")
    if name.endswith(".csv"):
        return read_csv(name)
    family, chunks = _split(name)
    return FAMILIES[family].build(num_stages, num_microbatches, chunks or num_chunks or FAMILIES[family].num_chunks or 2)


def schedule_problems(name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> list[str]:
    """Every violation, a line each: the value, the rule, what would work; none if `build_schedule` would succeed."""
    problems = list(_size_problems(num_stages, num_microbatches, num_chunks))
    if name.endswith(".csv"):
        return problems + list(_csv_problems(name, num_stages, num_microbatches, num_chunks))
    problems += _name_problems(name, num_chunks)
    return problems or list(_microbatch_problems(name, num_stages, num_microbatches))


def _split(name: str) -> tuple[str, int | None]:
    """("interleaved", 4) of `interleaved:4`; chunks 0 if they are no number."""
    family, colon, chunks = name.partition(":")
    return family, (int(chunks) if chunks.isdecimal() else 0) if colon else None


def _size_problems(num_stages: int, num_microbatches: int, num_chunks: int | None) -> Iterator[str]:
    for what, size in (("stages", num_stages), ("microbatches", num_microbatches), ("chunks a stage", num_chunks)):
        if size is not None and size < 1:
            yield f"{size} {what}: 1 or more are needed"


def _name_problems(name: str, num_chunks: int | None) -> Iterator[str]:
    family, named = _split(name)
    if family not in FAMILIES:
        near = difflib.get_close_matches(family.lower().replace("-", "_"), NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"schedules are {', '.join(NAMES)}, or the path of a .csv file"
        yield f"{name!r} is no schedule; {hint}"
        return
    fixed = FAMILIES[family].num_chunks
    if named is not None and fixed is not None:
        yield f"{name}: {family} has a fixed number of chunks a stage, {fixed}; write {family}"
    elif named == 0:
        yield f"{name}: chunks a stage are a number of 1 or more; {family}:2 would work"
    elif named is not None and num_chunks not in (None, named):
        yield f"{name} says {named} chunks a stage, and {num_chunks} are asked for; write {family}, or {family}:{num_chunks}"
    elif fixed is not None and num_chunks is not None and num_chunks != fixed:
        works = "; interleaved takes any" if fixed == 1 else ""
        yield f"{num_chunks} chunks a stage: {name} has {fixed}; {fixed} would work{works}"


def least_microbatches(name: str, num_stages: int) -> int:
    """What a schedule needs, of names that are some; a file, which has one number only, counts as 1."""
    family, _ = _split(name)
    return FAMILIES[family].min_microbatches(num_stages) if family in FAMILIES else 1


def alternative(name: str) -> str:
    """Another schedule of as many chunks, for fewer microbatches than `name` needs."""
    same = [other for other, family in FAMILIES.items() if family.num_chunks == FAMILIES[name].num_chunks]
    return min(same, key=lambda other: least_microbatches(other, 2))


def _microbatch_problems(name: str, num_stages: int, num_microbatches: int) -> Iterator[str]:
    need = least_microbatches(name, num_stages)
    if num_microbatches < need:
        fits = [p for p in range(1, num_stages) if least_microbatches(name, p) <= num_microbatches]
        fewer = f", or {max(fits)} stages" if fits else ""
        rule = f"{name} needs {need} or more"
        works = f"{need} microbatches would work{fewer}, or {alternative(name)}"
        yield f"{num_microbatches} microbatches on {num_stages} stages: {rule}; {works}"


def _csv_problems(path: str, num_stages: int, num_microbatches: int, num_chunks: int | None) -> Iterator[str]:
    try:
        shape = read_csv(path).shape
    except ScheduleError as error:
        yield from (f"{path}: {problem}" for problem in error.problems)
        return
    asked = {"stages": num_stages, "microbatches": num_microbatches, "chunks a stage": num_chunks}
    holds = {"stages": shape.num_stages, "microbatches": shape.num_microbatches, "chunks a stage": shape.num_chunks}
    for what, size in asked.items():
        if size is not None and size >= 1 and size != holds[what]:
            yield f"{size} {what}: {path} is a schedule for {holds[what]}; {holds[what]} would work"

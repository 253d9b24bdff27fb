"""What a program does, read from its jaxpr and its compiled text: collectives, matmul FLOPs, sizes."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
}


def equations(program: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation of a jaxpr with how often it runs: a scan's body runs `length` times."""
    for eqn in program.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for param in eqn.params.values():
            for sub in param if isinstance(param, tuple | list) else (param,):
                jaxpr = getattr(sub, "jaxpr", sub)
                if hasattr(jaxpr, "eqns"):
                    yield from equations(jaxpr, inner)


class Collective(NamedTuple):
    """One kind of collective over one set of axes."""

    kind: str
    axes: tuple[str, ...]


def collectives(program: Any) -> tuple[Counter[Collective], Counter[Collective]]:
    """(arrays moved, bytes moved) by kind and axes; bytes are those of the larger side, per device and step.

    Of a ragged exchange these are the whole buffers, of which as much moves as its runs hold.
    """
    arrays: Counter[Collective] = Counter()
    moved: Counter[Collective] = Counter()
    for eqn, times in equations(program):
        kind = KINDS.get(eqn.primitive.name)
        if kind is None:
            continue
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        key = Collective(kind, axes if isinstance(axes, tuple) else (axes,))
        rows_first = kind == "ragged_all_to_all"  # then the buffer to fill, and the runs' bounds
        for before, after in zip(eqn.invars, eqn.outvars, strict=not rows_first):
            arrays[key] += times
            moved[key] += times * max(nbytes(before.aval), nbytes(after.aval))
    return arrays, moved


def nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def dot_flops(program: Any) -> int:
    """FLOPs of all matrix products of a jaxpr."""
    return flops_of(equations(program))


def flops_of(found: Iterable[tuple[Any, int]]) -> int:
    """2 a multiply-add, over the matrix products among equations."""
    total = 0
    for eqn, times in found:
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            size = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += times * 2 * math.prod(eqn.outvars[0].aval.shape) * size
    return total


HLO_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def hlo_kinds(compiled: jax.stages.Compiled) -> set[str]:
    """Kinds of collectives in the compiled program."""
    return {kind for kind in HLO_KINDS if re.search(rf" {kind}(-start)?\(", compiled.as_text() or "")}


def hlo_size(compiled: jax.stages.Compiled) -> int:
    """Instructions of the compiled program."""
    return sum(" = " in line for line in (compiled.as_text() or "").splitlines())


def hlo_shapes(compiled: jax.stages.Compiled, dtype: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays of a dtype (in HLO's name for it) that the compiled program makes."""
    found = re.findall(rf"\b{dtype}\[([\d,]+)\]", compiled.as_text() or "")
    return {tuple(map(int, text.split(","))) for text in found}

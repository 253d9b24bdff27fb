"""Functions as jaxprs with explicit inputs: traced once, run in any tick, and taken apart where a schedule wants them in two parts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex_core

from jaxpar.core.typing import Array, PyTree

Type = Any  # of an array, as `jax.typeof` gives it
AXIS = "pipe"

# Calls whose body is evaluated in their place, so that a product of matrices within can be told apart.
CALLS = ("jit", "pjit", "closed_call", "remat", "remat2", "checkpoint")


@dataclass(frozen=True)
class Program:
    """A traced function of trees: no closed-over values, so that it can be evaluated inside of any loop body."""

    closed: Any
    out_types: PyTree

    def __call__(self, *args: PyTree) -> PyTree:
        outs = jex_core.jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.out_types), outs)


def varying_of(type_: Type) -> frozenset[str]:
    """Axes over which values of this type differ between devices."""
    return frozenset(type_.manual_axis_type.varying)


def trace(function: Callable[..., PyTree], *args: PyTree) -> Program:
    """args: arrays or their types (`jax.typeof`, which tells shape, dtype and varying axes)."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    if any(isinstance(const, Tracer) for const in closed.consts):
        raise ValueError(
            "model: embed, block or head uses a value that was traced elsewhere; return it from `shared(ctx)`, or make it inside"
        )
    return Program(closed, jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals))


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], *, inline: bool = False) -> list[Any]:
    """Run a jaxpr on values; inline: bodies of calls in place of the calls."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    run_equations(jaxpr.eqns, env, inline=inline)
    return [read(env, atom) for atom in jaxpr.outvars]


def run_equations(equations: Iterable[Any], env: dict[Any, Any], *, inline: bool = False) -> None:
    """Evaluate equations, adding their results to `env`."""
    for eqn in equations:
        values = [read(env, atom) for atom in eqn.invars]
        if inline and eqn.primitive.name in CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            outs = evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values, inline=True)
        else:
            with eqn.ctx.manager:
                outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))


def read(env: dict[Any, Any], atom: Any) -> Array:
    """Value of a variable or a literal."""
    return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

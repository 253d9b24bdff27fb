"""A backward pass in two parts: the gradient of the input now (I), the gradients of the weights later (W).

Zero-bubble schedules (Qi et al., arXiv 2401.10241, section 2) need W apart from I. The split is made on the traced backward
pass of any model, ours or a user's: products of matrices that nothing but a weight's gradient waits for, and what follows from
them, are left for later. Their operands are kept in between. It is exact and computes no product twice (what is the same on all
stages, positions and masks, is made again). Gradients that come from no product of matrices (norm scales, biases, tables that are
looked up) stay in I, and so do products inside a loop or a branch of the model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxpar.core.typing import Array
from jaxpar.parallel.pipeline.program import AXIS, Type, evaluate, read, run_equations, varying_of

LINEAR_MAPS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call")


@dataclass(frozen=True)
class Split:
    """Both parts of a jaxpr. Outputs keep their positions: those of `late` come from the second part, the others from the first."""

    jaxpr: Any
    consts: tuple[Any, ...]
    first: tuple[Any, ...]  # equations
    second: tuple[Any, ...]
    kept: tuple[Any, ...]  # variables that go from the first part to the second
    given: tuple[int, ...]  # inputs at hand that the second part reads
    late: tuple[int, ...]  # outputs of the second part

    @property
    def kept_types(self) -> list[Type]:
        """What has to be kept between the parts."""
        return [var.aval for var in self.kept]

    def run_first(self, args: Sequence[Array]) -> tuple[dict[int, Array], list[Array]]:
        """(outputs by position, what to keep)."""
        env = self._env(dict(enumerate(args)))
        run_equations(self.first, env)
        early = [i for i in range(len(self.jaxpr.outvars)) if i not in self.late]
        return {i: read(env, self.jaxpr.outvars[i]) for i in early}, [env[var] for var in self.kept]

    def run_second(self, given: dict[int, Array], kept: Sequence[Array]) -> dict[int, Array]:
        """given: the inputs named by `given`. Returns the late outputs by position."""
        env = self._env(given) | dict(zip(self.kept, kept, strict=True))
        run_equations(self.second, env)
        return {i: read(env, self.jaxpr.outvars[i]) for i in self.late}

    def _env(self, inputs: dict[int, Array]) -> dict[Any, Any]:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        return env | {self.jaxpr.invars[i]: value for i, value in inputs.items()}


def split(closed: Any, now: Sequence[int], at_hand: Sequence[int]) -> Split:
    """Split a traced function. now: outputs that must come from the first part. at_hand: inputs that the second part can read too."""
    avals = [var.aval for var in closed.jaxpr.invars]
    flat = jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args, inline=True))(*avals)
    jaxpr = flat.jaxpr
    urgent = _needed_for(jaxpr, [jaxpr.outvars[i] for i in now])
    late_vars: set[Any] = set()
    second = []
    for eqn in jaxpr.eqns:
        waits = eqn.primitive.name in LINEAR_MAPS or any(is_var(v) and v in late_vars for v in eqn.invars)
        if waits and not urgent.intersection(eqn.outvars):
            second.append(eqn)
            late_vars.update(eqn.outvars)
    late = tuple(i for i, var in enumerate(jaxpr.outvars) if is_var(var) and var in late_vars)
    inputs = {jaxpr.invars[i]: i for i in at_hand}
    deferred = set(map(id, second))
    # What is the same on all stages (positions, masks) is made again; it has no varying type, and a buffer's slots have.
    alike = _needed_for(jaxpr, [v for v in _operands(jaxpr, second) if v not in inputs and AXIS not in varying_of(v.aval)])
    assert not any(eqn.primitive.name in LINEAR_MAPS for eqn in jaxpr.eqns if alike.intersection(eqn.outvars)), "a product made twice"
    second = [eqn for eqn in jaxpr.eqns if id(eqn) in deferred or alike.intersection(eqn.outvars)]
    wanted = _operands(jaxpr, second)
    return Split(
        jaxpr=jaxpr,
        consts=tuple(flat.consts),
        first=tuple(eqn for eqn in jaxpr.eqns if id(eqn) not in deferred),
        second=tuple(second),
        kept=tuple(v for v in wanted if v not in inputs),
        given=tuple(inputs[v] for v in wanted if v in inputs),
        late=late,
    )


def _operands(jaxpr: Any, equations: Sequence[Any]) -> list[Any]:
    """Variables that equations take from others."""
    made = {v for eqn in equations for v in eqn.outvars}.union(jaxpr.constvars)
    return list(dict.fromkeys(v for eqn in equations for v in eqn.invars if is_var(v) and v not in made))


def is_var(atom: Any) -> bool:
    """False for literals, which cannot be looked up in a set of variables."""
    return not isinstance(atom, jex_core.Literal)


def _needed_for(jaxpr: Any, outputs: Sequence[Any]) -> set[Any]:
    """Variables that these outputs depend on."""
    needed = {var for var in outputs if is_var(var)}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if is_var(v))
    return needed

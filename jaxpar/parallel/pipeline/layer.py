"""One layer's forward and backward pass as traced programs, with what lies between them laid open.

A residual is one of three: given (it is an input: a weight, something known), so at hand again in the backward pass, and never copied
into a stash; fixed (the same on all stages, so it depends on no input that matters: positions, a causal mask), made again; or stashed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from jaxpar.core.typing import Array, Params, PyTree, Terms
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.forward import Batch, Forward, alike
from jaxpar.parallel.pipeline.program import AXIS, Program, Type, trace, varying_of
from jaxpar.parallel.pipeline.split import Split, is_var, split


@dataclass(frozen=True)
class Known:
    """What a layer needs beside its weights and its input; made again for every action, so never stashed."""

    rows: Batch  # [b, S] or [b]: this device's part of the microbatch
    shared: PyTree  # `Model.shared`
    key: tuple[Array, Array] | None
    layer: Array  # index among all layers

    def at(self, layer: Array) -> "Known":
        return Known(self.rows, self.shared, self.key, layer)


jax.tree_util.register_dataclass(Known, ["rows", "shared", "key", "layer"], [])


@dataclass(frozen=True)
class Fixed:
    """The part of a layer's forward pass that makes the fixed residuals, whose numbers are `numbers`, from the inputs `used`."""

    numbers: tuple[int, ...]
    closed: Any
    used: tuple[int, ...]

    @classmethod
    def of(cls, traced: Program, numbers: Sequence[int], first: int) -> "Fixed":
        """numbers: of residuals, which are outputs of `traced` from number `first` on."""
        jaxpr = traced.closed.jaxpr
        wanted = [i - first in numbers for i in range(len(jaxpr.outvars))]
        part, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        return cls(tuple(numbers), jex_core.ClosedJaxpr(part, traced.closed.consts), tuple(i for i, u in enumerate(used) if u))

    def __call__(self, inputs: Sequence[Array]) -> dict[int, Array]:
        outs = jex_core.jaxpr_as_fun(self.closed)(*[inputs[i] for i in self.used])
        return dict(zip(self.numbers, outs, strict=True))


@dataclass(frozen=True)
class Layer:
    """forward: (weights, known, x) -> (x, sums, weights of the terms, residuals). backward: (residuals, dx, dsums) -> (dweights, dx).

    given: number of a residual -> number of the input that it is. Inputs and residuals are counted flat.
    """

    forward: Program
    backward: Program
    given: Mapping[int, int]
    fixed: "Fixed"

    @cached_property
    def stashed(self) -> list[Type]:
        """Types of the residuals that have to be kept."""
        residuals = self.forward.out_types[3]
        return [residuals[i] for i in self._stashed]

    @cached_property
    def _stashed(self) -> list[int]:
        return [i for i in range(len(self.forward.out_types[3])) if i not in self.given and i not in self.fixed.numbers]

    def run(self, weights: Params, known: Known, x: Array) -> tuple[Array, Terms, list[Array]]:
        """(x after the layer, terms, residuals to keep)."""
        x, sums, counts, residuals = self.forward(weights, known, x)
        return x, {name: (sums[name], counts[name]) for name in sums}, [residuals[i] for i in self._stashed]

    def residuals(self, weights: Params, known: Known, kept: list[Array]) -> list[Array]:
        """All residuals, from those that were kept and what is at hand."""
        again = jax.tree.leaves((weights, known))
        found = dict(zip(self._stashed, kept, strict=True)) | {i: again[source] for i, source in self.given.items()}
        found |= self.fixed(again)
        return [found[i] for i in range(len(found))]

    def split(self, *, stash_stays: bool) -> Split:
        """The backward pass as I (gradient of x, and of what comes from no product of matrices) and W.

        stash_stays: W still has the residuals; otherwise I has to keep those that it needs.
        """
        dweights, _ = self.backward.out_types
        at_hand = [i for i in range(len(self.forward.out_types[3])) if stash_stays or i not in self._stashed]
        return split(self.backward.closed, now=[len(jax.tree.leaves(dweights))], at_hand=at_hand)


def trace_block(forward: Forward, weights: Params, known: Known, x: Type) -> Program:
    """(weights, known, x) -> (x, sums, weights of the terms) of one layer, without residuals. Arguments are types."""
    return trace(lambda weights, known, x: _block(forward, weights, known, x), weights, known, x)


def trace_layer(forward: Forward, weights: Params, known: Known, x: Type) -> Layer:
    """One layer; arguments are types."""
    trees: dict[str, Any] = {}  # the pullback's tree, known once `run` has been traced

    def run(weights: Params, known: Known, x: Array) -> tuple[Array, dict[str, Array], dict[str, Array], list[Array]]:
        def block(weights: Params, x: Array) -> tuple[tuple[Array, dict[str, Array]], dict[str, Array]]:
            y, sums, counts = _block(forward, weights, known, x)
            return (y, sums), counts

        (y, sums), pullback, counts = jax.vjp(forward.remat_layer(block), weights, x, has_aux=True)
        residuals, trees["pullback"] = jax.tree.flatten(pullback)
        return y, sums, counts, residuals

    def back(residuals: list[Array], dy: Array, dsums: dict[str, Array]) -> tuple[Params, Array]:
        return jax.tree.unflatten(trees["pullback"], residuals)((dy, dsums))

    traced = trace(run, weights, known, x)
    y, sums, _, residuals = traced.out_types
    jaxpr = traced.closed.jaxpr
    again = len(jax.tree.leaves((weights, known)))
    inputs = {var: i for i, var in enumerate(jaxpr.invars) if i < again}
    first = len(jaxpr.outvars) - len(residuals)
    given = {i: inputs[var] for i, var in enumerate(jaxpr.outvars[first:]) if is_var(var) and var in inputs}
    fixed = [i for i, type_ in enumerate(residuals) if i not in given and AXIS not in varying_of(type_)]
    return Layer(traced, trace(back, residuals, y, sums), given, Fixed.of(traced, fixed, first))


def _block(forward: Forward, weights: Params, known: Known, x: Array) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    ctx = forward.context(known.rows, known.key, known.shared).at(known.layer)
    y, terms = forward.model.block(forward.prepare("blocks", weights), x, ctx)
    terms = alike(terms)
    return vary(y, tuple(varying(x))), {name: s for name, (s, _) in terms.items()}, {name: w for name, (_, w) in terms.items()}

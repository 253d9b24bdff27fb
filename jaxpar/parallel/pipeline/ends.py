"""The two ends of the model on a pipeline: what follows a cotangent out of the first virtual stage, and the head on the last one."""

from dataclasses import dataclass
from functools import cached_property

import jax

from jaxpar.core.typing import Array, Params, PyTree, Terms
from jaxpar.core.vma import vary, varying
from jaxpar.parallel.forward import alike
from jaxpar.parallel.pipeline.control import get, zeros
from jaxpar.parallel.pipeline.layer import Known
from jaxpar.parallel.pipeline.program import AXIS, Program, Type, trace, varying_of
from jaxpar.parallel.pipeline.split import Split, split
from jaxpar.parallel.pipeline.stage import Stage, type_of
from jaxpar.parallel.terms import cotangents

Gradients = dict[int, Array]  # by leaf of (embed, head)


@dataclass(frozen=True)
class Ends:
    """scale: what the sum of each minimised term is multiplied with in the loss."""

    stage: Stage
    scale: dict[str, Array]

    def embed_gradient(self, known: Known, dx: Array) -> Gradients:
        """Gradients of the embedding's weights from that of its output; the lookup is done again, and layers before the blocks."""
        return dict(enumerate(jax.tree.leaves(self._embed_backward(self.stage.embed, known, dx))))

    def head(self, known: Known, y: Array) -> tuple[Terms, Array, Gradients]:
        """(terms of the loss, gradient of the last layer's output, gradients of the weights)."""
        terms, dy, *grads = self._head_program(self._weights, known, self.scale, y)
        return terms, dy, dict(enumerate(jax.tree.leaves(grads)))

    def head_first(self, known: Known, y: Array) -> tuple[Terms, Array, Gradients, list[Array]]:
        """As `head`, but products that only weights wait for are left, with their operands, which come last."""
        outs, kept = self.head_split.run_first(jax.tree.leaves((self._weights, known, self.scale, y)))
        terms = jax.tree.unflatten(jax.tree.structure(self.term_types), [outs[i] for i in range(self._num_terms)])
        return terms, outs[self._num_terms], self._gradients(outs), kept

    def head_second(self, known: Known, kept: list[Array], slot: Array) -> Gradients:
        """What `head_first` has left."""
        args = jax.tree.leaves((self._weights, known, self.scale))
        given = {i: args[i] for i in self.head_split.given}
        return self._gradients(self.head_split.run_second(given, [get(k, slot) for k in kept]))

    @property
    def term_types(self) -> PyTree:
        """Types of the head's terms."""
        return self._head_program.out_types[0]

    @cached_property
    def gradient_types(self) -> list[Type]:
        """Types of the gradients of all leaves of (embed, head); those of tied weights come from both ends."""
        head = jax.tree.leaves(self._head_program.out_types[2:])
        embed = jax.tree.leaves(self._embed_backward.out_types)
        # (embed, head) begin with the leaves of embed.
        both = [type_of(lambda a=a, b=b: vary(zeros(a), tuple(varying_of(b)))) for a, b in zip(head, embed, strict=False)]
        return both + head[len(embed) :]

    @cached_property
    def head_split(self) -> Split:
        """The head's program in two parts."""
        num_inputs = len(self._head_program.closed.jaxpr.invars)
        return split(self._head_program.closed, now=range(self._num_terms + 1), at_hand=range(num_inputs - 1))

    def _gradients(self, outs: dict[int, Array]) -> Gradients:
        return {i - self._num_terms - 1: g for i, g in outs.items() if i > self._num_terms}

    @property
    def _weights(self) -> tuple[Params, Params]:
        return self.stage.embed, self.stage.head

    @cached_property
    def _num_terms(self) -> int:
        return len(jax.tree.leaves(self.term_types))

    @cached_property
    def _embed_backward(self) -> Program:
        def gradient(embed: Params, known: Known, dx: Array) -> Params:
            _, pullback = jax.vjp(lambda e: self.stage.embedded(e, known), embed)
            return pullback(dx)[0]

        return trace(gradient, self.stage.embed, self.stage.known_type, self.stage.boundary)

    @cached_property
    def _head_program(self) -> Program:
        """((embed, head), known, scale, y) -> (terms, dy, gradient of embed, gradient of head)."""
        forward = self.stage.forward

        def program(weights: tuple[Params, Params], known: Known, scale: dict[str, Array], y: Array) -> PyTree:
            ctx = forward.context(known.rows, known.key, known.shared)

            def minimised(embed: Params, head: Params, y: Array) -> tuple[dict[str, Array], Terms]:
                terms = alike(forward.model.head(head, embed, y, known.rows["targets"], known.rows["weights"], ctx))
                return {name: terms[name][0] for name in scale if name in terms}, terms

            totals, pullback, terms = jax.vjp(minimised, *weights, y, has_aux=True)
            dembed, dhead, dy = pullback(cotangents(totals, scale))
            return vary(terms, (AXIS,)), vary(dy, tuple(varying(y))), dembed, dhead

        return trace(program, self._weights, self.stage.known_type, self.scale, self.stage.boundary)

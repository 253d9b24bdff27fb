"""The evaluation step: sums and weights of every loss term over one global batch, without dropout."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from jaxpar.core.typing import Array, Params
from jaxpar.mesh.specs import batch_spec
from jaxpar.parallel.executor import sum_terms
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.step.placement import Placement

EvalFn = Callable[[Params, Batch], tuple[dict[str, Array], dict[str, Array]]]


def make_eval_step(forward: Forward, placement: Placement) -> EvalFn:
    """(params, batch [M, rows, S]) -> (sums, weights) of every term; divide once, over all batches."""

    def evaluate(params: Params, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
        all_specs = batch_spec(placement.layout)
        mapped = jax.shard_map(
            lambda params, batch: sum_terms(forward, params, batch),
            mesh=placement.mesh,
            in_specs=(placement.param_specs, {name: all_specs[name] for name in batch}),
            out_specs=P(),
        )
        return mapped(params, dict(batch))

    return evaluate

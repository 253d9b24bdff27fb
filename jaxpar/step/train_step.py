"""The train step: one jit; one `shard_map` for loss and gradients; norm, clip and optimizer on global arrays outside it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.core.typing import Array, Params, PyTree
from jaxpar.mesh.specs import batch_spec
from jaxpar.ops.random import fold, key_of
from jaxpar.optim.update import guarded_update
from jaxpar.parallel.executor import loss_and_gradients
from jaxpar.parallel.forward import Batch, Forward
from jaxpar.step.placement import Placement
from jaxpar.step.state import TrainState
from jaxpar.step.updates import apply_rules

Metrics = dict[str, Array]
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Clip = Callable[[Array], Array]  # norm -> factor


def make_gradients(forward: Forward, placement: Placement, seed: int) -> Callable[[Params, Batch, Array], tuple[Metrics, Params]]:
    """(params, batch, step) -> (mean of every loss term, gradients): the one `shard_map` of a step."""
    layout = placement.layout

    def spmd(params: Params, batch: Batch, step: Array) -> tuple[Metrics, Params]:
        return loss_and_gradients(forward, params, batch, fold(key_of(seed), step))

    def gradients(params: Params, batch: Batch, step: Array) -> tuple[Metrics, Params]:
        all_specs = batch_spec(layout)
        in_specs = (placement.param_specs, {name: all_specs[name] for name in batch}, P())
        mapped = jax.shard_map(spmd, mesh=placement.mesh, in_specs=in_specs, out_specs=(P(), placement.sharded_specs))
        return mapped(params, dict(batch), step)

    return gradients


def make_train_step(
    forward: Forward,
    placement: Placement,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[Array], Array],
    clip: Clip,
    seed: int,
    *,
    halt_on_nonfinite: bool = False,
) -> StepFn:
    """The pure step; jit it with `placement.state_shardings`, donating the state.

    A step whose loss or gradient norm is not finite leaves parameters and optimizer state as they were; the loop decides
    whether to go on. metrics: every loss term's mean, grad_norm, param_norm, lr, and leaf_norms (one for each gradient
    leaf, in tree order) from which the first bad tensor is named. halt_on_nonfinite: such a step turns the counter negative
    (-1 - n after n updates) and later steps, which may be running before the loop has read this one's numbers, change nothing.
    """
    gradients = make_gradients(forward, placement, seed)
    rules = apply_rules(forward.model.updates, placement.layout.stages)
    shards = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), placement.sharded_specs, is_leaf=lambda x: isinstance(x, P))

    def next_count(count: Array, ok: Array) -> Array:
        halted = jnp.where(count < 0, count, -1 - count) if halt_on_nonfinite else count + 1
        return jnp.where(ok, count + 1, halted)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        means, grads = gradients(state.params, batch, state.step)
        squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares[1:], squares[0]))
        ok = jnp.isfinite(norm) & jnp.isfinite(means["loss"]) & (state.step >= 0)
        factor, lr = clip(norm), learning_rate(state.step)
        # ZeRO 1 and 2: each device updates its shard of the parameters; the step's output sharding gathers them.
        params = jax.lax.with_sharding_constraint(state.params, shards) if placement.layout.zero_stage in (1, 2) else state.params
        new_params, opt_state = guarded_update(optimizer, grads, state.opt_state, params, learning_rate=lr, factor=factor, ok=ok)
        new_params = rules(state.params, new_params, means, ok)
        new_state = TrainState(new_params, opt_state, next_count(state.step, ok))
        metrics = means | {"grad_norm": norm, "param_norm": global_norm(new_params), "lr": lr, "leaf_norms": jnp.sqrt(jnp.stack(squares))}
        return new_state, metrics

    return step


def global_norm(tree: PyTree) -> Array:
    """Euclidean norm of all leaves together."""
    squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares[1:], squares[0]))

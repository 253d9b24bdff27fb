"""Where the state and the batch of a run live: one table of plans, and the shardings that follow from it."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config.layout import Layout
from jaxpar.core.typing import Params, PyTree
from jaxpar.mesh import specs
from jaxpar.optim.specs import state_specs
from jaxpar.step.state import TrainState


@dataclass(frozen=True)
class Placement:
    """Plans of every parameter, and specs and shardings derived from them."""

    layout: Layout
    mesh: Mesh
    shapes: Params  # abstract parameters
    plans: PyTree
    state: TrainState  # abstract state with shardings

    @cached_property
    def param_specs(self) -> PyTree:
        return specs.param_specs(self.layout, self.plans)

    @cached_property
    def sharded_specs(self) -> PyTree:
        return specs.sharded_specs(self.layout, self.plans)

    @property
    def state_shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())


def place(layout: Layout, mesh: Mesh, names: PyTree, shapes: Params, optimizer: optax.GradientTransformation) -> Placement:
    """Plan every parameter and lay the whole state out; all that does not fit is one LayoutError."""
    plans = specs.plan_tree(layout, names, shapes)
    opt_state = jax.eval_shape(optimizer.init, shapes)
    opt_specs = state_specs(opt_state, shapes, specs.sharded_specs(layout, plans), P())
    spec_tree = TrainState(params=specs.param_specs(layout, plans), opt_state=opt_specs, step=P())
    abstract = TrainState(params=shapes, opt_state=opt_state, step=jax.ShapeDtypeStruct((), jnp.int32))
    state = jax.tree.map(
        lambda spec, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        spec_tree,
        abstract,
        is_leaf=lambda x: isinstance(x, P),
    )
    return Placement(layout, mesh, shapes, plans, state)

"""`optimizer:` -> one optax transformation from gradients to directions: rule and decay by dim names."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxpar.config.optimizer import OptimizerConfig
from jaxpar.core.tree import named_leaves
from jaxpar.core.typing import PyTree
from jaxpar.mesh.specs import is_names
from jaxpar.optim.adafactor import scale_by_adafactor
from jaxpar.optim.muon import DEFAULT_MOMENTUM, scale_by_muon
from jaxpar.optim.names import decays, map_names
from jaxpar.optim.schedule import check_schedule

Rule = Callable[[OptimizerConfig, PyTree], optax.GradientTransformation]

# Each makes the direction of a step, before decay and learning rate.
RULES: Mapping[str, Rule] = {
    "adamw": lambda config, _: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
    "lion": lambda config, _: optax.scale_by_lion(config.beta1, config.beta2),
    "sgd": lambda config, _: optax.trace(config.momentum) if config.momentum else optax.identity(),
    "adafactor": lambda _, names: scale_by_adafactor(names),
    "muon": lambda config, names: scale_by_muon(
        names,
        momentum=DEFAULT_MOMENTUM if config.momentum is None else config.momentum,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
    ),
}


def build_optimizer(config: OptimizerConfig, steps: int, names: PyTree) -> optax.GradientTransformation:
    """gradient -> direction d of the step p - lr d, for parameters whose dims are `names` (tuples, in the tree of the parameters).

    d = rule(g) + weight_decay p, the second term only where `decays(names)`: decoupled decay (Loshchilov & Hutter 2019) in the form of
    torch and optax, so times the learning rate. The learning rate is not in here: it is a function of the run's step, of which there is
    one counter (`learning_rate`, `guarded_update`). Nor is clipping: the step has the norm at hand (`clip_factor`). Gradients are taken
    in the dtype of their parameter, so state and directions have it too, whatever dtype the model computes in.
    Raises ValueError where the schedule does not fit into `steps`.
    """
    check_schedule(config, steps)
    return _with_standard_promotion(
        optax.chain(
            _cast_like_params(),
            RULES[config.name](config, names),
            # Also at weight_decay = 0: the state then has one structure, so a run can resume with another decay.
            optax.add_decayed_weights(config.weight_decay, mask=map_names(decays, names)),
        )
    )


def _with_standard_promotion(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Optax raises floats to the power of its int32 counter, which `jax_numpy_dtype_promotion=strict` forbids."""

    def init(params: optax.Params) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _cast_like_params() -> optax.GradientTransformation:
    def cast(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return jax.tree.map(lambda g, p: g.astype(p.dtype), updates, params)

    return optax.stateless(cast)


def clip_factor(norm: Float[Array, ""], max_norm: float) -> Float[Array, ""]:
    """min(1, max_norm / (norm + 1e-6)), what a gradient of this global norm is multiplied by (Megatron-LM, torch `clip_grad_norm_`)."""
    return jnp.minimum(jnp.ones_like(norm), max_norm / (norm + 1e-6))


def describe_decay(names: PyTree) -> str:
    """Two lines for the log: which parameters decay and which do not."""
    by_decay: dict[bool, list[str]] = {True: [], False: []}
    for path, leaf in named_leaves(names, is_leaf=is_names).items():
        by_decay[decays(leaf)].append(path)
    return "\n".join(
        f"{label}: {', '.join(by_decay[flag]) or 'nothing'}" for label, flag in (("weight decay on", True), ("no weight decay on", False))
    )

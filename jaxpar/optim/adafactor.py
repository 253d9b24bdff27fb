"""Adafactor on stacked layers: each layer has its own factors, clip and scale, as if it were not stacked."""

import jax
import optax

from jaxpar.core.typing import PyTree
from jaxpar.optim.names import map_names, stacked


def _per_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same rule on each slice of the leading dim; its state is stacked too."""

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[optax.Updates, optax.OptState]:
        return jax.vmap(rule.update)(updates, state, params)

    return optax.GradientTransformation(jax.vmap(rule.init), update)


def scale_by_adafactor(names: PyTree) -> optax.GradientTransformation:
    """Factored second moments, update clipping at RMS 1 and steps relative to the RMS of the parameter.

    Algorithm 4 of Shazeer & Stern 2018 without momentum, by optax's parts. The two largest dims of a leaf are factored where both are
    at least 128; RMS and factors are those of one layer, where optax on a stacked leaf would mix all layers.
    """
    rule = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    labels = map_names(lambda leaf: "layers" if stacked(leaf) else "single", names)
    rules = {"layers": _per_layer(rule), "single": rule}
    return optax.partition({label: rules[label] for label in sorted(set(jax.tree.leaves(labels)))}, labels)

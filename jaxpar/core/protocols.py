"""The two interfaces that join models and parallelism: `Model`, and the `Context` that a model is handed.

A model is single-device maths on named dims; it knows no mesh axis. All that depends on the layout comes in through the
context, whose functions are identities on one device.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxpar.core.typing import Array, Params, Terms


class Context(Protocol):
    """What a model may ask for. Read-only."""

    layer: Array | int  # index of the block among all layers
    positions_bS: Array  # position in the document, restarting in packed rows
    segments_bS: Array  # document of each token in its row, from 1; 0: padding

    def enter(self, x_bSD: Array, dim: str) -> Array:
        """Before a map that produces `dim`: this device's tokens -> all tokens that its part of `dim` needs."""
        ...

    def leave(self, y_bSD: Array, dim: str) -> Array:
        """After a map that sums over `dim`: partial sums -> this device's tokens, summed."""
        ...

    def attend(self, q_bSHK: Array, k_bSGK: Array, v_bSGK: Array) -> Array:
        """Causal attention between `enter(., "heads")` and `leave(., "heads")`, whatever splits the sequence."""
        ...

    def dropout(self, x: Array, rate: float, site: int, dims: tuple[str, ...]) -> Array:
        """Bits are a function of (seed, step, layer, site, sample, position, feature): never of the layout."""
        ...

    def select(self, w: Array, array_dim: int, of: str) -> Array:
        """From a dim that is not split, the part that serves this device's share of dim `of` (shared key-value heads)."""
        ...

    def whole_sequence(self, x_bSD: Array) -> Array:
        """All tokens of each row in natural order, for a mixer of the user's own (after `enter`)."""
        ...

    def my_sequence(self, x_bSD: Array) -> Array:
        """The inverse of `whole_sequence`: this device's tokens of full rows."""
        ...

    def embed(self, table_VD: Array, ids_bS: Array) -> Array:
        """Rows of a table whose dim `vocab` may be split -> activations at a block boundary."""
        ...

    def cross_entropy(self, x_bSD: Array, w_DV: Array, targets_bS: Array, weights_bS: Array) -> Terms:
        """Token losses of logits x @ w over a vocabulary that may be split: {"loss": (sum, weight), ...}."""
        ...


@runtime_checkable
class Model(Protocol):
    """Three parts that share one parameter tree {"embed": ..., "blocks": ..., "head": ...}."""

    num_layers: int

    def init(self) -> dict[str, Callable[[Array], Params]]:
        """For each part, key -> parameters; `blocks` makes one layer, the trainer stacks them."""
        ...

    def names(self) -> dict[str, Params]:
        """The same trees with a tuple of dim names for each parameter (one layer for `blocks`)."""
        ...

    def embed(self, params_embed: Params, tokens_bS: Array, ctx: Context) -> Array: ...

    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]: ...

    def head(self, params_head: Params, params_embed: Params, x_bSD: Array, targets_bS: Array, weights_bS: Array, ctx: Context) -> Terms: ...

"""The two interfaces that join models and parallelism: `Model`, and the `Context` that a model is handed.

Where a token is: `samples_b` is the global number of its row; its place in the row is `seq_index_S` inside a region (what
`context` leaves of the sequence, in the order that the attention method stores) and `block_seq_index_S` at a block boundary
(`tensor` may have cut once more); `positions_bS` counts within its document. Random bits use the first two, rotary angles the last.

A model is single-device maths on named dims; it knows no mesh axis. All that depends on the layout comes in through the
context, whose functions are identities on one device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxpar.core.typing import Array, Params, Terms

Initializer = Callable[[Array, tuple[int, ...], Any], Array]  # (key, shape, dtype) -> values


@dataclass(frozen=True)
class ParamSpec:
    """A parameter before it has numbers. `valid` bounds dims whose tail is padding (initialised to zero)."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    init: Initializer
    valid: tuple[int, ...] | None = None


class Routing(NamedTuple):
    """Where tokens go; arrays of this device's tokens after `enter`.

    expert_bSk: -1 for none. gate_bSk: weights of the experts' outputs. place_bSk: place among the tokens of its expert and group, from 0
    (or 0 where nobody asks); -1: dropped. capacity: places of an expert for one group. group_rows: rows of a group.
    """

    expert_bSk: Array
    gate_bSk: Array
    place_bSk: Array
    capacity: int
    group_rows: int
    num_experts: int


# A product of rows with the matrices [experts, in, out] of their experts; a function that changes no row, by which gates learn; and a layer
# of experts on rows in any arrangement, which applies that function once, to the rows that enter its last map.
Product = Callable[[Array, Array], Array]
Weigh = Callable[[Array], Array]
Experts = Callable[[Array, Product, Weigh], Array]


class Context(Protocol):
    """What a model may ask for. Read-only."""

    @property
    def layer(self) -> Array | int:
        """Index of the block among all layers."""
        ...

    def at(self, layer: Array | int) -> "Context":
        """The same context for another layer: what random bits depend on."""
        ...

    @property
    def wide_dtype(self) -> Any:
        """Dtype of what must not be rounded (rotary angles, statistics): float32, or float64 in a float64 run."""
        ...

    @property
    def positions_bS(self) -> Array:
        """Position of each token in its document ([1, S] where rows are not packed)."""
        ...

    @property
    def segments_bS(self) -> Array | None:
        """Document of each token in its row, from 1; 0: padding; None: rows are not packed."""
        ...

    @property
    def tokens_bS(self) -> Array:
        """Ids of this device's tokens (what `context` leaves of the sequence)."""
        ...

    @property
    def training(self) -> bool:
        """False in evaluation and sampling."""
        ...

    @property
    def shared(self) -> Any:
        """What `Model.shared` made from the context, once for all layers."""
        ...

    def enter(self, x_bSD: Array, dim: str) -> Array:
        """Before a map that produces `dim`: this device's tokens -> all tokens that its part of `dim` works on."""
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

    def uniform(self, site: int, size: int | None = None) -> Array | None:
        """Numbers in [0, 1) by global coordinates, one a token at a block boundary or `size` of them; None in evaluation."""
        ...

    def remat(self, layer: Callable[[Array], Array], x_bSD: Array) -> Array:
        """layer(x), of which the backward pass finds what the config's `remat` says: for layers outside the scanned blocks."""
        ...

    def select(self, w: Array, array_dim: int, dim: str, of: str) -> Array:
        """Where `dim` is split less than `of`: the part of it that serves this device's share of `of` (shared key-value heads)."""
        ...

    def at_block_boundary(self, x_bSD: Array) -> Array:
        """Per-token values -> those of the tokens that this device holds at a block boundary."""
        ...

    def whole_rows(self, x_bSD: Array) -> Array:
        """Per-token values at a block boundary -> those of all tokens of each row in natural order. For numbers that decide
        something (scores, choices), not for activations. The result is alike on the devices that share the rows."""
        ...

    def my_tokens(self, x_bSD: Array) -> Array:
        """The inverse of `whole_rows`."""
        ...

    def sum_over_rows(self, x: Array) -> Array:
        """Sum over the devices that share this device's rows, of values made from tokens at a block boundary."""
        ...

    def route(self, x_bSD: Array, routing: Routing, experts: Experts) -> tuple[Array, Array | None]:
        """Tokens (after `enter`) through the experts that they are given, wherever those are, weighted by their gates and summed.

        A partial sum where the experts' hidden dim is split: `leave` follows. Also how many rows of this device found no room on their
        way; None where that cannot be. A gate that is exactly 0 gets no gradient.
        """
        ...

    def whole_sequence(self, x_bSD: Array) -> Array:
        """All tokens of each row in natural order, for a mixer of the user's own (after `enter`).

        Any values per token, [b, S] or [b, S, ...]: segment ids and positions are local to the `context` shard as well.
        """
        ...

    def my_sequence(self, x_bSD: Array) -> Array:
        """The inverse of `whole_sequence`: this device's tokens of full rows."""
        ...

    def embed(self, table_VD: Array, ids_bS: Array) -> Array:
        """Rows of a table whose dim `vocab` may be split -> activations at a block boundary."""
        ...

    def logits(self, x_bSD: Array, w_DV: Array) -> Array:
        """This device's columns of x @ w, float32, padded columns -inf."""
        ...

    def cross_entropy(self, x_bSD: Array, w_DV: Array, targets_bS: Array, weights_bS: Array) -> Terms:
        """Token losses of logits x @ w over a vocabulary that may be split: {"loss": (sum, weight), ...}."""
        ...


@dataclass(frozen=True)
class Update:
    """value of a layer -> rule(value, mean of the term `of` for that layer), once per optimizer step. The term is [layers, ...]."""

    of: str
    rule: Callable[[Array, Array], Array]


class Model(Protocol):
    """Three parts that share one parameter tree {"embed": ..., "blocks": ..., "head": ...}.

    `blocks` describes one layer; the trainer stacks `num_layers` of them on a leading dim "layers" and scans.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def params(self) -> Params:
        """The tree of `ParamSpec`s: shape, dim names and initial distribution of each, no numbers."""
        ...

    def shared(self, ctx: Context) -> Any:
        """Values that all layers use and that depend on the batch only (tables of rotary angles), or None."""
        ...

    def embed(self, params_embed: Params, tokens_bS: Array, ctx: Context) -> Array:
        """Tokens -> activations at a block boundary."""
        ...

    def block(self, params_block: Params, x_bSD: Array, ctx: Context) -> tuple[Array, Terms]:
        """One layer; its terms are added up over layers as (sum, weight)."""
        ...

    def head(self, params_head: Params, params_embed: Params, x_bSD: Array, targets_bS: Array, weights_bS: Array, ctx: Context) -> Terms:
        """Loss terms, "loss" among them; the trainer minimises the sum of `loss_terms` coefficients x (sum / weight)."""
        ...

    def logits(self, params_head: Params, params_embed: Params, x_bSD: Array, ctx: Context) -> Array:
        """This device's columns of the logits, for sampling."""
        ...

    @property
    def loss_terms(self) -> Mapping[str, float]:
        """Coefficients of the terms that are minimised; other terms are metrics."""
        ...

    @property
    def updates(self) -> "Mapping[str, Update]":
        """Parameters of blocks that no gradient moves, by path in one block's tree, and the rule that moves them once a step."""
        ...

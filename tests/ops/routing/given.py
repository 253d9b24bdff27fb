"""Inputs of routers, and a router run on whole groups."""

from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.config.moe import GROUP_ROUTERS, ONE_EXPERT, TWO_EXPERTS, MoeConfig
from jaxpar.ops.routing.library import RULES, make_rule
from jaxpar.ops.routing.rule import Seen

NAMES = tuple(RULES)
OTHER_IN_EVALUATION = ("gshard", "base", "sinkhorn")  # routers that choose differently there
FREE_TOP_K = tuple(name for name in NAMES if name not in (*ONE_EXPERT, *TWO_EXPERTS))
BY_TOKEN = tuple(name for name in NAMES if name not in GROUP_ROUTERS)  # a token's experts do not depend on the others
LEARNED = tuple(name for name in NAMES if name != "hash")


def config_of(name: str, num_experts: int = 8, **changes: Any) -> MoeConfig:
    top_k = 1 if name in ONE_EXPERT else min(2, num_experts)
    return MoeConfig.model_validate({"num_experts": num_experts, "top_k": top_k, "router": name} | changes)


@dataclass
class Given:
    """Random groups [g, T, E]; some tokens are padding."""

    g: int = 3
    T: int = 16
    E: int = 8
    seed: int = 0
    dtype: Any = np.float32
    scale: float = 1.0
    logits: np.ndarray = field(init=False)
    valid: np.ndarray = field(init=False)
    tokens: np.ndarray = field(init=False)
    uniform: np.ndarray = field(init=False)
    bias: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.logits = (self.scale * rng.standard_normal((self.g, self.T, self.E))).astype(self.dtype)
        self.valid = rng.random((self.g, self.T)) < 0.8
        self.tokens = rng.integers(0, 50_000, (self.g, self.T)).astype(np.int32)
        self.uniform = rng.random((self.g, self.T)).astype(np.float32)
        self.bias = (0.3 * rng.standard_normal(self.E)).astype(np.float32)

    def capacity(self, config: MoeConfig) -> int:
        return config.capacity(self.T)

    def take(self, index: Any) -> "Given":
        """Some groups, or tokens of all groups: an index of [g, T]."""
        other = copy(self)
        for name in ("logits", "valid", "tokens", "uniform"):
            setattr(other, name, getattr(self, name)[index])
        other.g, other.T = other.valid.shape
        return other


@dataclass
class Routed:
    expert: np.ndarray  # [g, T, k]
    gate: np.ndarray  # [g, T, k]
    probability: np.ndarray  # [g, T, E]


def seen_of(given: Given, training: bool, capacity: int) -> Seen:
    uniform = jnp.asarray(given.uniform) if training else None
    return Seen(jnp.asarray(given.valid), jnp.asarray(given.tokens), uniform, jnp.asarray(given.bias), training, capacity)


def outputs(config: MoeConfig, logits: Any, seen: Seen) -> tuple[Any, Any, Any]:
    """(experts, gates, probabilities) as a layer makes them: no gradient enters the choice."""
    router = make_rule(config)
    scores = router.scores(logits)
    expert = router.choose(lax.stop_gradient(scores), seen)
    return expert, router.gates(logits, scores, expert), router.probabilities(logits)


@cache
def _program(changes: str, training: bool, capacity: int, slope: bool) -> Any:
    config = MoeConfig.model_validate_json(changes)

    def run(logits: Any, valid: Any, tokens: Any, uniform: Any, bias: Any) -> Any:
        return outputs(config, logits, Seen(valid, tokens, uniform if training else None, bias, training, capacity))

    def weighted(logits: Any, *rest: Any) -> Any:
        """Unlike weights on all gates and probabilities, so that no gradient is 0 by symmetry."""
        _, gate, probability = run(logits, *rest)
        both = jnp.concatenate([gate, probability], axis=-1)
        return jnp.sum(both * jnp.cos(jnp.arange(both.shape[-1], dtype=logits.dtype)))

    return jax.jit(jax.grad(weighted) if slope else run)


def _call(config: MoeConfig, given: Given, training: bool, capacity: int | None, slope: bool) -> Any:
    program = _program(config.model_dump_json(), training, given.capacity(config) if capacity is None else capacity, slope)
    with jax.enable_x64(given.dtype == np.float64):
        arrays = (given.logits, given.valid, given.tokens, given.uniform, given.bias)
        return jax.tree.map(np.asarray, program(*map(jnp.asarray, arrays)))


def route(config: MoeConfig, given: Given, training: bool = True, capacity: int | None = None) -> Routed:
    return Routed(*_call(config, given, training, capacity, slope=False))


def slope_of(config: MoeConfig, given: Given, training: bool = True, capacity: int | None = None) -> np.ndarray:
    """The gradient of a weighted sum of gates and probabilities by logits."""
    return _call(config, given, training, capacity, slope=True)

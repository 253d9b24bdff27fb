"""Routers and places inside shard_map, where arrays vary over unlike axes: the same as the plain call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.config.moe import MoeConfig
from jaxpar.core.vma import vary, varying
from jaxpar.ops.routing.capacity import DropPolicy, places
from jaxpar.ops.routing.losses import counts
from jaxpar.ops.routing.rule import Seen
from tests.ops.routing.given import NAMES, Given, config_of, outputs, route


def mesh() -> Mesh:
    return jax.make_mesh((2, 1), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])


def mapped(config: MoeConfig, training: bool, capacity: int, mask_axes: tuple[str, ...], wider: bool) -> Any:
    """Groups over `data`, the bias the same everywhere; the mask over `mask_axes`; logits, with `wider`, over `expert` too."""

    def local(logits: Any, valid: Any, tokens: Any, uniform: Any, bias: Any) -> Any:
        assert varying(bias) == frozenset()
        assert varying(valid) == frozenset(mask_axes)
        seen = Seen(valid, tokens, uniform if training else None, bias, training, capacity)

        def loss(logits: Any) -> Any:
            out = outputs(config, logits, seen)
            return jnp.sum(out[1] * jnp.cos(jnp.arange(out[1].shape[-1], dtype=jnp.float32))), out

        slope, (expert, gate, probability) = jax.grad(loss, has_aux=True)(vary(logits, ("expert",)) if wider else logits)
        return expert, gate, probability, slope, counts(expert, config.num_experts)

    row, out = P("data"), P(("data", "expert") if wider else "data")
    specs = (row, P(*mask_axes), row, row, P())
    return jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=(out,) * 5))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("wider", [False, True], ids=["alike", "wider"])
@pytest.mark.parametrize("name", NAMES)
def test_router(name: str, wider: bool, training: bool) -> None:
    given, config = Given(g=4), config_of(name)
    capacity = given.capacity(config)
    run = mapped(config, training, capacity, ("data",), wider)
    expert, gate, probability, _, load = run(given.logits, given.valid, given.tokens, given.uniform, given.bias)
    want = route(config, given, training)
    np.testing.assert_array_equal(expert, want.expert)
    np.testing.assert_allclose(gate, want.gate, rtol=1e-6)
    np.testing.assert_allclose(probability, want.probability, rtol=1e-6)
    np.testing.assert_array_equal(load, counts(jnp.asarray(want.expert), given.E))


@pytest.mark.parametrize("name", NAMES)
def test_mask_the_same_on_all_devices(name: str) -> None:
    given, config = Given(g=2), config_of(name, num_groups=2)
    given.valid[1] = given.valid[0]
    run = mapped(config, True, given.capacity(config), (), True)
    expert = run(given.logits, given.valid[:1], given.tokens, given.uniform, given.bias)[0]
    np.testing.assert_array_equal(expert, route(config, given).expert)


@pytest.mark.parametrize("policy", ["position", "choice", "probability"])
def test_places(policy: DropPolicy) -> None:
    rng = np.random.default_rng(0)
    expert, gate = rng.integers(-1, 4, (4, 16, 2)).astype(np.int32), rng.random((4, 16, 2)).astype(np.float32)

    def local(expert: Any, gate: Any) -> Any:
        return places(expert, vary(gate, ("expert",)), 4, 5, policy)

    out = P(("data", "expert")) if policy == "probability" else P("data")
    got = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=(P("data"), P("data")), out_specs=out))(expert, gate)
    np.testing.assert_array_equal(got, places(jnp.asarray(expert), jnp.asarray(gate), 4, 5, policy))

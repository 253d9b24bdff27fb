"""Losses and counts against NumPy, and the share of a device against the derivative of the whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.core.vma import vary
from jaxpar.ops.routing.losses import balance, counts, entropy_balance, first_counts, linear_share, router_z
from tests.ops.routing.given import Given, config_of, route


def probabilities(g: int = 3, T: int = 12, E: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities [g, T, E], valid tokens (the last group has none) and a fraction [g, E], in float64."""
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(E), (g, T))
    valid = rng.random((g, T)) < 0.7
    valid[-1] = False
    return p, valid, rng.dirichlet(np.ones(E), g)


LOSSES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "balance": lambda fraction: lambda mean: balance(fraction, mean),
    "entropy": lambda _: entropy_balance,
    "cubic": lambda fraction: lambda mean: jnp.sum(fraction * mean**3, axis=-1) + 1.0,
}


def test_balance_is_one_when_balanced_and_e_when_all_go_to_one() -> None:
    even = jnp.full((1, 8), 1 / 8)
    one = jnp.zeros((1, 8)).at[0, 3].set(1.0)
    np.testing.assert_allclose(balance(even, even), 1, rtol=1e-6)
    np.testing.assert_allclose(balance(one, one), 8, rtol=1e-6)
    np.testing.assert_allclose(balance(one, even), 1, rtol=1e-6)


@pytest.mark.parametrize("extra", [4, 52])
def test_balance_does_not_count_padding(extra: int) -> None:
    """12 tokens padded to 16 and to 64 (huggingface/transformers #28505)."""
    config, given = config_of("topk"), Given(g=1, T=12 + extra)
    given.valid[:] = np.arange(12 + extra) < 12
    out, short = route(config, given), route(config, given.take(np.s_[:, :12]))

    def loss(expert: np.ndarray, p: np.ndarray) -> float:
        fraction = counts(jnp.asarray(expert), 8) / (12 * config.top_k)
        return float(balance(fraction, jnp.asarray(p[:, :12].mean(1)))[0])

    got, want = loss(out.expert, out.probability), loss(short.expert, short.probability)
    assert abs(got - want) < 1e-6


def test_entropy() -> None:
    with jax.enable_x64(True):
        p, _, _ = probabilities()
        p[0, 0] = [0, 0.5, 0.5, 0]
        mean = jnp.asarray(p[:, 0])
        want = [sum(x * np.log(x) for x in row if x > 0) for row in p[:, 0]]
        np.testing.assert_allclose(entropy_balance(mean), want, rtol=1e-12)
        slope = np.asarray(jax.grad(lambda x: jnp.sum(entropy_balance(x)))(mean))
        np.testing.assert_allclose(slope, np.where(p[:, 0] > 0, np.log(np.where(p[:, 0] > 0, p[:, 0], 1)) + 1, 0), rtol=1e-12)
        np.testing.assert_allclose(entropy_balance(jnp.full((1, 4), 0.25)), -np.log(4), rtol=1e-12)
        assert np.isnan(entropy_balance(jnp.array([[np.nan, 1.0]]))[0]), "a NaN is not hidden"


def test_router_z() -> None:
    logits = Given(scale=3.0).logits
    want = np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    np.testing.assert_allclose(router_z(jnp.asarray(logits)), want, rtol=1e-5)
    np.testing.assert_allclose(router_z(jnp.full((1, 2), 1e4)), (1e4 + np.log(2)) ** 2, rtol=1e-6)


def test_counts() -> None:
    expert = np.random.default_rng(1).integers(-1, 5, (3, 40, 2)).astype(np.int32)
    want = [[(group == e).sum() for e in range(6)] for group in expert]
    first = [[(group[:, 0] == e).sum() for e in range(6)] for group in expert]
    got = counts(jnp.asarray(expert), 6)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(first_counts(jnp.asarray(expert), 6), first)
    np.testing.assert_array_equal(counts(jnp.full((2, 3, 1), -1, jnp.int32), 4), np.zeros((2, 4)))
    with jax.enable_x64(True):
        assert counts(jnp.asarray(expert), 6, jnp.float64).dtype == jnp.float64


def means(p: Any, valid: Any) -> tuple[Any, Any]:
    num = jnp.sum(valid, axis=1, dtype=p.dtype)
    return jnp.sum(jnp.where(valid[..., None], p, 0), axis=1) / jnp.maximum(num, 1)[:, None], num


def whole(p: Any, valid: Any, loss: Callable[[Any], Any]) -> Any:
    mean, num = means(p, valid)
    return jnp.sum(jnp.where(num > 0, loss(mean), 0))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cuts", [(), (4,), (1, 5, 11)], ids=["1", "2", "4"])
def test_shares_of_tokens_add_up(name: str, cuts: tuple[int, ...]) -> None:
    """Sums and gradients of the parts against those of loss(mean)."""
    with jax.enable_x64(True):
        p, valid, fraction = probabilities()
        loss = LOSSES[name](jnp.asarray(fraction))
        p, valid = jnp.asarray(p), jnp.asarray(valid)
        value, slope = jax.value_and_grad(whole)(p, valid, loss)
        mean, num = means(p, valid)
        sums, weights, slopes = 0.0, 0.0, []
        for part in np.split(np.arange(p.shape[1]), cuts):
            local = jax.value_and_grad(lambda x, mask: linear_share(x, mask, mean, num, loss), has_aux=True)
            (share, weight), part_slope = local(p[:, part], valid[:, part])
            sums, weights = sums + float(share), weights + float(weight)
            slopes.append(np.asarray(part_slope))
        np.testing.assert_allclose(sums, value, rtol=1e-12)
        np.testing.assert_allclose(weights, 2, rtol=1e-12)  # groups with a token
        np.testing.assert_allclose(np.concatenate(slopes, axis=1), slope, rtol=1e-12, atol=1e-15)


def test_no_gradient_through_mean_and_number() -> None:
    p, valid, _ = probabilities()
    p, valid = jnp.asarray(p, jnp.float32), jnp.asarray(valid)
    mean, num = means(p, valid)
    slopes = jax.grad(lambda mean, num: linear_share(p, valid, mean, num, entropy_balance)[0], argnums=(0, 1))(mean, num)
    assert all(np.all(np.asarray(slope) == 0) for slope in slopes)


@pytest.mark.parametrize("name", LOSSES)
def test_shares_over_devices(name: str) -> None:
    """Tokens over `context`; the fraction varies over `expert` too, the mean does not vary. No sum over devices enters a slope."""
    p, valid, fraction = probabilities()
    p, fraction = p.astype(np.float32), fraction.astype(np.float32)
    mesh = jax.make_mesh((2, 2), ("context", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(p: Any, valid: Any, fraction: Any) -> Any:
        mean, num = means(p, valid)
        part = jax.lax.psum(num, "context")
        mean = jax.lax.psum(mean * num[:, None], "context") / jnp.maximum(part, 1)[:, None]
        loss = LOSSES[name](vary(fraction, ("expert",)))
        p = vary(p, ("expert",))
        (share, weight), slope = jax.value_and_grad(lambda x: linear_share(x, valid, mean, part, loss), has_aux=True)(p)
        return jax.lax.psum(share, "context")[None], jax.lax.psum(weight, "context"), slope[None]

    row = P(None, "context")
    out_specs = (P("expert"), P(), P("expert", None, "context"))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(row, row, P()), out_specs=out_specs))
    shares, weight, slopes = run(p, valid, fraction)
    value, want = jax.value_and_grad(whole)(jnp.asarray(p), jnp.asarray(valid), LOSSES[name](jnp.asarray(fraction)))
    np.testing.assert_allclose(weight, 2, rtol=1e-6)
    for share, slope in zip(shares, slopes, strict=True):  # of each device along `expert`
        np.testing.assert_allclose(share, value, rtol=1e-5)
        np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-7)

"""What holds for every router, picked up from the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.ops.routing.capacity import places
from jaxpar.ops.routing.library import make_rule
from jaxpar.ops.routing.losses import counts
from tests.ops.routing.given import (
    BY_TOKEN,
    FREE_TOP_K,
    LEARNED,
    NAMES,
    OTHER_IN_EVALUATION,
    Given,
    config_of,
    outputs,
    route,
    seen_of,
    slope_of,
)


def modes(*names: str) -> pytest.MarkDecorator:
    """(name, training), evaluation only where it differs."""
    pairs = [(name, True) for name in names] + [(name, False) for name in names if name in OTHER_IN_EVALUATION]
    return pytest.mark.parametrize(("name", "training"), pairs, ids=[f"{name}-{'train' if t else 'eval'}" for name, t in pairs])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_IN_EVALUATION])
def test_evaluation_is_training(name: str) -> None:
    given, config = Given(), config_of(name)
    a, b = route(config, given), route(config, given, training=False)
    np.testing.assert_array_equal(a.expert, b.expert)
    np.testing.assert_array_equal(a.gate, b.gate)


@modes(*NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_dtypes_and_range(name: str, training: bool, dtype: type) -> None:
    given, config = Given(dtype=dtype), config_of(name)
    out = route(config, given, training)
    assert out.expert.shape == out.gate.shape == (given.g, given.T, config.choices)
    assert out.probability.shape == given.logits.shape
    assert out.expert.dtype == np.int32
    assert out.gate.dtype == out.probability.dtype == dtype
    assert out.expert.min() >= -1
    assert out.expert.max() < given.E
    np.testing.assert_allclose(out.probability.sum(-1), 1, rtol=1e-5)
    assert np.all(out.gate[out.expert < 0] == 0)
    assert np.all(out.gate[out.expert >= 0] > 0)


@modes(*NAMES)
def test_no_expert_twice(name: str, training: bool) -> None:
    expert = route(config_of(name), Given(), training).expert
    for token in expert.reshape(-1, expert.shape[-1]):
        chosen = token[token >= 0]
        assert len(set(chosen)) == len(chosen)


@modes(*NAMES)
def test_padding_has_no_expert_no_gate_and_no_place(name: str, training: bool) -> None:
    given, config = Given(), config_of(name)
    out = route(config, given, training)
    padding = ~given.valid
    assert padding.any()
    assert np.all(out.expert[padding] == -1)
    assert np.all(out.gate[padding] == 0)
    place = np.asarray(places(jnp.asarray(out.expert), jnp.asarray(out.gate), given.E, given.T, "probability"))
    assert np.all(place[padding] == -1)
    load = np.asarray(counts(jnp.asarray(out.expert), given.E))
    assert load.sum() == (out.expert[given.valid] >= 0).sum()


@modes(*NAMES)
def test_more_padding_changes_nothing(name: str, training: bool) -> None:
    """12 tokens padded to 16 and to 64 (huggingface/transformers #28505, where padding counted)."""
    given, config = Given(T=12, scale=2.0), config_of(name)
    given.valid[:] = True
    out = route(config, given, training, capacity=3)
    for length in (16, 64):
        longer = Given(T=length, seed=1, scale=50.0)
        for field in ("logits", "tokens", "uniform", "valid"):
            getattr(longer, field)[:, :12] = getattr(given, field)
        longer.valid[:, 12:], longer.bias = False, given.bias
        padded = route(config, longer, training, capacity=3)
        np.testing.assert_array_equal(padded.expert[:, :12], out.expert)
        np.testing.assert_allclose(padded.gate[:, :12], out.gate, rtol=1e-6)


@modes(*NAMES)
def test_compiled_is_eager_and_both_repeat(name: str, training: bool) -> None:
    given, config = Given(g=2, T=8), config_of(name)
    capacity = given.capacity(config)
    a, b = route(config, given, training), route(config, given, training)
    eager = [np.asarray(x) for x in outputs(config, jnp.asarray(given.logits), seen_of(given, training, capacity))]
    np.testing.assert_array_equal(a.expert, b.expert)
    np.testing.assert_array_equal(a.gate, b.gate)
    np.testing.assert_array_equal(a.expert, eager[0])
    np.testing.assert_allclose(a.gate, eager[1], rtol=1e-6)


@modes(*NAMES)
def test_groups_do_not_see_each_other(name: str, training: bool) -> None:
    given, config = Given(g=4), config_of(name)
    given.logits[1] *= 1000  # needs other numbers of rounds
    given.logits[2] = 0
    together = route(config, given, training)
    for i in range(given.g):
        np.testing.assert_array_equal(route(config, given.take(np.s_[i : i + 1]), training).expert[0], together.expert[i])


@modes(*NAMES)
def test_order_of_tokens(name: str, training: bool) -> None:
    given, config = Given(), config_of(name)
    order = np.random.default_rng(5).permutation(given.T)
    out, moved = route(config, given, training), route(config, given.take(np.s_[:, order]), training)
    np.testing.assert_array_equal(moved.expert, out.expert[:, order])
    np.testing.assert_allclose(moved.gate, out.gate[:, order], rtol=1e-5)


@modes(*LEARNED)
def test_order_of_experts(name: str, training: bool) -> None:
    given, config = Given(), config_of(name)
    order = np.random.default_rng(5).permutation(given.E)
    new_name = np.append(np.argsort(order), -1)  # of an expert, -1 for none
    out = route(config, given, training)
    given.logits, given.bias = given.logits[..., order], given.bias[order]
    moved = route(config, given, training)
    np.testing.assert_array_equal(np.sort(moved.expert, axis=-1), np.sort(new_name[out.expert], axis=-1))


@modes(*BY_TOKEN)
def test_a_token_alone_goes_where_it_goes_with_others(name: str, training: bool) -> None:
    given, config = Given(), config_of(name)
    out = route(config, given, training)
    alone = route(config, given.take(np.s_[:1, 3:4]), training)
    np.testing.assert_array_equal(alone.expert[0, 0], out.expert[0, 3])


@modes(*(name for name in NAMES if config_of(name).top_k == 1 or name in FREE_TOP_K))
def test_one_expert(name: str, training: bool) -> None:
    given = Given(E=1)
    config = config_of(name, num_experts=1)
    out = route(config, given, training, capacity=given.T)
    np.testing.assert_array_equal(out.expert[..., 0], np.where(given.valid, 0, -1))
    assert np.isfinite(out.gate).all()
    assert np.isfinite(slope_of(config, given, training, capacity=given.T)).all()


@modes(*FREE_TOP_K)
def test_as_many_choices_as_experts(name: str, training: bool) -> None:
    given = Given(E=4)
    out = route(config_of(name, num_experts=4, top_k=4), given, training, capacity=given.T)
    assert np.all(np.sort(out.expert[given.valid], axis=-1) == np.arange(4))


@modes(*NAMES)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_group_of_padding_and_huge_logits(name: str, training: bool, scale: float) -> None:
    given, config = Given(scale=scale), config_of(name)
    given.valid[1] = False
    given.logits[0, :4] = -scale * 5
    out = route(config, given, training)
    assert np.all(out.expert[1] == -1)
    assert (out.expert[0] >= 0).any()
    slope = slope_of(config, given, training)
    assert slope.dtype == np.float32
    for x in (out.gate, out.probability, slope):
        assert np.isfinite(x).all()


@modes(*NAMES)
@pytest.mark.parametrize("where", [np.s_[0, 2], np.s_[0], np.s_[:, :, 3]], ids=["token", "group", "expert"])
def test_nan_gives_experts_in_range(name: str, training: bool, where: tuple[int, ...]) -> None:
    given, config = Given(), config_of(name)
    given.logits[where] = np.nan
    out = route(config, given, training)
    assert out.expert.min() >= -1
    assert out.expert.max() < given.E
    assert np.all(out.expert[~given.valid] == -1)
    untouched = [i for i in range(given.g) if np.isfinite(given.logits[i]).all()]
    assert np.isfinite(out.gate[untouched]).all()


@modes(*(name for name in LEARNED if name != "base"))
def test_equal_scores_choose_the_first_experts(name: str, training: bool) -> None:
    """A router of zeros, of either sign (vllm-project/vllm PR 55514, where ties broke differently by backend)."""
    given, config = Given(), config_of(name)
    given.logits = np.where(given.logits > 0, np.float32(0.0), np.float32(-0.0))
    given.bias[:], given.valid[:], given.uniform[:] = 0, True, 0
    capacity = given.capacity(config)
    expert = route(config, given, training).expert
    if config.choices == given.E:  # experts choose: the first tokens
        taken = np.arange(given.T)[:, None] < capacity
        np.testing.assert_array_equal(expert, np.broadcast_to(np.where(taken, np.arange(given.E), -1), expert.shape))
    else:
        np.testing.assert_array_equal(expert, np.broadcast_to(np.arange(expert.shape[-1]), expert.shape))


@modes(*NAMES)
def test_no_gradient_through_the_choice(name: str, training: bool) -> None:
    """The slope of gates with the choice inside is that with the experts given."""
    given, config = Given(g=1, T=6), config_of(name)
    router, seen = make_rule(config), seen_of(given, training, 2)
    logits = jnp.asarray(given.logits)
    expert = jnp.asarray(route(config, given, training, capacity=2).expert)

    def fixed(logits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(router.gates(logits, router.scores(logits), expert)))

    def inside(logits: jax.Array) -> jax.Array:
        scores = router.scores(logits)
        return jnp.sum(jnp.sin(router.gates(logits, scores, router.choose(lax.stop_gradient(scores), seen))))

    both = jax.jit(lambda logits: (jax.grad(fixed)(logits), jax.grad(inside)(logits)))
    slope, got = (np.asarray(x) for x in both(logits))
    np.testing.assert_allclose(got, slope, rtol=1e-6, atol=1e-8)
    assert np.all(slope[~given.valid] == 0)
    assert np.any(slope != 0) == (name in LEARNED)


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"router": "topk"}, 1),
        ({"router": "topk", "softmax": "after"}, 1),
        ({"router": "topk", "routed_scaling": 2.5}, 2.5),
        ({"router": "gshard"}, 1),
        ({"router": "sigmoid_bias"}, 1),
        ({"router": "sigmoid_bias", "routed_scaling": 2.5}, 2.5),
        ({"router": "hash"}, 1),
        ({"router": "hash", "routed_scaling": 0.5}, 0.5),
    ],
)
def test_gates_of_a_token_sum_to(changes: dict[str, Any], total: float) -> None:
    given, config = Given(), config_of(changes["router"], **changes)
    given.valid[:] = True
    np.testing.assert_allclose(route(config, given, training=False).gate.sum(-1), total, rtol=1e-5)


@pytest.mark.parametrize("name", ["topk", "switch", "sinkhorn", "expert_choice"])
def test_gates_not_renormalised_are_probabilities(name: str) -> None:
    given, config = Given(), config_of(name, renormalize=False)
    out = route(config, given)
    want = np.take_along_axis(out.probability, np.maximum(out.expert, 0), axis=-1)
    np.testing.assert_allclose(out.gate, np.where(out.expert >= 0, want, 0), rtol=1e-6)


@pytest.mark.parametrize("name", ["switch", "expert_choice"])
def test_scaling_is_on_the_gates_of_any_router(name: str) -> None:
    plain, scaled = (route(config_of(name, routed_scaling=x), Given()).gate for x in (1.0, 2.5))
    np.testing.assert_allclose(scaled, 2.5 * plain, rtol=1e-6)

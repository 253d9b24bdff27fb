"""Each router against its definition in NumPy."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.routing import base
from tests.ops.routing import references
from tests.ops.routing.given import Given, config_of, route
from tests.ops.routing.references import Pick


def check(config: Any, reference: Callable[[Given, int, int], Pick], training: bool = True, **inputs: Any) -> None:
    """Every token of a few draws against a reference of (given, group, token)."""
    for seed in range(3):
        given = Given(E=config.num_experts, seed=seed, dtype=np.float64, **inputs)
        out = route(config, given, training)
        for g in range(given.g):
            for t in np.flatnonzero(given.valid[g]).tolist():
                expert, gate = reference(given, g, t)
                np.testing.assert_array_equal(out.expert[g, t], expert)
                np.testing.assert_allclose(out.gate[g, t], gate, rtol=1e-10)


GROUPED = {"num_experts": 12, "num_groups": 4, "top_groups": 2}


@pytest.mark.parametrize("groups", [{}, GROUPED, GROUPED | {"group_score": "max"}], ids=["all", "top2_sum", "max"])
@pytest.mark.parametrize(
    "changes",
    [
        {"softmax": "before", "renormalize": True},
        {"softmax": "before", "renormalize": False, "routed_scaling": 16.0},
        {"softmax": "after"},
        {"softmax": "after", "renormalize": False, "top_k": 3},
    ],
)
def test_topk(changes: dict[str, Any], groups: dict[str, Any]) -> None:
    config = config_of("topk", **changes, **groups)
    check(config, lambda given, g, t: references.topk(given.logits[g, t], config))


def test_switch() -> None:
    check(config_of("switch"), lambda given, g, t: references.switch(given.logits[g, t]))


def test_gshard_in_training() -> None:
    check(config_of("gshard"), lambda given, g, t: references.gshard(given.logits[g, t], given.uniform[g, t]), scale=2.0)


def test_gshard_in_evaluation() -> None:
    check(config_of("gshard"), lambda given, g, t: references.gshard(given.logits[g, t], None), training=False)


def test_gshard_keeps_the_second_as_often_as_twice_its_gate() -> None:
    given, config = Given(g=1, T=20_000, E=4), config_of("gshard", num_experts=4)
    given.logits[:], given.valid[:] = np.log([0.6, 0.2, 0.1, 0.1]), True  # g2 / (g1 + g2) = 1/4
    given.uniform = np.random.default_rng(3).random((1, 20_000)).astype(np.float32)
    kept = route(config, given).expert[..., 1] >= 0
    assert abs(kept.mean() - 0.5) < 0.015


@pytest.mark.parametrize("groups", [{}, GROUPED, GROUPED | {"group_score": "max"}], ids=["all", "top2_sum", "max"])
@pytest.mark.parametrize("changes", [{}, {"renormalize": False}, {"routed_scaling": 2.5, "top_k": 3}])
def test_sigmoid_bias(changes: dict[str, Any], groups: dict[str, Any]) -> None:
    config = config_of("sigmoid_bias", **changes, **groups)
    check(config, lambda given, g, t: references.sigmoid_bias(given.logits[g, t], given.bias, config))
    given = Given(E=config.num_experts)
    score = references.sigmoid(given.logits)
    np.testing.assert_allclose(route(config, given).probability, score / score.sum(-1, keepdims=True), rtol=1e-5)


def test_bias_moves_the_choice_and_no_gate() -> None:
    given, config = Given(), config_of("sigmoid_bias", renormalize=False)
    given.bias[:] = 0
    given.bias[5] = 10
    out = route(config, given)
    assert np.all(out.expert[given.valid][:, 0] == 5)
    np.testing.assert_allclose(out.gate[given.valid][:, 0], references.sigmoid(given.logits[given.valid][:, 5]), rtol=1e-6)


def test_experts_lie_in_the_chosen_groups() -> None:
    """Group 0 has the best expert, group 1 the best two: DeepSeek-V3 takes group 1, DeepSeek-V2 group 0."""
    given = Given(g=1, T=1, E=4)
    given.logits[0, 0], given.valid[:], given.bias[:] = [3.0, -5.0, 2.0, 2.5], True, 0
    for score, want in (("top2_sum", [3, 2]), ("max", [0, 1])):
        config = config_of("sigmoid_bias", num_experts=4, num_groups=2, top_groups=1, group_score=score)
        np.testing.assert_array_equal(route(config, given).expert[0, 0], want)


@pytest.mark.parametrize("capacity", [1, 4, 16])
def test_expert_choice(capacity: int) -> None:
    given, config = Given(dtype=np.float64), config_of("expert_choice")
    given.logits[0, 3] = given.logits[0, 11]  # equal tokens: the earlier one first
    out = route(config, given, capacity=capacity)
    for g in range(given.g):
        expert, gate = references.expert_choice(given.logits[g], given.valid[g], capacity)
        np.testing.assert_array_equal(out.expert[g], expert)
        np.testing.assert_allclose(out.gate[g], gate, rtol=1e-10)
    assert np.all((out.expert >= 0).sum(axis=1) <= capacity)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("T", [16, 61])
def test_base_is_balanced_and_near_the_best_total(T: int, seed: int) -> None:
    given, config = Given(T=T, E=4, seed=seed, dtype=np.float64), config_of("base", num_experts=4)
    out = route(config, given)
    for g in range(given.g):
        logits, expert = given.logits[g][given.valid[g]], out.expert[g, given.valid[g], 0]
        room = -(-len(expert) // 4)
        assert np.bincount(expert, minlength=4).max() <= room
        total, largest = logits[np.arange(len(expert)), expert].sum(), references.best_balanced_total(logits, room)
        bit = (logits.max(-1) - logits.min(-1)).max() / base.BITS
        assert largest - len(expert) * bit <= total <= largest + 1e-9
        assert total > largest - 0.02 * abs(largest)
        np.testing.assert_allclose(out.gate[g, given.valid[g], 0], references.sigmoid(logits[np.arange(len(expert)), expert]), rtol=1e-10)


def test_base_finds_the_one_best_assignment() -> None:
    """All like expert 0; those that lose least go elsewhere."""
    given, config = Given(g=1, T=4, E=2), config_of("base", num_experts=2)
    given.valid[:] = True
    given.logits[0] = [[5, 4.5], [5, 0], [5, 4.8], [5, 1]]
    np.testing.assert_array_equal(route(config, given).expert[0, :, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(route(config, given, training=False).expert[0, :, 0], [0, 0, 0, 0])


def test_base_gives_equal_tokens_blocks_in_order() -> None:
    given, config = Given(g=1, T=8, E=4), config_of("base", num_experts=4)
    given.logits[:], given.valid[:] = 1e4, True
    np.testing.assert_array_equal(route(config, given).expert[0, :, 0], np.repeat(np.arange(4), 2))
    given.valid[0, [0, 5]] = False  # six tokens
    np.testing.assert_array_equal(route(config, given).expert[0, :, 0], [-1, 0, 0, 1, 1, -1, 2, 2])


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_base_leaves_nobody_out_when_rounds_end(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_ROUNDS", rounds)
    given = Given(T=29, E=4)
    expert = np.asarray(base.assign(jnp.asarray(given.logits), jnp.asarray(given.valid)))
    np.testing.assert_array_equal(expert >= 0, given.valid)
    for g in range(given.g):
        room = -(-given.valid[g].sum() // 4)
        assert np.bincount(expert[g, given.valid[g]], minlength=4).max() <= room


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_base_ends_by_itself(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rounds to spare, on scores where most tokens want the same expert."""
    given = Given(g=2, T=256, scale=scale)
    given.logits[..., 2] += 4 * scale
    scores, valid = jnp.asarray(given.logits), jnp.asarray(given.valid)
    want = np.asarray(base.assign(scores, valid))
    monkeypatch.setattr(base, "MAX_ROUNDS", base.MAX_ROUNDS // 2)
    np.testing.assert_array_equal(np.asarray(base.assign(scores, valid)), want)


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn(k: int) -> None:
    given, config = Given(dtype=np.float64, scale=2.0), config_of("sinkhorn", top_k=k)
    given.logits[..., 1] += 4
    out = route(config, given)
    for g in range(given.g):
        expert = references.sinkhorn_choice(given.logits[g], given.valid[g], config.sinkhorn_tolerance, k)
        np.testing.assert_array_equal(out.expert[g], expert)
        plain = [references.largest(row, k) for row in given.logits[g, given.valid[g]]]
        assert np.any(expert[given.valid[g]] != plain), "balancing must matter here"
        for t in np.flatnonzero(given.valid[g]):
            activation = (references.sigmoid if k == 1 else references.softmax)(given.logits[g, t])
            np.testing.assert_allclose(out.gate[g, t], activation[expert[t]], rtol=1e-10)
    out = route(config, given, training=False)
    plain = np.argsort(-given.logits, axis=-1)[..., :k]
    np.testing.assert_array_equal(out.expert[given.valid], plain[given.valid])


def test_hash_is_a_function_of_the_id_and_spreads() -> None:
    given, config = Given(g=1, T=8000), config_of("hash")
    given.valid[:], given.tokens = True, np.arange(8000, dtype=np.int32)[None]
    expert = route(config, given).expert[0, :, 0]
    given.tokens, given.logits = given.tokens[:, ::-1].copy(), -given.logits
    np.testing.assert_array_equal(route(config, given, training=False).expert[0, ::-1, 0], expert)
    load = np.bincount(expert, minlength=8)
    assert abs(load - 1000).max() < 120
    assert abs(np.mean(expert[1:] == expert[:-1]) - 1 / 8) < 0.02  # neighbours are not alike


def test_near_ties_are_told_apart() -> None:
    """Logits [0, 4.000, 0, 4.005]: expert 3, though bfloat16 has one number for both (ViperEkura/AstrAI PR 57)."""
    given = Given(g=1, T=1, E=4)
    given.logits[0, 0], given.valid[:], given.bias[:] = [0.0, 4.0, 0.0, 4.005], True, 0
    for name in ("topk", "switch", "gshard", "sigmoid_bias", "base", "sinkhorn"):
        config = config_of(name, num_experts=4)
        assert route(config, given, training=False).expert[0, 0, 0] == 3, name

"""Places in the experts' buffers against a loop over choices, and the published cases that concern them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.ops.routing.capacity import DropPolicy, places
from tests.ops.routing import references
from tests.ops.routing.given import Given, config_of, route

POLICIES: tuple[DropPolicy, ...] = ("position", "choice", "probability")


@st.composite
def choices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Experts and gates [g, T, k] of few shapes, so that little is compiled; some gates equal; capacity and number of experts."""
    shape = draw(st.sampled_from([(1, 1, 1), (2, 7, 2), (1, 12, 3), (3, 5, 1)]))
    num_experts = draw(st.integers(1, 5))
    size = int(np.prod(shape))
    low = draw(st.sampled_from([-1, 0]))
    expert = draw(st.lists(st.integers(low, num_experts - 1), min_size=size, max_size=size))
    gate = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=size, max_size=size))
    capacity = draw(st.integers(1, shape[1]))
    return np.array(expert, np.int32).reshape(shape), np.array(gate, np.float32).reshape(shape), num_experts, capacity


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=60)
@given(case=choices())
def test_places(policy: DropPolicy, case: tuple[np.ndarray, np.ndarray, int, int]) -> None:
    expert, gate, num_experts, capacity = case
    got = np.asarray(places(jnp.asarray(expert), jnp.asarray(gate), num_experts, capacity, policy))
    want = np.stack([references.places(e, p, num_experts, capacity, policy) for e, p in zip(expert, gate, strict=True)])
    np.testing.assert_array_equal(got, want)
    for g in range(len(expert)):
        for e in range(num_experts):  # no place twice, none empty before the last
            held = np.sort(got[g][expert[g] == e])
            kept = held[held >= 0]
            np.testing.assert_array_equal(kept, np.arange(min(capacity, len(held))))


@pytest.mark.parametrize("policy", POLICIES)
def test_all_to_one_expert(policy: DropPolicy) -> None:
    """8 tokens, 4 experts, factor 1: tokens 0 and 1 keep a place, 6 are dropped (deepspeedai/DeepSpeed #1658)."""
    config = config_of("switch", num_experts=4, capacity_factor=1.0)
    inputs = Given(g=1, T=8, E=4)
    inputs.logits[:], inputs.valid[:] = [9.0, 0, 0, 0], True
    out = route(config, inputs)
    capacity = config.capacity(8)
    assert capacity == 2
    place = np.asarray(places(jnp.asarray(out.expert), jnp.asarray(out.gate), 4, capacity, policy))
    np.testing.assert_array_equal(place[0, :, 0], [0, 1, -1, -1, -1, -1, -1, -1])


@pytest.mark.parametrize("policy", POLICIES)
def test_capacity_beyond_the_tokens(policy: DropPolicy) -> None:
    """8 tokens, 2 experts, top 2, factor 4 asks for 32: 8, and nobody is dropped (deepspeedai/DeepSpeed PR 5353, PR 8155)."""
    config = config_of("topk", num_experts=2, capacity_factor=4.0)
    inputs = Given(g=1, T=8, E=2)
    inputs.valid[:] = True
    out = route(config, inputs)
    assert config.capacity(8) == 8
    place = np.asarray(places(jnp.asarray(out.expert), jnp.asarray(out.gate), 2, 8, policy))
    assert np.all(place >= 0)
    chosen = route(config_of("expert_choice", num_experts=2), inputs, capacity=32)
    assert np.all(chosen.expert == [0, 1])


def test_policies_differ() -> None:
    """Two tokens, both choices on experts 0 and 1, room for one: each policy keeps others."""
    expert = jnp.array([[[0, 1], [1, 0], [0, 1]]], jnp.int32)
    gate = jnp.array([[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]], jnp.float32)
    kept = {policy: np.asarray(places(expert, gate, 2, 1, policy) >= 0)[0].astype(int).tolist() for policy in POLICIES}
    assert kept == {
        "position": [[1, 1], [0, 0], [0, 0]],
        "choice": [[1, 0], [1, 0], [0, 0]],
        "probability": [[0, 0], [1, 0], [1, 0]],
    }

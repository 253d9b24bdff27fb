"""Experts where others have failed: no tokens for some, gradients off by the size of an axis, losses that grow with microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.config.run import RunConfig
from tests.equivalence.harness import FLOAT64_GATE, config, gradients, initial, one_device, parts_of, relative_l2, rows_of

Edit = Callable[[dict[str, Any]], dict[str, Any]]  # of the blocks' experts and router
MOE: dict[str, Any] = {"model": {"moe": {"num_experts": 8, "top_k": 2, "capacity_factor": None}}}
FOUR = {"mesh": {"expert": 4, "data": 2}}


def edited(run: RunConfig, edit: Edit) -> Any:
    params = initial(run)
    return params | {"blocks": params["blocks"] | {"moe": edit(dict(params["blocks"]["moe"]))}}


def all_to_the_first_two(moe: dict[str, Any]) -> dict[str, Any]:
    bias = np.zeros_like(moe["router"]["bias"])
    bias[:, :2] = 5.0
    return moe | {"router": moe["router"] | {"bias": bias}}


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
def test_experts_without_tokens_have_gradients_of_zero(dispatch: str) -> None:
    """Case MOE-05: three devices get nothing, and nothing of them is NaN, or other than what one device has."""
    ragged = {"ragged_buffer_factor": 8.0} if dispatch == "ragged" else {}
    run = config(MOE, FOUR, {"model": {"moe": {"router": "sigmoid_bias", "dispatch": dispatch, **ragged}}})
    alone = config(MOE, {"model": {"moe": {"router": "sigmoid_bias", "dispatch": "local"}}})
    params, rows = edited(run, all_to_the_first_two), rows_of(run, 0)
    means, grads = gradients(run, rows, values=params)
    want_means, want = gradients(alone, rows, values=params)
    np.testing.assert_allclose(means["moe_load"][:, 2:], 0)
    for name, leaf in grads.items():
        assert np.isfinite(leaf).all(), name
        assert relative_l2(leaf, want[name]) < FLOAT64_GATE, name
    for name in ("gate", "up", "down"):
        kernel = grads[f"blocks.moe.experts.{name}.kernel"]
        assert not kernel[:, 2:].any()
        assert kernel[:, :2].any(axis=(2, 3)).all()
    assert abs(means["loss"] - want_means["loss"]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"mesh": {"expert": 8}}, {"mesh": {"expert": 2, "tensor": 2, "data": 2}, "zero_stage": 3}])
def test_expert_gradients_are_those_of_finite_differences(layout: dict[str, Any]) -> None:
    """Case MOE-06: the scale of an expert's gradient is that of the loss, whatever `expert` is."""
    run = config(MOE, layout, {"model": {"moe": {"router": "sigmoid_bias"}}})
    rows, step = rows_of(run, 0), 1e-4
    _, grads = gradients(run, rows, values=initial(run))
    for name, at in (("up", (2, 5, 7, 11)), ("down", (0, 0, 3, 1)), ("gate", (3, 7, 60, 100))):
        gradient = grads[f"blocks.moe.experts.{name}.kernel"][at]

        def moved(by: float, name: str = name, at: tuple[int, ...] = at) -> float:
            def edit(moe: dict[str, Any]) -> dict[str, Any]:
                kernel = moe["experts"][name]["kernel"].copy()
                kernel[at] += by
                return moe | {"experts": moe["experts"] | {name: {"kernel": kernel}}}

            return float(gradients(config(MOE, {"model": {"moe": {"router": "sigmoid_bias"}}}), rows, values=edited(run, edit))[0]["loss"])

        measured = (moved(step) - moved(-step)) / (2 * step)
        assert measured == pytest.approx(gradient, rel=1e-5, abs=1e-12), name


@pytest.mark.slow
def test_balance_does_not_grow_with_microbatches_or_shards() -> None:
    """Case MOE-10: a metric that is the same, and a gradient of the router that is there and the same."""
    coefficients = {"model": {"moe": {"balance_coefficient": 0.5, "capacity_factor": 1.25}}}
    run = config(MOE, coefficients, {"mesh": {"data": 4}, "num_microbatches": 4})
    means, grads = gradients(run, rows_of(run, 0))
    want_means, want = one_device(run)
    _, plain = one_device(config(MOE, {"model": {"moe": {"capacity_factor": 1.25}}}))
    router = "blocks.moe.router.kernel"
    np.testing.assert_allclose(means["moe_balance"], want_means["moe_balance"], rtol=1e-13)
    assert relative_l2(grads[router], want[router]) < FLOAT64_GATE
    assert relative_l2(want[router], plain[router]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
def test_a_token_changes_its_own_row_from_its_place_on(dispatch: str) -> None:
    """Case MOE-17: with expert and tensor above 1, rows do not mix, and nothing looks ahead."""
    run = config(
        MOE, {"mesh": {"data": 2, "expert": 2, "tensor": 2}}, {"model": {"moe": {"dispatch": dispatch}}, "data": {"global_batch_size": 8}}
    )
    rows = {name: a[:8] for name, a in rows_of(config(MOE), 0).items()}
    rows |= {"weights": np.ones_like(rows["weights"]), "segments": np.ones_like(rows["segments"])}
    rows |= {"positions": np.broadcast_to(np.arange(32, dtype=np.int32), (8, 32)).copy()}
    other = {name: a.copy() for name, a in rows.items()}
    other["tokens"][3, 20] = (other["tokens"][3, 20] + 1) % 96
    with jax.enable_x64(True):
        parts = parts_of(run)
        params = parts.init_state().params

        def loss(of: dict[str, np.ndarray], weights: np.ndarray) -> float:
            sums, _ = parts.eval_step(params, parts.feed.place(of | {"weights": weights}, 1))
            return float(sums["loss"])

        untouched, touched = np.ones((8, 32), np.float32), np.zeros((8, 32), np.float32)
        untouched[3, 20:] = 0
        touched[3, 20:] = 1
        assert loss(rows, untouched) == pytest.approx(loss(other, untouched), rel=1e-14)
        assert abs(loss(rows, touched) - loss(other, touched)) > 1e-6


def as_one_expert(blocks: dict[str, Any], router: dict[str, Any]) -> dict[str, Any]:
    """Weights of dense blocks as those of blocks with one expert, which every token goes to with a gate of 1."""
    experts = {name: {"kernel": leaf["kernel"][:, None]} for name, leaf in blocks["mlp"].items()}
    return {name: part for name, part in blocks.items() if name != "mlp"} | {"moe": {"experts": experts, "router": router}}


ONE_EXPERT: dict[str, Any] = {"model": {"moe": {"num_experts": 1, "top_k": 1, "capacity_factor": None}}}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"mesh": {"data": 2, "tensor": 2}, "zero_stage": 3}], ids=["one", "data2-tensor2"])
def test_one_expert_is_the_dense_model(layout: dict[str, Any]) -> None:
    """Loss and gradients; a router of one column has nothing to learn."""
    dense, run = config(), config(ONE_EXPERT, layout)
    params, rows = initial(dense), rows_of(dense, 0)
    router = initial(run)["blocks"]["moe"]["router"]
    want_means, want = gradients(dense, rows, values=params)
    means, got = gradients(run, rows, values=params | {"blocks": as_one_expert(params["blocks"], router)})
    assert means["loss"] == pytest.approx(want_means["loss"], rel=1e-12)
    np.testing.assert_array_equal(means["moe_load"], np.ones((4, 1)))
    assert not got.pop("blocks.moe.router.kernel").any()
    for name, leaf in got.items():
        expert = name.startswith("blocks.moe.experts.")
        same = want[name.replace("moe.experts", "mlp")]
        assert relative_l2(leaf, same[:, None] if expert else same) < FLOAT64_GATE, name


@pytest.mark.slow
def test_leading_dense_layers_run_in_the_order_of_their_numbers() -> None:
    """Eleven of them and a block of one expert are a dense model of twelve: layer 10 comes after 9, not after 1."""
    dense = config({"model": {"num_layers": 12}})
    run = config(ONE_EXPERT, {"model": {"num_layers": 12, "moe": {"leading_dense": 11}}})
    params, rows = initial(dense), rows_of(dense, 0)
    # Far from the initial values, so that a layer in another place gives another loss.
    rng = np.random.default_rng(0)
    blocks = jax.tree.map(lambda leaf: leaf + 0.2 * rng.standard_normal(leaf.shape), params["blocks"])
    leading = {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(11)}
    last = as_one_expert(jax.tree.map(lambda leaf: leaf[11:], blocks), initial(run)["blocks"]["moe"]["router"])

    def loss(run: RunConfig, values: Any) -> float:
        with jax.enable_x64(True):
            parts = parts_of(run)
            sums, weights = parts.eval_step(values, parts.feed.place(rows, 1))
            return float(sums["loss"] / weights["loss"])

    def loss_in_order(order: list[int]) -> float:
        return loss(dense, params | {"blocks": jax.tree.map(lambda leaf: leaf[order], blocks)})

    got = loss(run, params | {"embed": params["embed"] | {"layers": leading}, "blocks": last})
    assert got == pytest.approx(loss_in_order(list(range(12))), rel=1e-12)
    as_text = [*sorted(range(11), key=str), 11]
    assert abs(got - loss_in_order(as_text)) > 1e-3

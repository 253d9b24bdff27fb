"""Collectives, bytes, buffers and FLOPs of the train step with experts: those of the formulae, and nothing else is there."""

import dataclasses
import math
from typing import Any

import pytest

from jaxpar.build import Parts
from jaxpar.config.exchange import exchange_bytes
from jaxpar.parallel.dispatch.ragged import Ragged
from tests.compiled.test_collectives import trace
from tests.equivalence.harness import FLOAT32, config, parts_of
from tests.programs import Collective, collectives, dot_flops, equations, nbytes

LAYERS, EMBED, HIDDEN, SEQ, ROWS, EXPERTS = 4, 64, 128, 32, 16, 8
WIDTH = 4  # bytes of float32


def parts(*changes: dict[str, Any]) -> Parts:
    base = {"data": {"isolate_documents": False}, "model": {"moe": {"num_experts": EXPERTS, "top_k": 2, "capacity_factor": 1.25}}}
    return parts_of(config(FLOAT32, base, *changes))


def counted(p: Parts) -> tuple[dict[Collective, int], dict[Collective, int]]:
    arrays, moved = collectives(trace(p).jaxpr.jaxpr)
    return dict(arrays), dict(moved)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "mesh", [{"expert": 4}, {"expert": 2, "data": 2}, {"expert": 4, "tensor": 2}, {"expert": 2, "context": 2}], ids=lambda m: "-".join(m)
)
def test_two_all_to_alls_forward_and_two_backward_in_every_layer(mesh: dict[str, int], microbatches: int) -> None:
    p = parts({"mesh": mesh, "num_microbatches": microbatches, "context": {"method": "ring"}})
    arrays, moved = counted(p)
    exchanged = Collective("all_to_all", ("expert",))
    assert {key for key in arrays if key.kind == "all_to_all"} == {exchanged}
    assert arrays[exchanged] == 4 * LAYERS * microbatches
    rows = ROWS // (microbatches * mesh["expert"] * mesh.get("data", 1))
    capacity = 10  # ceil(32 x 2 / 8 x 1.25)
    places = rows * capacity // mesh.get("context", 1)
    gate_rows = math.ceil(places / EMBED)  # gradients of gates, behind those of an expert's rows
    assert moved[exchanged] == LAYERS * microbatches * EXPERTS * (4 * places + gate_rows) * EMBED * WIDTH
    # What leaves the device: all but its own share.
    assert exchange_bytes(p.config, p.layout) == moved[exchanged] * (mesh["expert"] - 1) // mesh["expert"]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "mesh", [{"expert": 4}, {"expert": 2, "data": 2}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 2}], ids=lambda m: "-".join(m)
)
def test_two_ragged_exchanges_forward_and_two_backward_in_every_layer(mesh: dict[str, int], microbatches: int) -> None:
    """The program for GPUs, traced: no padded all-to-all, and beside tokens only counts of choices are gathered over `expert`."""
    moe = {"dispatch": "ragged", "capacity_factor": None, "ragged_buffer_factor": 1.5}
    p = parts({"mesh": mesh, "num_microbatches": microbatches, "context": {"method": "ring"}, "model": {"moe": moe}})
    p = dataclasses.replace(p, forward=dataclasses.replace(p.forward, dispatch=Ragged(1.5, native=True)))
    arrays, moved = counted(p)
    exchanged = Collective("ragged_all_to_all", ("expert",))
    assert {key for key in arrays if "all_to_all" in key.kind} == {exchanged}
    assert arrays[exchanged] == 4 * LAYERS * microbatches
    ways = mesh["expert"]
    choices = 2 * ROWS * SEQ // (microbatches * ways * mesh.get("data", 1) * mesh.get("context", 1))
    # Beside the gradient of a row, in eight columns, that of its gate.
    assert moved[exchanged] == LAYERS * microbatches * choices * 3 // 2 * (4 * EMBED + 8) * WIDTH
    # Runs that are balanced hold what the buffers do without the factor, and a share of them stays.
    assert exchange_bytes(p.config, p.layout) * ways * 3 // 2 == moved[exchanged] * (ways - 1)
    gathered = [eqn for eqn, _ in equations(trace(p).jaxpr.jaxpr) if eqn.primitive.name.startswith("all_gather")]
    over_expert = [eqn.outvars[0].aval for eqn in gathered if "expert" in eqn.params["axis_name"]]
    assert {(a.dtype.kind, a.shape) for a in over_expert} == {("i", (ways, EXPERTS))}


def test_nothing_is_gathered_over_expert_and_its_experts_gradients_stay() -> None:
    """Over `expert` go tokens, and of parameters only the gradients of those that every device holds."""
    arrays, moved = counted(parts({"mesh": {"expert": 4}, "zero_stage": 0}))
    assert {key.kind for key in arrays} == {"all_to_all", "all_reduce"}
    attention = LAYERS * 4 * EMBED * EMBED
    router = LAYERS * EMBED * EXPERTS
    vectors, tables = (2 * LAYERS + 1) * EMBED, 2 * 96 * EMBED
    terms = 2 + LAYERS * (EXPERTS + 4 + 5)  # the loss; load, four more sums and five weights a layer
    assert moved[Collective("all_reduce", ("expert",))] == WIDTH * (attention + router + vectors + tables + terms)


def test_zero_3_gathers_experts_over_data_and_context_only() -> None:
    arrays, _ = counted(parts({"mesh": {"expert": 2, "data": 2, "context": 2}, "zero_stage": 3, "context": {"method": "all_gather"}}))
    gathers = {key.axes for key in arrays if key.kind == "all_gather"}
    assert ("data", "context") in gathers  # experts
    assert ("data", "expert", "context") in gathers  # the rest
    assert not any(axes == ("expert",) for axes in gathers)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_no_tokens_are_gathered_over_context(method: str) -> None:
    """But for keys and values of attention: choices (integers) and whether a token is padding are all that devices tell each other."""
    p = parts({"mesh": {"expert": 2, "context": 2}, "context": {"method": method}})
    gathered = [eqn for eqn, _ in equations(trace(p).jaxpr.jaxpr) if eqn.primitive.name.startswith("all_gather")]
    over_context = [eqn.outvars[0].aval for eqn in gathered if "context" in str(eqn.params["axis_name"])]
    whole = [a for a in over_context if a.dtype.kind == "f" and a.shape[-1] == EMBED]
    places = EXPERTS * (ROWS // 2) * 10
    # What comes back of the buffer; with a row of gates' gradients from each of the two.
    assert {a.shape for a in whole} == {(EXPERTS, places // EXPERTS, EMBED), (EXPERTS, places // EXPERTS + 2 * 1, EMBED)}
    assert max(nbytes(a) for a in over_context if a.dtype.kind in "ib") <= 4 * ROWS * SEQ * 2


def test_capacity_buffers_are_the_largest_arrays() -> None:
    """Nothing of tokens x experts x width exists, nor a one-hot of tokens x experts x places. Under full remat, for what layers keep is
    stacked."""
    p = parts({"mesh": {"expert": 2}, "data": {"seq_len": 2 * SEQ}, "remat": {"policy": "full"}, "model": {"num_heads": 2}})
    tokens, places = ROWS // 2 * 2 * SEQ, ROWS // 2 * 20
    shapes = {v.aval.shape for eqn, _ in equations(trace(p).jaxpr.jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")}
    parameters = {shape for shape in shapes if shape[:1] == (LAYERS,) and len(shape) == 4}
    assert (
        max(math.prod(shape) for shape in shapes - parameters)
        == EXPERTS * places * HIDDEN
        < min(tokens * EXPERTS * EMBED, tokens * EXPERTS * places)
    )


@pytest.mark.parametrize(("dispatch", "mesh"), [("local", {}), ("ragged", {}), ("ragged", {"expert": 2})])
def test_rows_of_expert_choice_are_those_that_have_places(dispatch: str, mesh: dict[str, int]) -> None:
    """Every token may go to every expert, but capacity bounds how many do: no array has a row for each token and expert."""
    moe = {"router": "expert_choice", "dispatch": dispatch, "capacity_factor": 1.0, "ragged_buffer_factor": 2.0}
    p = parts({"mesh": mesh, "remat": {"policy": "full"}, "model": {"moe": moe, "num_heads": 2}})
    ways = mesh.get("expert", 1)
    tokens, places = ROWS * SEQ // ways, EXPERTS * ROWS // ways * 8
    shapes = {v.aval.shape for eqn, _ in equations(trace(p).jaxpr.jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")}
    parameters = {shape for shape in shapes if shape[:1] == (LAYERS,) and len(shape) == 4}
    rows = {math.prod(shape[:-1]) for shape in shapes - parameters if shape[-1:] in ((EMBED,), (HIDDEN,))}
    buffer = places if ways == 1 else 2 * places  # that of `ragged` has twice the room
    tiles = 128 * EXPERTS // ways  # at most, one that is not full for each expert
    assert buffer <= max(rows) <= buffer + tiles < tokens * EXPERTS


@pytest.mark.parametrize(
    "mesh", [{}, {"expert": 4}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 2}], ids=lambda mesh: "-".join(mesh) or "one"
)
def test_experts_cost_what_their_tokens_do(mesh: dict[str, int]) -> None:
    """FLOPs of experts: top_k x tokens x capacity factor (rounded up to places), not num_experts x tokens; a device has its share."""
    dense = {"model": {"moe": None}}
    with_experts, without = parts({"mesh": mesh}), parts_of(config(FLOAT32, {"data": {"isolate_documents": False}}, dense, {"mesh": mesh}))
    tokens = ROWS * SEQ
    places = EXPERTS * ROWS * 10  # of all devices
    experts = 3 * 2 * places * 3 * EMBED * HIDDEN
    router = 3 * 2 * tokens * EMBED * EXPERTS
    mlp = 3 * 2 * tokens * 3 * EMBED * HIDDEN
    devices = len(with_experts.mesh.devices.flat)
    more = dot_flops(trace(with_experts).jaxpr.jaxpr) - dot_flops(trace(without).jaxpr.jaxpr)
    assert places == 1.25 * 2 * tokens
    # The router works on this device's tokens: under tensor and context each has its own.
    assert more == LAYERS * (experts + router - mlp) // devices


def test_the_bias_router_costs_one_small_reduction_a_step() -> None:
    """Loads come with the terms of the loss, in the one reduction at the end; nothing more for the bias."""
    plain, _ = counted(parts({"mesh": {"expert": 2, "data": 2}, "model": {"moe": {"router": "topk"}}}))
    biased, _ = counted(parts({"mesh": {"expert": 2, "data": 2}, "model": {"moe": {"router": "sigmoid_bias"}}}))
    extra = {key: biased[key] - plain.get(key, 0) for key in biased if biased[key] != plain.get(key, 0)}
    assert sum(extra.values()) <= 1  # the bias is a leaf whose gradient, zero, is reduced with the others


@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
def test_size_does_not_grow_with_experts_layers_or_microbatches(dispatch: str) -> None:
    def size(*changes: dict[str, Any]) -> int:
        p = parts({"mesh": {"expert": 2}, "model": {"moe": {"dispatch": dispatch}}, "num_microbatches": 2}, *changes)
        return sum(1 for _ in equations(trace(p).jaxpr.jaxpr))

    base = size()
    assert size({"model": {"moe": {"num_experts": 64}}}) == base
    assert size({"model": {"num_layers": 12}}) == base
    assert size({"num_microbatches": 4}) == base

"""Loss terms and every gradient leaf with experts, under any layout, equal one device's, on packed rows with uneven padding.

The one device dispatches `local`, without buffers or messages; routers, dispatchers, capacities and the rest of the layout are drawn.
"""

import math
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxpar.config.checks import check
from jaxpar.config.run import RunConfig
from tests.equivalence.harness import FLOAT32, assert_float32, assert_float64, config, gradients, num_devices, one_device, rows_of

# Each router with the options that make its code run: one model a row, so that draws share their references.
ROUTERS: dict[str, dict[str, Any]] = {
    "topk": {"balance_coefficient": 0.01, "router_z_coefficient": 0.001},
    "topk after": {"router": "topk", "softmax": "after", "top_k": 3, "drop_policy": "probability", "entropy_coefficient": 0.01},
    "topk choice": {"router": "topk", "drop_policy": "choice", "renormalize_after_drop": True, "jitter": 0.1},
    "switch": {"top_k": 1, "balance_coefficient": 0.01, "routing_group_sequences": 2},
    "gshard": {"balance_coefficient": 0.01, "balance_counts": "first", "drop_policy": "choice"},
    "sigmoid_bias": {"num_groups": 4, "top_groups": 2, "routed_scaling": 2.5, "shared_experts": 1},
    "expert_choice": {"routing_group_sequences": 2},
    "base": {"top_k": 1},
    "sinkhorn": {"top_k": 1},
    "hash": {"top_k": 1, "capacity_factor": 2.0},
    "dropless": {"router": "topk", "capacity_factor": None, "balance_coefficient": 0.01, "balance_scope": "sequence"},
    "beside": {"router": "topk", "residual": True, "shared_experts": 2, "shared_gate": True, "balance_scope": "global"}
    | {"balance_coefficient": 0.01},
    "mixed": {"router": "topk", "every": 2, "leading_dense": 2, "router_z_coefficient": 0.001},
}
NAMES = tuple(ROUTERS)
NUM_CASES = 65
DEFAULT = (5,)  # the others are slow


@cache
def draw(index: int) -> RunConfig:
    """The case's router and the rest of its layout."""
    rng = random.Random(4000 + index)
    name = NAMES[index % len(NAMES)]
    moe = {"num_experts": 8, "router": name if " " not in name else "topk", "capacity_factor": 1.0, **ROUTERS[name]}
    while True:
        mesh = {axis: rng.choice([1, 1, 2, 4]) for axis in ("replica", "data", "context", "tensor")}
        mesh["pipe"] = rng.choice([1, 1, 2, 2, 4])
        mesh["expert"] = rng.choice([1, 2, 2, 2, 4, 4, 8])
        if not 1 < math.prod(mesh.values()) <= 8:
            continue
        pipe, shards = mesh["pipe"], mesh["replica"] * mesh["data"] * mesh["expert"]
        microbatches = rng.choice([1, 2, 3]) if pipe == 1 else rng.choice([pipe, pipe + 1, 2 * pipe + 1])
        ragged = {"dispatch": "ragged", "ragged_buffer_factor": 8.0}
        dispatch = ragged if index % 3 == 1 else {"dispatch": "all_to_all"}
        change = {
            "mesh": mesh,
            "model": {
                "num_layers": 6 if "every" in moe else 4,
                "dropout": rng.choice([0.0, 0.1]),
                "moe": {**moe, **dispatch, "expert_dim": rng.choice([64, None])},
            },
            "num_microbatches": microbatches,
            "data": {"global_batch_size": microbatches * shards * moe.get("routing_group_sequences", 1)},
            "pipeline": {"schedule": rng.choice(["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])},
            "zero_stage": rng.choice([0, 1, 2, 3]),
            "sequence_parallel": rng.random() < 0.7,
            "context": {"method": rng.choice(["ring", "all_gather", "ulysses"])},
            "remat": {"policy": rng.choice(["none", "selective"] if pipe > 1 else ["none", "full", "selective"])},
        }
        run = config(change)
        if run.data.global_batch_size <= 32 and not check(run, num_devices(run)):
            return run


def describe(index: int) -> str:
    run = draw(index)
    mesh = "-".join(f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1)
    name = NAMES[index % len(NAMES)].replace(" ", "_")
    moe = run.model.moe
    assert moe is not None
    schedule = f"-{run.pipeline.schedule}" if run.mesh.pipe > 1 else ""
    return f"{index}-{name}-{moe.dispatch}-{mesh}{schedule}-m{run.num_microbatches}-z{run.zero_stage}-{run.remat.policy}"


@pytest.mark.parametrize(
    "index", [pytest.param(i, id=describe(i), marks=[] if i in DEFAULT else [pytest.mark.slow]) for i in range(NUM_CASES)]
)
def test_float64_gate(index: int) -> None:
    assert_float64(draw(index))


@pytest.mark.slow
def test_float32_gate() -> None:
    assert_float32(config({"model": {"moe": {"num_experts": 8, "capacity_factor": None}}, "mesh": {"expert": 4, "tensor": 2}}, FLOAT32))


def test_the_draw_covers_what_it_should() -> None:
    runs = [draw(i) for i in range(NUM_CASES)]
    moes = [run.model.moe for run in runs]
    assert {(moe.router, moe.dispatch) for moe in moes if moe} >= {
        (r, d) for r in ("topk", "sigmoid_bias") for d in ("all_to_all", "ragged")
    }
    assert {moe.router for moe in moes if moe} == {"topk", "switch", "gshard", "sigmoid_bias", "expert_choice", "base", "sinkhorn", "hash"}
    assert {run.zero_stage for run in runs if run.mesh.expert > 1} == {0, 1, 2, 3}
    assert {run.mesh.expert for run in runs} == {1, 2, 4, 8}
    assert all(
        any(run.mesh.sizes[axis] > 1 and run.mesh.expert > 1 for run in runs) for axis in ("pipe", "replica", "data", "context", "tensor")
    )
    assert len({run.pipeline.schedule for run in runs if run.mesh.pipe > 1 and run.mesh.expert > 1}) >= 4
    assert any(run.mesh.tensor > 1 and not run.sequence_parallel for run in runs)
    assert {run.remat.policy for run in runs} == {"none", "full", "selective"}
    assert any(run.num_microbatches > 1 and run.mesh.pipe == 1 for run in runs)


LAYOUTS = [
    ({"mesh": {"expert": 2}}, 1),
    ({"mesh": {"expert": 2, "context": 2, "tensor": 2}}, 2),
    ({"mesh": {"data": 4}}, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "microbatches"), LAYOUTS)
@pytest.mark.parametrize("policy", ["position", "choice", "probability"])
def test_the_same_choices_are_dropped_under_any_layout(layout: dict[str, Any], microbatches: int, policy: str) -> None:
    """Counts of what each block drops and of each expert's load are whole numbers: equal ones are the same sets here."""
    base = {"model": {"moe": {"num_experts": 8, "capacity_factor": 0.7, "drop_policy": policy}}, "data": {"global_batch_size": 16}}
    run = config(base, layout, {"num_microbatches": microbatches})
    means, _ = gradients(run, rows_of(run, 0))
    want, _ = one_device(run)
    assert np.asarray(want["moe_dropped"]).min() > 0.05
    for name in ("moe_dropped", "moe_load"):
        np.testing.assert_allclose(means[name], want[name], rtol=0, atol=1e-15)

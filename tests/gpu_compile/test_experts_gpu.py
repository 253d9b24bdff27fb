"""Experts as XLA compiles them for H100s, without one: tokens travel in bfloat16, other work stands between start and done."""

import re
from functools import cache
from typing import Any

import pytest
from jax.experimental import topologies

from jaxpar.build import build
from jaxpar.config.run import RunConfig
from tests.gpu_compile.test_pipeline_gpu import H100

pytestmark = pytest.mark.gpu_compile

SEQ, EMBED, EXPERTS, ROWS = 256, 512, 16, 16


@cache
def program(dispatch: str) -> list[str]:
    """Lines of the scheduled program of a train step on 8 GPUs."""
    moe: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "dispatch": dispatch, "shared_experts": 1}
    config = RunConfig.model_validate(
        {
            "model": {"num_layers": 3, "embed_dim": EMBED, "num_heads": 8, "mlp_dim": 1024, "vocab_size": 1024}
            | {"moe": moe | ({"capacity_factor": None} if dispatch == "ragged" else {})},
            "mesh": {"expert": 4, "data": 2},
            "attention": "xla",
            "data": {"source": "synthetic", "seq_len": SEQ, "global_batch_size": ROWS, "isolate_documents": False},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 10},
        }
    )
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x8")
    parts = build(config, devices=list(topology.devices))
    batch = parts.feed.abstract(ROWS, 1)
    compiled = parts.train_step.trace(parts.placement.state, batch).lower(lowering_platforms=("cuda",)).compile()
    return (compiled.as_text() or "").splitlines()


def starts(lines: list[str], kind: str) -> list[int]:
    return [i for i, line in enumerate(lines) if f" {kind}-start(" in line]


def test_four_all_to_alls_a_layer_in_bfloat16() -> None:
    lines = program("all_to_all")
    found = starts(lines, "all-to-all")
    assert len(found) == 4
    places = ROWS // 8 * 40  # ceil(256 x 2 / 16 x 1.25) for each of a device's rows
    with_gates = places + 1  # gradients of gates, two numbers each, in a row behind those of an expert's rows
    legal = [sorted([e, ways * n, EMBED]) for n in (places, with_gates) for e, ways in ((EXPERTS, 1), (EXPERTS // 4, 4))]
    for i in found:
        (shape,) = set(re.findall(r"(\w+\[[\d,]+\])", lines[i].split(" all-to-all-start(")[0]))
        dtype, dims = shape[:-1].split("[")
        assert dtype == "bf16"
        sizes = [int(n) for n in dims.split(",")]
        assert sorted(sizes) in legal, shape
        assert "{{0,1,2,3},{4,5,6,7}}" in lines[i]


def test_products_stand_between_start_and_done() -> None:
    """What does not wait for the exchange (shared experts) runs meanwhile: in the scheduled program, in at least one exchange each way."""
    lines = program("all_to_all")
    overlapped = []
    for i in starts(lines, "all-to-all"):
        name = re.search(r"%(all-to-all-start[.\d]*) =", lines[i])
        assert name is not None
        done = next(j for j in range(i, len(lines)) if f"all-to-all-done(%{name[1]})" in lines[j])
        between = [line for line in lines[i + 1 : done] if re.search(r"gemm_fusion|cublas|__cudnn|custom-call", line.split("metadata")[0])]
        overlapped.append((bool(between), "transpose(jvp" in lines[i]))
    assert (True, False) in overlapped
    assert (True, True) in overlapped


def test_ragged_runs_are_exchanged_natively() -> None:
    lines = program("ragged")
    assert len(starts(lines, "ragged-all-to-all")) == 4
    gathered = [line for line in lines if " all-gather-start(" in line and "{{0,1,2,3},{4,5,6,7}}" in line]
    assert all(re.search(r"s32\[", line) for line in gathered), "over `expert` only counts are gathered"
    assert not [line for line in lines if " all-to-all-start(" in line]

"""The program of a pipeline as XLA compiles it for H100s, without one: messages between stages stay what they are.

GSPMD has been seen to gather around a collective-permute (openxla/xla 20808); with every axis manual nothing may.
"""

import re
from functools import cache
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import topologies

from jaxpar.build import Parts, build
from jaxpar.config.run import RunConfig

pytestmark = pytest.mark.gpu_compile

# An H100 SXM as XLA describes it (GpuTargetConfigProto).
H100 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 28 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
SEQ, EMBED, TENSOR = 1024, 512, 8


class Op(NamedTuple):
    """One collective of the compiled program: kind, the arrays it takes and gives, its devices, where it comes from."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    devices: str
    name: str


def parts(schedule: str, microbatches: int) -> Parts:
    config = RunConfig.model_validate(
        {
            "model": {"num_layers": 8, "embed_dim": EMBED, "num_heads": 8, "mlp_dim": 2048, "vocab_size": 4096},
            "mesh": {"pipe": 4, "tensor": TENSOR},
            "num_microbatches": microbatches,
            "pipeline": {"schedule": schedule},
            "attention": "xla",
            "data": {"source": "synthetic", "seq_len": SEQ, "global_batch_size": microbatches, "isolate_documents": False},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 10},
        }
    )
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x4x8")
    return build(config, devices=list(topology.devices))


@cache
def compiled(schedule: str, microbatches: int) -> jax.stages.Compiled:
    p = parts(schedule, microbatches)
    batch = p.feed.abstract(p.config.data.global_batch_size, microbatches)
    return p.train_step.trace(p.placement.state, batch).lower(lowering_platforms=("cuda",)).compile()


def collectives(schedule: str, microbatches: int) -> list[Op]:
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
    found = []
    for line in (compiled(schedule, microbatches).as_text() or "").splitlines():
        if op := re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line):
            shapes = tuple(tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\d+\[([\d,]+)\]", op[1]))
            devices = re.search(r"(?:source_target_pairs|replica_groups)=(\{\{.*?\}\})", line)
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(Op(op[2], shapes, devices[1] if devices else "", name[1] if name else ""))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_stages_send_the_local_boundary_and_nothing_is_gathered_around_it(schedule: str) -> None:
    ops = collectives(schedule, 8)
    permutes = [op for op in ops if op.kind == "collective-permute"]
    assert permutes
    local = (1, SEQ // TENSOR, EMBED)
    assert {shape for op in permutes for shape in op.shapes} == {local}
    for op in permutes:
        pairs = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", op.devices)]
        assert all(abs(source - target) in (TENSOR, 3 * TENSOR) for source, target in pairs), op
    tensor_groups = "{" + ",".join("{" + ",".join(str(s * TENSOR + t) for t in range(TENSOR)) + "}" for s in range(4)) + "}"
    in_loop = [op for op in ops if "while" in op.name and op.kind != "collective-permute"]
    assert in_loop
    assert {op.devices for op in in_loop} == {tensor_groups}


def test_program_does_not_grow_with_microbatches() -> None:
    def size(microbatches: int) -> int:
        return sum(" = " in line for line in (compiled("1f1b", microbatches).as_text() or "").splitlines())

    assert size(64) <= 1.02 * size(8)


def test_memory_of_1f1b_does_not_grow_with_microbatches() -> None:
    def temporaries(microbatches: int) -> Any:
        memory = compiled("1f1b", microbatches).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    tokens = 3 * 4 * (64 - 8) * SEQ
    assert temporaries(64) <= temporaries(8) + tokens

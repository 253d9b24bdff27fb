"""Collectives of the train step: kinds, counts and bytes are those of the formulae, and nothing else is there.

Counted on the traced program, times the trips of its loops; the compiled program adds no other kind (facts: DP all-reduce of
all parameters; ZeRO-1 and 2 reduce-scatter + all-gather; ZeRO-3 all-gather forward and backward + reduce-scatter; sequence
parallelism all-gather + reduce-scatter pairs).
"""

from typing import Any

import jax
import pytest

from jaxpar.build import Parts
from jaxpar.mesh.specs import is_plan
from tests.equivalence.harness import FLOAT32, config, parts_of
from tests.programs import Collective, collectives, hlo_kinds

LAYERS, EMBED, MLP, VOCAB, SEQ, ROWS = 4, 64, 128, 96, 32, 16
WIDTH = 4  # bytes of float32
MATRICES_A_LAYER = 7
MATRICES = LAYERS * (4 * EMBED * EMBED + 3 * EMBED * MLP) + 2 * VOCAB * EMBED
VECTORS = (2 * LAYERS + 1) * EMBED
SCALARS = 2  # number of valid tokens, sum of losses


def parts(change: dict[str, Any]) -> Parts:
    return parts_of(config(FLOAT32, {"data": {"isolate_documents": False}}, change))


def trace(p: Parts) -> jax.stages.Traced:
    batch = p.feed.abstract(p.config.data.global_batch_size, p.config.num_microbatches)
    return p.train_step.trace(p.placement.state, batch)


def count(p: Parts) -> tuple[dict[Collective, int], dict[Collective, int]]:
    arrays, moved = collectives(trace(p).jaxpr.jaxpr)
    return dict(arrays), dict(moved)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_data_parallel_is_one_all_reduce_of_all_gradients(num_microbatches: int) -> None:
    arrays, moved = count(parts({"mesh": {"data": 4}, "num_microbatches": num_microbatches}))
    only = Collective("all_reduce", ("data",))
    assert arrays == {only: 2 + MATRICES_A_LAYER + 3 + SCALARS}
    assert moved == {only: WIDTH * (MATRICES + VECTORS + SCALARS)}


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_reduce_scatter_gradients(stage: int, num_microbatches: int) -> None:
    p = parts({"mesh": {"data": 4}, "zero_stage": stage, "num_microbatches": num_microbatches})
    arrays, moved = count(p)
    times = num_microbatches if stage == 2 else 1
    scatter, reduce = Collective("reduce_scatter", ("data",)), Collective("all_reduce", ("data",))
    assert arrays == {scatter: times * (MATRICES_A_LAYER + 2), reduce: 3 + SCALARS}
    assert moved == {scatter: times * WIDTH * MATRICES, reduce: WIDTH * (VECTORS + SCALARS)}


@pytest.mark.parametrize(("mlp", "a_layer"), [(MLP, 1), (8192, 1 + 3)], ids=["all_small", "three_large"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_zero_3_gathers_twice_and_scatters_once(policy: str, num_microbatches: int, mlp: int, a_layer: int) -> None:
    """Forward and backward gather a layer's weights, small ones in one collective; tables once a microbatch, kept till their backward."""
    change = {"model": {"mlp_dim": mlp}, "num_microbatches": num_microbatches, "remat": {"policy": policy}}
    arrays, moved = count(parts({"mesh": {"data": 4}, "zero_stage": 3} | change))
    blocks, tables = LAYERS * (4 * EMBED * EMBED + 3 * EMBED * mlp), 2 * VOCAB * EMBED
    gather, scatter, reduce = (Collective(kind, ("data",)) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    assert arrays == {
        gather: num_microbatches * (2 * LAYERS * a_layer + 2),
        scatter: num_microbatches * (LAYERS * a_layer + 2),
        reduce: 3 + SCALARS,
    }
    assert moved[gather] == num_microbatches * WIDTH * (2 * blocks + tables)
    assert moved[scatter] == num_microbatches * WIDTH * (blocks + tables)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hybrid_sharding_sends_shards_over_replica_once(stage: int) -> None:
    """ZeRO stays within `data`; over the slow `replica` axis goes a shard of each matrix, once a step, and never a parameter."""
    num_microbatches = 2
    arrays, moved = count(parts({"mesh": {"replica": 2, "data": 4}, "zero_stage": stage, "num_microbatches": num_microbatches}))
    whole = Collective("all_reduce", ("replica", "data"))
    if stage == 0:
        assert moved == {whole: WIDTH * (MATRICES + VECTORS + SCALARS)}
        return
    assert {key.kind for key in moved if "replica" in key.axes} == {"all_reduce"}
    assert moved[Collective("all_reduce", ("replica",))] == WIDTH * MATRICES // 4
    assert moved[whole] == WIDTH * (VECTORS + SCALARS)
    assert moved[Collective("reduce_scatter", ("data",))] == (num_microbatches if stage > 1 else 1) * WIDTH * MATRICES
    assert arrays[Collective("all_reduce", ("replica",))] == MATRICES_A_LAYER + 2


def test_tensor_and_sequence_parallel() -> None:
    """Per layer 2 all-gathers and 2 reduce-scatters forward, as many backward; the embedding scatters, the head gathers."""
    arrays, moved = count(parts({"mesh": {"tensor": 4}}))
    activation = ROWS * SEQ * EMBED * WIDTH
    gather, scatter = Collective("all_gather", ("tensor",)), Collective("reduce_scatter", ("tensor",))
    assert arrays[gather] == LAYERS * (2 + 2) + 2
    assert arrays[scatter] == LAYERS * (2 + 2) + 2
    assert moved[gather] == moved[scatter] == activation * (LAYERS * 4 + 2)
    # Statistics of the split vocabulary (maximum; sum of exponentials and gold logit), and gradients of the norms' scales.
    rest = {key: n for key, n in moved.items() if key not in (gather, scatter)}
    assert rest == {Collective("all_reduce", ("tensor",)): WIDTH * (3 * ROWS * SEQ + VECTORS)}


def test_tensor_without_sequence_parallel_is_two_all_reduces_each_way() -> None:
    arrays, moved = count(parts({"mesh": {"tensor": 4}, "sequence_parallel": False}))
    activation = ROWS * SEQ * EMBED * WIDTH
    only = Collective("all_reduce", ("tensor",))
    assert set(moved) == {only}
    assert arrays[only] == LAYERS * (2 + 2) + 2 + 2
    assert moved[only] == activation * (LAYERS * 4 + 2) + WIDTH * 3 * ROWS * SEQ


@pytest.mark.parametrize(
    ("method", "kinds"), [("ring", {"permute"}), ("all_gather", {"all_gather", "reduce_scatter"}), ("ulysses", {"all_to_all"})]
)
def test_context_parallel_adds_its_own_kind_and_the_gradient_reduction(method: str, kinds: set[str]) -> None:
    """Bytes of n ranks for k and v of a layer: ring n - 1 hops forward, n - 1 and n (dk, dv) backward; all-gather, reduce-scatter of the
    whole; Ulysses q, k, v in and o out, each way."""
    ways = 4
    arrays, moved = count(parts({"mesh": {"context": ways}, "context": {"method": method}}))
    assert {key.kind for key in arrays} == kinds | {"all_reduce"}
    whole = ROWS * SEQ * EMBED * WIDTH  # one of q, k, v, o: as many key-value heads as heads
    hops = 2 * (ways - 1) + ways
    want = {"ring": hops * 2 * whole // ways, "all_gather": 2 * whole, "ulysses": 2 * 4 * whole // ways}
    assert {moved[key] for key in moved if key.kind in kinds} == {LAYERS * want[method]}
    assert arrays[Collective("all_reduce", ("context",))] == 2 + MATRICES_A_LAYER + 3 + SCALARS


COMPILED: list[tuple[str, dict[str, Any], set[str]]] = [
    ("data", {"mesh": {"data": 4}}, {"all-reduce"}),
    ("zero1", {"mesh": {"data": 4}, "zero_stage": 1}, {"all-reduce", "reduce-scatter", "all-gather"}),
    ("zero3", {"mesh": {"data": 4}, "zero_stage": 3}, {"all-reduce", "reduce-scatter", "all-gather"}),
    ("tensor", {"mesh": {"tensor": 4}}, {"all-reduce", "reduce-scatter", "all-gather"}),
    ("ring", {"mesh": {"context": 4}}, {"all-reduce", "collective-permute"}),
]


@pytest.mark.parametrize(("change", "kinds"), [c[1:] for c in COMPILED], ids=[c[0] for c in COMPILED])
def test_compilation_adds_no_other_kind_and_memory_is_the_formula(change: dict[str, Any], kinds: set[str]) -> None:
    p = parts({"optimizer": {"name": "adamw"}} | change)
    compiled = trace(p).lower().compile()
    assert hlo_kinds(compiled) == kinds
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes == state_bytes(p) + batch_bytes(p)


def state_bytes(p: Parts) -> int:
    """Bytes of a device's parameters and two moments by the plans, and two counters."""
    zero = p.layout.zero_axes
    total = 8
    for plan in jax.tree.leaves(p.placement.plans, is_leaf=is_plan):
        size = WIDTH
        for n in plan.shape:
            size *= n
        split = p.layout.size(tuple(axis for axes in plan.axes for axis in axes))
        for stage, copies in ((3, 1), (1, 2)):
            sharded = p.layout.zero_stage >= stage and plan.zero_dim is not None
            total += copies * size // split // (p.layout.size(zero) if sharded else 1)
    return total


def batch_bytes(p: Parts) -> int:
    """Tokens, targets and weights; without dropout nothing reads the samples' numbers, and jit drops them."""
    rows = ROWS // p.layout.size(p.layout.batch_axes)
    return rows * 3 * WIDTH * SEQ // p.layout.size(p.layout.context_axes)

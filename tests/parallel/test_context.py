"""Context parallelism: every method equals one device, leaks nothing, and costs the collectives and FLOPs that its file states."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.mesh.sequence import local_index, natural_order, sequence_order
from jaxpar.ops.attention import KERNELS, AttentionSpec, DropoutWords, Kernel, Visibility
from jaxpar.ops.attention_xla import causal_blocks
from jaxpar.parallel.context.local import attend as attend_local
from jaxpar.parallel.context.select import METHODS, select
from jaxpar.parallel.context.ulysses import kv_repeats
from tests.programs import equations, flops_of

Equations = list[tuple[Any, int]]  # equations of a jaxpr, each with how often it runs
ROWS, SEQ, HEADS, HEAD_DIM = 2, 32, 8, 8


@dataclass(frozen=True)
class Case:
    """One attention problem and the mesh that it is spread over."""

    spec: AttentionSpec
    ways: int
    data: int
    kv_heads: int
    packed: bool


CASES = {
    "mha": Case(AttentionSpec(), ways=2, data=1, kv_heads=8, packed=False),
    "gqa_packed": Case(AttentionSpec(), ways=4, data=2, kv_heads=2, packed=True),
    "window_softcap_packed": Case(AttentionSpec(window=7, softcap=2.0), ways=2, data=2, kv_heads=4, packed=True),
    "window_dropout": Case(AttentionSpec(window=11, dropout=0.3), ways=2, data=1, kv_heads=4, packed=False),
    "ways8_packed": Case(AttentionSpec(), ways=8, data=1, kv_heads=1, packed=True),
    "not_causal_packed": Case(AttentionSpec(causal=False), ways=4, data=1, kv_heads=8, packed=True),
}
EVERY = [(method, name) for method in METHODS for name in CASES]


def segments() -> np.ndarray:
    """Row 0: three documents and padding after them that fills whole shards; row 1: padding only."""
    rows = np.zeros((ROWS, SEQ), np.int32)
    for document, (start, end) in enumerate(((0, 5), (5, 16), (16, 19)), start=1):
        rows[0, start:end] = document
    return rows


def inputs(case: Case, dtype: Any) -> list[np.ndarray]:
    """q, k, v and the gradient of o: the same numbers in every dtype."""
    rng = np.random.default_rng(11)
    shapes = [(ROWS, SEQ, heads, HEAD_DIM) for heads in (HEADS, case.kv_heads, case.kv_heads, HEADS)]
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def words_for(case: Case, row_b: Any) -> DropoutWords | None:
    return DropoutWords((jnp.uint32(1), jnp.uint32(2)), row_b, jnp.arange(HEADS)) if case.spec.dropout else None


def mesh_of(case: Case) -> jax.sharding.Mesh:
    sizes = (case.data, case.ways)
    return jax.make_mesh(sizes, ("data", "context"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: math.prod(sizes)])


def spread(method: str, case: Case, kernel: Kernel = KERNELS["xla"], backward: bool = True, seq: int = SEQ) -> Any:
    """(q, k, v, do, segments), sequence in stored order -> (o, dq, dk, dv), or o alone."""

    def step(q: Any, k: Any, v: Any, do: Any, segments_bS: Any) -> Any:
        index_S = local_index(seq, case.ways, method, lax.axis_index("context"))
        row_b = lax.axis_index("data") * q.shape[0] + jnp.arange(q.shape[0], dtype=jnp.int32)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return select(method, case.ways)(
                q,
                k,
                v,
                kernel=kernel,
                spec=case.spec,
                axis="context",
                ways=case.ways,
                index_S=index_S,
                segments_bS=segments_bS if case.packed else None,
                dropout_words=words_for(case, row_b),
            )

        if not backward:
            return attend(q, k, v)
        o, pull = jax.vjp(attend, q, k, v)
        return (o, *pull(do))

    split = P("data", "context")
    return jax.shard_map(step, mesh=mesh_of(case), in_specs=(split,) * 5, out_specs=(split,) * 4 if backward else split)


@functools.cache
def compiled(method: str, name: str) -> Any:
    return jax.jit(spread(method, CASES[name]))


def on_mesh(method: str, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Inputs and outputs in natural order."""
    case = CASES[name]
    order, back = (f(SEQ, case.ways, method) for f in (sequence_order, natural_order))
    return [np.asarray(x)[:, back] for x in compiled(method, name)(*(x[:, order] for x in (*arrays, segments())))]


@functools.cache
def one_device(name: str, dtype: Any) -> list[np.ndarray]:
    case = CASES[name]
    index = jnp.arange(SEQ, dtype=jnp.int32)
    packed = jnp.asarray(segments()) if case.packed else None

    @jax.jit
    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            words = words_for(case, jnp.arange(ROWS, dtype=jnp.int32))
            return attend_local(
                q, k, v, kernel=KERNELS["reference"], spec=case.spec, index_S=index, segments_bS=packed, dropout_words=words
            )

        o, pull = jax.vjp(attend, q, k, v)
        return (o, *pull(do))

    return [np.asarray(x) for x in both(*inputs(case, dtype))]


def errors(want: list[np.ndarray], got: list[np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in zip(want, got, strict=True)]


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_equals_one_device_in_float64(method: str, name: str) -> None:
    with jax.enable_x64(True):
        got = on_mesh(method, name, inputs(CASES[name], np.float64))
        assert max(errors(one_device(name, np.float64), got)) < 1e-11
    if CASES[name].packed:  # NUM-10: a row of padding, so shards with no visible key
        assert all((x[1] == 0).all() and np.isfinite(x).all() for x in got)


@pytest.mark.parametrize(("method", "name"), [pair for pair in EVERY if CASES[pair[1]].spec.causal])
def test_no_gradient_reaches_a_later_token(method: str, name: str) -> None:
    """Exact zeros: a loss on the first tokens only."""
    q, k, v, do = inputs(CASES[name], np.float64)
    last = 13
    do[:, last + 1 :] = 0
    with jax.enable_x64(True):
        grads = on_mesh(method, name, [q, k, v, do])[1:]
    for grad in grads:
        assert (grad[:, last + 1 :] == 0).all()
        assert (grad[0, : last + 1] != 0).any(axis=(-1, -2)).sum() > 3


@pytest.mark.parametrize(("method", "name"), [pair for pair in EVERY if CASES[pair[1]].packed])
def test_no_gradient_reaches_another_document(method: str, name: str) -> None:
    """Exact zeros: a loss on the second document only (CTX-06)."""
    q, k, v, do = inputs(CASES[name], np.float64)
    mine = segments() == 2
    do[~mine] = 0
    with jax.enable_x64(True):
        grads = on_mesh(method, name, [q, k, v, do])[1:]
    for grad in grads:
        assert (grad[~mine] == 0).all()
        assert (grad[mine] != 0).any()


@pytest.mark.parametrize("method", METHODS)
def test_float32_error_is_that_of_one_device(method: str) -> None:
    """Design section 8: at most 4 times the error of one device in float32 against float64."""
    name = "mha"
    with jax.enable_x64(True):
        exact = one_device(name, np.float64)
    got = on_mesh(method, name, inputs(CASES[name], np.float32))
    for plain, spread_out in zip(errors(exact, one_device(name, np.float32)), errors(exact, got), strict=True):
        assert spread_out <= 4 * plain


# --- What it costs, read from the traced program ---


COLLECTIVES = ("ppermute", "all_gather", "reduce_scatter", "all_to_all", "psum", "psum_invariant", "pbroadcast", "pmax")


def trace(method: str, case: Case, backward: bool = True, seq: int = SEQ, kernel: str = "xla") -> Equations:
    dtype = jnp.bfloat16 if kernel == "cudnn" else jnp.float32
    arrays = [jax.ShapeDtypeStruct((ROWS, seq, n, HEAD_DIM), dtype) for n in (HEADS, case.kv_heads, case.kv_heads, HEADS)]
    packed = jax.ShapeDtypeStruct((ROWS, seq), jnp.int32)
    return list(equations(jax.make_jaxpr(spread(method, case, KERNELS[kernel], backward, seq))(*arrays, packed).jaxpr))


def collectives(found: Equations) -> dict[str, int]:
    counts: dict[str, int] = {}
    for eqn, times in found:
        if eqn.primitive.name in COLLECTIVES:
            counts[eqn.primitive.name] = counts.get(eqn.primitive.name, 0) + times
    return counts


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_collectives_are_those_stated(ways: int, packed: bool) -> None:
    """Forward alone, then forward and backward; `packed` adds one all-gather of segments, forward."""
    extra = {"all_gather": 1} if packed else {}
    want = {
        "ring": ({"ppermute": ways - 1} | extra, {"ppermute": (ways - 1) + (2 * ways - 1)} | extra),
        "all_gather": ({"all_gather": 1 + packed}, {"all_gather": 1 + packed, "reduce_scatter": 1}),
        "ulysses": ({"all_to_all": 2} | extra, {"all_to_all": 4} | extra),
    }
    case = replace(CASES["mha"], ways=ways, packed=packed)
    for method in METHODS:
        got = collectives(trace(method, case, backward=False)), collectives(trace(method, case))
        assert got == want[method], method


def lowered(method: str, case: Case) -> str:
    arrays = [jax.ShapeDtypeStruct((ROWS, SEQ, n, HEAD_DIM), jnp.float32) for n in (HEADS, case.kv_heads, case.kv_heads, HEADS)]
    return jax.jit(spread(method, case)).lower(*arrays, jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)).as_text()


def test_nothing_is_added_on_the_way_to_stablehlo() -> None:
    """Operations as written: the ring has 1 + 1 permutes forward and 1 + 2 + 1 + 1 backward, one of each pair in a loop."""
    case = CASES["gqa_packed"]
    ops = ("collective_permute", "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "collective_broadcast")
    count = {method: {op: n for op in ops if (n := lowered(method, case).count(f'stablehlo.{op}"'))} for method in METHODS}
    assert count == {
        "ring": {"collective_permute": 7, "all_gather": 1},
        "all_gather": {"all_gather": 2, "reduce_scatter": 1},
        "ulysses": {"all_gather": 1, "all_to_all": 4},
    }


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("local", [4, 128])
def test_ring_work_is_exactly_balanced(ways: int, local: int) -> None:
    """No branch, so every rank computes the same: its own causal block and two quarters a step; 2 matmuls forward and 5 backward."""
    case = replace(CASES["mha"], ways=ways)
    found = trace("ring", case, seq=local * ways)
    assert not [eqn for eqn, _ in found if eqn.primitive.name == "cond"]
    index = jnp.arange(local)
    blocks = causal_blocks(local, local, Visibility(case.spec, "same", index, index))
    own = sum((i.stop - i.start) * (j.stop - j.start) for i, j in blocks)
    pairs = own + (ways - 1) * 2 * (local // 2) ** 2
    assert flops_of(found) == (2 + 5) * 2 * pairs * HEADS * HEAD_DIM * ROWS
    whole = (local * ways) ** 2
    assert pairs * ways <= whole * (1 / 2 + 1 / (2 * ways))


@pytest.mark.parametrize("method", METHODS)
def test_program_size_is_flat_in_ways(method: str) -> None:
    """To within the two reshapes that a share of one head does without."""
    sizes = [len(trace(method, replace(CASES["gqa_packed"], data=1, ways=ways, kv_heads=8))) for ways in (4, 8)]
    assert abs(sizes[0] - sizes[1]) <= 2


# --- Kernels whose log-sum-exp has no gradient, as cuDNN's ---


def deaf() -> Kernel:
    """XLA's kernel, but with the gradient of the log-sum-exp dropped in silence."""
    xla = KERNELS["xla"]

    def block_forward(*args: Any) -> tuple[Any, Any]:
        o, lse = xla.block_forward(*args)
        return o, lax.stop_gradient(lse)

    return replace(xla, name="deaf", block_forward=block_forward)


def differentiated_through(kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """What a ring would give that leaves its backward pass to JAX: two blocks of keys, merged."""
    q, k, v, do = map(jnp.asarray, arrays)
    index = jnp.arange(SEQ, dtype=jnp.int32)
    sees, half = Visibility(AttentionSpec(), "any", index, index), SEQ // 2

    def attend(q: Any, k: Any, v: Any) -> Any:
        parts = [kernel.block_forward(q, k[:, j], v[:, j], sees.part(slice(0, SEQ), j)) for j in (slice(0, half), slice(half, SEQ))]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        return sum(o * jnp.swapaxes(jnp.exp(part - lse), 1, 2)[..., None] for o, part in parts)

    return [np.asarray(x) for x in jax.jit(lambda *args: jax.vjp(attend, *args[:3])[1](args[3]))(q, k, v, do)]


def test_ring_does_not_need_the_gradient_of_the_log_sum_exp() -> None:
    case, arrays = CASES["mha"], inputs(CASES["mha"], np.float64)
    order, back = (f(SEQ, case.ways, "ring") for f in (sequence_order, natural_order))
    with jax.enable_x64(True):
        want = one_device("mha", np.float64)
        assert max(errors(want[1:], differentiated_through(KERNELS["xla"], arrays))) < 1e-11
        assert max(errors(want[1:], differentiated_through(deaf(), arrays))) > 1e-2, "the fake kernel would not be noticed"
        got = jax.jit(spread("ring", case, deaf()))(*(x[:, order] for x in (*arrays, segments())))
        assert max(errors(want, [np.asarray(x)[:, back] for x in got])) < 1e-11


@pytest.mark.parametrize(("name", "flash"), [("mha", True), ("gqa_packed", False), ("window_softcap_packed", False)])
def test_ring_of_cudnn_blocks(name: str, flash: bool) -> None:
    """Traced, as it cannot run here: every block is a cuDNN call, and full blocks need no mask in memory."""
    case = CASES[name]
    if case.spec.softcap is not None:
        case = replace(case, spec=replace(case.spec, softcap=None))
    found = trace("ring", case, kernel="cudnn")
    calls = [eqn for eqn, _ in found if "dot_product_attention" in eqn.primitive.name]
    # Forward and backward, each: own block, two quarters in the loop (ways > 2), two quarters of the last step.
    assert len(calls) == 2 * (1 + 2 * (case.ways > 2) + 2)
    assert {eqn.params["variadic_args"] for eqn in calls} == {(not flash, False)}
    assert not [eqn for eqn, _ in found if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("method", METHODS)
def test_under_remat_and_a_scan_over_layers(method: str) -> None:
    """As the trainer uses it: layers scanned, each recomputed in the backward pass."""
    case = CASES["mha"]
    order, back = (f(SEQ, case.ways, method) for f in (sequence_order, natural_order))

    def layers(attend: Any, q: Any, k: Any, v: Any) -> Any:
        body = jax.checkpoint(lambda x, scale: (x + scale * attend(x, k, v), None))
        return lax.scan(body, q, jnp.asarray([0.5, 1.0, 2.0], q.dtype))[0]

    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        index_S = local_index(SEQ, case.ways, method, lax.axis_index("context"))
        attend = functools.partial(METHODS[method], kernel=KERNELS["xla"], spec=case.spec, axis="context", ways=case.ways, index_S=index_S)
        return jax.vjp(functools.partial(layers, attend), q, k, v)[1](do)

    def whole(q: Any, k: Any, v: Any, do: Any) -> Any:
        index = jnp.arange(SEQ, dtype=jnp.int32)
        attend = functools.partial(attend_local, kernel=KERNELS["reference"], spec=case.spec, index_S=index)
        return jax.vjp(functools.partial(layers, attend), q, k, v)[1](do)

    split = P("data", "context")
    with jax.enable_x64(True):
        arrays = inputs(case, np.float64)
        want = [np.asarray(x) for x in jax.jit(whole)(*arrays)]
        run = jax.jit(jax.shard_map(step, mesh=mesh_of(case), in_specs=(split,) * 4, out_specs=(split,) * 3))
        got = [np.asarray(x)[:, back] for x in run(*(x[:, order] for x in arrays))]
    assert max(errors(want, got)) < 1e-11


# --- Order of the sequence, and sizes that do not divide ---


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_order_and_its_inverse(method: str, ways: int) -> None:
    order = sequence_order(16, ways, method)
    assert (order[natural_order(16, ways, method)] == np.arange(16)).all()
    held = np.concatenate([np.asarray(local_index(16, ways, method, rank)) for rank in range(ways)])
    assert (held == order).all()
    assert held.dtype == order.dtype or held.dtype == np.int32


def test_zig_zag_pairs_early_and_late_chunks() -> None:
    assert sequence_order(16, 2, "ring").tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    seen = (sequence_order(64, 4, "ring").reshape(4, -1) + 1).sum(axis=1)
    assert len(set(seen.tolist())) == 1, "pairs of (query, visible key) of each rank"


def test_sizes_that_do_not_divide_are_refused_with_sizes_that_would() -> None:
    """CTX-05: 2999 tokens over 4 ranks."""
    with pytest.raises(ValueError, match=r"seq_len 2999 does not divide into 8 equal chunks for context = 4; use 2992 or 3000"):
        sequence_order(2999, 4, "ring")
    with pytest.raises(ValueError, match=r"4 equal chunks for context = 4; use 2996 or 3000"):
        sequence_order(2999, 4, "all_gather")
    with pytest.raises(ValueError, match="unknown context method 'rings': one of ring, all_gather, ulysses"):
        sequence_order(16, 2, "rings")
    with pytest.raises(ValueError, match="one of ring, all_gather, ulysses"):
        select("rings", 2)


def test_ulysses_heads() -> None:
    assert [kv_repeats(8, 2, ways) for ways in (1, 2, 4, 8)] == [1, 1, 2, 4]
    with pytest.raises(ValueError, match=r"of the 6 heads .* its 2 key-value heads; mesh\.context may be 1, 2, 6,"):
        kv_repeats(6, 2, 4)

"""Local attention kernels: against sums written out in NumPy, against each other, and where every key is masked."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.ops import attention_cudnn
from jaxpar.ops.attention import KERNELS, AttentionSpec, DropoutWords, Visibility, choose_kernel
from jaxpar.ops.attention_xla import causal_blocks

SPECS = {
    "causal": AttentionSpec(),
    "full": AttentionSpec(causal=False),
    "window": AttentionSpec(window=5),
    "softcap": AttentionSpec(softcap=2.0),
    "dropout": AttentionSpec(dropout=0.25),
    "all": AttentionSpec(window=40, softcap=1.5, dropout=0.1),
}


def inputs(b: int, S: int, H: int, G: int, K: int = 8, dtype: Any = np.float64) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((b, S, n, K)).astype(dtype) for n in (H, G, G, H)]


def documents(b: int, S: int) -> np.ndarray:
    """Rows of documents of uneven lengths with padding after them; the last row is padding only."""
    rows = np.zeros((b, S), np.int32)
    for row in range(b - 1):
        ends = sorted({S // 5 + row, S // 2 + 3 * row, S - 3 - row})
        for document, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
            rows[row, start:end] = document
    return rows


def words_for(spec: AttentionSpec, b: int, H: int) -> DropoutWords | None:
    return DropoutWords((jnp.uint32(3), jnp.uint32(4)), jnp.arange(b), jnp.arange(H)) if spec.dropout else None


def run(name: str, spec: AttentionSpec, arrays: list[np.ndarray], segments: np.ndarray | None) -> list[np.ndarray]:
    """[o, dq, dk, dv] of one kernel on whole rows."""
    q, k, v, do = map(jnp.asarray, arrays)
    index = jnp.arange(q.shape[1], dtype=jnp.int32)
    segments_bS = None if segments is None else jnp.asarray(segments)

    @jax.jit
    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return KERNELS[name](
                q,
                k,
                v,
                spec=spec,
                q_index_S=index,
                k_index_T=index,
                q_segments_bS=segments_bS,
                k_segments_bT=segments_bS,
                aligned=True,
                dropout_words=words_for(spec, q.shape[0], q.shape[2]),
            )

        o, pull = jax.vjp(attend, q, k, v)
        return (o, *pull(do))

    return [np.asarray(x) for x in both(q, k, v, do)]


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def by_hand(spec: AttentionSpec, arrays: list[np.ndarray], segments: np.ndarray | None) -> np.ndarray:
    """Attention one query at a time."""
    q, k, v, _ = arrays
    b, S, H, K = q.shape
    o = np.zeros_like(q)
    for row, s, h in np.ndindex(b, S, H):
        g = h * k.shape[2] // H
        seen = [t for t in range(S) if (not spec.causal or t <= s) and (spec.window is None or s - t < spec.window)]
        if segments is not None:
            seen = [t for t in seen if segments[row, t] == segments[row, s] != 0]
        if not seen:
            continue
        logits = k[row, seen, g] @ q[row, s, h] / np.sqrt(K)
        if spec.softcap is not None:
            logits = spec.softcap * np.tanh(logits / spec.softcap)
        p = np.exp(logits - logits.max())
        o[row, s, h] = p @ v[row, seen, g] / p.sum()
    return o


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", ["causal", "full", "window", "softcap"])
def test_reference_is_attention_written_out(case: str, packed: bool) -> None:
    arrays = inputs(2, 12, 4, 2)
    segments = documents(2, 12) if packed else None
    with jax.enable_x64(True):
        o = run("reference", SPECS[case], arrays, segments)[0]
    assert np.abs(o - by_hand(SPECS[case], arrays, segments)).max() < 1e-13


@pytest.mark.parametrize(("case", "heads"), [("causal", (4, 4)), ("all", (4, 2)), ("full", (4, 1)), ("softcap", (2, 2))])
@pytest.mark.parametrize("packed", [False, True])
def test_xla_equals_reference_in_float64(case: str, heads: tuple[int, int], packed: bool) -> None:
    """S = 256: four causal blocks."""
    arrays = inputs(2, 256, *heads)
    segments = documents(2, 256) if packed else None
    with jax.enable_x64(True):
        want = run("reference", SPECS[case], arrays, segments)
        got = run("xla", SPECS[case], arrays, segments)
    assert max(map(error, want, got)) < 1e-11


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_low_precision_error_is_that_of_the_reference(dtype: Any) -> None:
    """Design section 8: at most 4 times the error of the plain form in the same dtype; dtypes are kept."""
    exact = inputs(2, 128, 4, 2)
    arrays = [np.asarray(jnp.asarray(x, dtype)) for x in exact]
    with jax.enable_x64(True):
        want = run("reference", SPECS["causal"], [x.astype(np.float64) for x in arrays], None)
    plain, got = (run(name, SPECS["causal"], arrays, None) for name in ("reference", "xla"))
    for true, a, b in zip(want, plain, got, strict=True):
        assert b.dtype == dtype
        assert error(true, b.astype(np.float64)) <= 4 * error(true, a.astype(np.float64))


def test_matches_jax_nn() -> None:
    arrays = inputs(2, 128, 4, 2, dtype=np.float32)
    q, k, v = map(jnp.asarray, arrays[:3])
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(4, 0), implementation="xla")
    assert error(np.asarray(want), run("xla", SPECS["window"], arrays, None)[0]) < 1e-6


@pytest.mark.parametrize("name", ["xla", "reference"])
@pytest.mark.parametrize("case", ["causal", "all"])
def test_rows_without_a_visible_key_are_zero_and_harmless(name: str, case: str) -> None:
    """NUM-10: the padded row gives zeros and zero gradients, and the other row's bits do not change."""
    arrays = inputs(2, 64, 2, 2, dtype=np.float32)
    segments = documents(2, 64)
    padded = run(name, SPECS[case], arrays, segments)
    assert all(np.isfinite(x).all() for x in padded)
    assert all((x[1] == 0).all() for x in padded)
    segments[1] = 1
    full = run(name, SPECS[case], arrays, segments)
    assert all((a[0] == b[0]).all() for a, b in zip(padded, full, strict=True))
    assert all((x[1] != 0).any() for x in full)


@pytest.mark.parametrize(("num_queries", "window"), [(256, None), (256, 40), (128, None), (96, 5), (33, None)])
def test_causal_blocks_leave_out_only_what_is_masked(num_queries: int, window: int | None) -> None:
    index = jnp.arange(num_queries)
    sees = Visibility(AttentionSpec(window=window), "same", index, index, contiguous=True)
    left = np.asarray(sees.mask())[0, 0].copy()
    queries = []
    for i, j in causal_blocks(num_queries, num_queries, sees):
        left[i, j] = False
        queries += range(i.start, i.stop)
    assert not left.any()
    assert queries == list(range(num_queries))


def test_blocks_of_keys_merge_to_the_whole() -> None:
    """block_forward over two halves of the keys, combined by log-sum-exp; block_backward's parts add up to the gradient."""
    arrays, segments = inputs(2, 32, 4, 2), documents(2, 32)
    spec, kernel = SPECS["all"], KERNELS["xla"]
    with jax.enable_x64(True):
        want = run("reference", spec, arrays, segments)
        q, k, v, do = map(jnp.asarray, arrays)
        index, segs = jnp.arange(32), jnp.asarray(segments)
        sees = Visibility(spec, "any", index, index, segs, segs, words_for(spec, 2, 4))
        halves = [slice(0, 16), slice(16, 32)]
        parts = [kernel.block_forward(q, k[:, j], v[:, j], sees.part(slice(0, 32), j)) for j in halves]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        o = sum(o * jnp.swapaxes(jnp.exp(part - lse), 1, 2)[..., None] for o, part in parts)
        assert error(want[0], np.asarray(o)) < 1e-13
        grads = [kernel.block_backward(q, k[:, j], v[:, j], jnp.asarray(o), lse, do, sees.part(slice(0, 32), j)) for j in halves]
        got = [grads[0][0] + grads[1][0], *(jnp.concatenate([grads[0][n], grads[1][n]], axis=1) for n in (1, 2))]
    assert max(error(a, np.asarray(b)) for a, b in zip(want[1:], got, strict=True)) < 1e-13


def test_dropout_words_do_not_depend_on_blocks_or_heads_held() -> None:
    words = DropoutWords((jnp.uint32(1), jnp.uint32(2)), jnp.arange(5, 8), jnp.arange(4))
    q, k = jnp.arange(6), jnp.arange(10)
    whole = np.asarray(words(q, k))
    assert whole.shape == (3, 4, 6, 10)
    part = replace(words, sample_b=words.sample_b[1:]).heads(2, 2)
    assert (np.asarray(part(q[3:], k[4:])) == whole[1:, 2:, 3:, 4:]).all()
    assert len(np.unique(whole)) > 0.99 * whole.size


def test_a_window_needs_causal_attention() -> None:
    with pytest.raises(ValueError, match="sliding_window 4 needs causal"):
        AttentionSpec(causal=False, window=4)


CHOICES = [
    (("auto", "cpu", jnp.bfloat16, 64, AttentionSpec(), False), "xla", "the platform is cpu"),
    (("auto", "gpu", jnp.float32, 64, AttentionSpec(), False), "xla", "not float32"),
    (("auto", "gpu", jnp.bfloat16, 64, AttentionSpec(softcap=30.0), False), "xla", "softcap"),
    (("xla", "gpu", jnp.bfloat16, 64, AttentionSpec(), False), "xla", "xla"),
    (("reference", "cpu", jnp.float64, 64, AttentionSpec(dropout=0.1), True), "reference", "reference"),
]


@pytest.mark.parametrize(("asked", "name", "why"), CHOICES)
def test_choice_says_which_and_why(asked: tuple[Any, ...], name: str, why: str) -> None:
    kernel, line = choose_kernel(*asked)
    assert kernel is KERNELS[name]
    assert why in line


REFUSALS = [
    (("cudnn", "cpu", jnp.bfloat16, 64, AttentionSpec(), False), "the platform is cpu"),
    (("cudnn", "gpu", jnp.float32, 64, AttentionSpec(), False), "not float32"),
    (("cudnn", "gpu", jnp.bfloat16, 60, AttentionSpec(), False), "multiple of 8 up to 128, not 60"),
    (("cudnn", "gpu", jnp.bfloat16, 64, AttentionSpec(dropout=0.1), False), "attention_dropout 0.1"),
    (("flash", "gpu", jnp.bfloat16, 64, AttentionSpec(), False), "one of auto, xla, cudnn, reference"),
]


@pytest.mark.parametrize(("asked", "why"), REFUSALS)
def test_a_kernel_that_cannot_work_is_refused(asked: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        choose_kernel(*asked)


def test_this_jax_has_the_cudnn_attention_that_we_know() -> None:
    assert attention_cudnn._parameters() <= attention_cudnn.PARAMETERS


def test_a_gpu_without_cudnn_is_refused() -> None:
    """JAX's CPU packages hold no cuDNN."""
    assert attention_cudnn.missing() == "cuDNN is not detected."
    with pytest.raises(ValueError, match="cuDNN is not detected"):
        choose_kernel("cudnn", "gpu", jnp.bfloat16, 64, AttentionSpec(), False)


CUDNN_MASKS: list[tuple[AttentionSpec, dict[str, Any], bool]] = [
    (AttentionSpec(), {"relation": "same"}, True),
    (AttentionSpec(), {"relation": "past"}, True),
    (AttentionSpec(causal=False), {"relation": "any"}, True),
    (AttentionSpec(window=8), {"relation": "same", "contiguous": True}, True),
    (AttentionSpec(window=8), {"relation": "same"}, False),
    (AttentionSpec(window=8), {"relation": "past"}, False),
    (AttentionSpec(), {"relation": "any"}, False),
]


@pytest.mark.parametrize(("spec", "kind", "flash"), CUDNN_MASKS)
def test_cudnn_blocks_take_flags_where_they_say_all_and_else_a_bias(spec: AttentionSpec, kind: dict[str, Any], flash: bool) -> None:
    """The custom calls cannot run here; their operands, attributes and types can be read from the traced program."""
    q, k, v, do = (jnp.asarray(x) for x in inputs(2, 16, 4, 2, dtype=jnp.bfloat16))
    index = jnp.arange(16, dtype=jnp.int32)
    sees = Visibility(spec, q_index_S=index, k_index_T=index, **kind)
    kernel = KERNELS["cudnn"]

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, lse = kernel.block_forward(q, k, v, sees)
        return o, lse, *kernel.block_backward(q, k, v, o, lse, do, sees)

    program = jax.make_jaxpr(both)(q, k, v, do)
    calls = [eqn for eqn in program.eqns if "dot_product_attention" in eqn.primitive.name]
    assert len(calls) == 2
    for call in calls:
        assert call.params["variadic_args"] == (not flash, False)
        assert call.params["scale"] == pytest.approx(8**-0.5)
        assert call.params["sliding_window_length"] == (8 if kind.get("contiguous") else None)
        assert call.params["mask_type"].name == ("CAUSAL" if kind["relation"] == "same" and spec.causal else "NO_MASK")
        assert call.invars[3].aval.shape == ((0,) if flash else (1, 1, 16, 16))
    shapes = [(x.aval.shape, x.aval.dtype) for x in program.jaxpr.outvars]
    assert shapes == [(x.shape, jnp.float32) for x in (q, jnp.zeros((2, 4, 16)), q, k, v)]


def test_keys_held_alike_get_a_gradient_summed_over_the_axis() -> None:
    """Batch split over a mesh axis, keys and values not varying over it."""
    q, k, v, do = (jnp.asarray(x) for x in inputs(2, 16, 4, 2, dtype=np.float32))
    k, v = k[:1], v[:1]
    index = jnp.arange(16, dtype=jnp.int32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def attend(q: Any, k: Any, v: Any) -> Any:
        return KERNELS["xla"](q, k, v, spec=AttentionSpec(), q_index_S=index, k_index_T=index, aligned=True)

    def grads(q: Any, k: Any, v: Any, do: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](do)

    row = P("data")
    got = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(row, P(), P(), row), out_specs=(row, P(), P())))(q, k, v, do)
    want = grads(q, jnp.repeat(k, 2, axis=0), jnp.repeat(v, 2, axis=0), do)
    for a, b in zip((want[0], want[1].sum(0), want[2].sum(0)), got, strict=True):
        assert error(np.asarray(a), np.asarray(b)) < 1e-6

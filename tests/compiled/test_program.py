"""The compiled step: its size does not grow with depth or microbatches, and it keeps no logits and no gathered weights."""

from typing import Any

import jax
import pytest

from jaxpar.config.flops import train_flops_per_token
from tests.compiled.test_collectives import trace
from tests.equivalence.harness import FLOAT32, config, parts_of
from tests.programs import dot_flops, equations, hlo_shapes, hlo_size


def traced(change: dict[str, Any]) -> jax.stages.Traced:
    return trace(parts_of(config(FLOAT32, change)))


@pytest.mark.parametrize(
    "change",
    [{}, pytest.param({"mesh": {"data": 2, "context": 2, "tensor": 2}, "zero_stage": 3}, marks=pytest.mark.slow)],
    ids=["one", "eight"],
)
def test_size_does_not_grow_with_layers_or_microbatches(change: dict[str, Any]) -> None:
    change, deep = {"data": {"global_batch_size": 64}} | change, {"model": {"num_layers": 48}}
    two, eight = {"num_microbatches": 2}, {"num_microbatches": 8}
    base, deeper, more = traced(two | change), traced(two | deep | change), traced(eight | change)
    count = [sum(1 for _ in equations(t.jaxpr.jaxpr)) for t in (base, deeper, more)]
    assert count[0] == count[1] == count[2]
    sizes = [hlo_size(t.lower().compile()) for t in (base, deeper, more)]
    assert max(sizes) <= 1.02 * min(sizes), sizes


@pytest.mark.parametrize("tensor", [1, 2])
def test_no_float32_logits_of_the_batch_exist(tensor: int) -> None:
    """[batch, seq, vocab] in any grouping of its dims is larger than any array of the program that has the vocabulary as a dim."""
    vocab, seq, rows, chunk = 480, 32, 8, 64
    change = {"model": {"vocab_size": vocab}, "data": {"global_batch_size": rows}, "loss_chunk_tokens": chunk, "mesh": {"tensor": tensor}}
    shapes = hlo_shapes(traced(change).lower().compile(), "f32")
    local = vocab // tensor
    with_vocab = [shape for shape in shapes if local in shape and 64 not in shape]  # 64: the tables [vocab, embed] themselves
    largest = max((size(shape) for shape in with_vocab), default=0)
    assert largest <= chunk * local < rows * seq * local


def size(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_zero_3_never_holds_the_gathered_weights_of_all_layers(policy: str) -> None:
    change = {"mesh": {"data": 8}, "zero_stage": 3, "model": {"num_layers": 6, "mlp_dim": 192}, "remat": {"policy": policy}}
    shapes = hlo_shapes(traced(change).lower().compile(), "f32")
    assert (64, 192) in shapes  # one layer's, gathered
    assert not [shape for shape in shapes if shape[0] == 6 and sorted(shape[1:]) in ([64, 192], [8, 8, 64])]


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_flop_formula_equals_the_dots_of_an_unrolled_model(activation: str, kv_heads: int) -> None:
    """Full attention (every query against every key, which the reference kernel computes), within 2 %."""
    run = config(FLOAT32, {"model": {"activation": activation, "num_kv_heads": kv_heads}})
    counted = dot_flops(trace(parts_of(run)).jaxpr.jaxpr)
    tokens = run.data.global_batch_size * run.data.seq_len
    formula = train_flops_per_token(run.model, run.data.seq_len, causal=False) * tokens
    assert abs(counted / formula - 1) < 0.02, (counted, formula)

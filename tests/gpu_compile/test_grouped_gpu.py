"""Grouped products as XLA compiles them for H100s, without one: no row is multiplied with the matrix of an expert that is not its own."""

import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.core.protocols import Product
from jaxpar.parallel.dispatch.grouped import tiles_for
from tests.gpu_compile.test_pipeline_gpu import H100

pytestmark = pytest.mark.gpu_compile

ROWS, EMBED, HIDDEN = 4096, 512, 1024


def product_flops(text: str) -> int:
    """FLOPs of a compiled program whose loops turn once: of dots, and of our kernels, whose last operands are [rows, in] and another."""
    shapes = dict(re.findall(r"%([\w.\-]+) = \w+\[([\d,]*)\]", text))
    size = {name: [int(n) for n in dims.split(",") if n] for name, dims in shapes.items()}
    total = 0
    for name, kind, args, rest in re.findall(r"%([\w.\-]+) = \w+\[[\d,]*\]\S* (dot|custom-call)\(([^)]*)\)(.*)", text):
        operands = [size[operand] for operand in re.findall(r"%([\w.\-]+)", args)]
        if kind == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", rest)
            assert contracted is not None
            total += 2 * math.prod(size[name]) * math.prod(operands[0][int(dim)] for dim in contracted[1].split(","))
        elif '"__gpu$xla.gpu.triton"' in rest:
            rows, other = operands[-2:]
            total += 2 * math.prod(rows) * (other[1] if len(other) == 2 else math.prod(other[1:]) // rows[1])
        else:
            assert "cublas" not in rest, "a product that is not counted"
    return total


def compiled(product: Callable[[jax.Array], Product], room: int, experts: int, which: str) -> jax.stages.Compiled:
    """One pass of a product inside `shard_map`, as in a train step. product: of sizes [experts]."""
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x1")
    mesh = Mesh(np.array(topology.devices), ("expert",))

    def one(rows: jax.Array, weights: jax.Array, sizes: jax.Array, dy: jax.Array) -> jax.Array:
        y, back = jax.vjp(product(sizes), rows, weights)
        return {"forward": lambda: y, "rows": lambda: back(dy)[0], "weights": lambda: back(dy)[1]}[which]()

    split = PartitionSpec("expert")
    shapes = [
        ((room, EMBED), jnp.bfloat16),
        ((experts, EMBED, HIDDEN), jnp.bfloat16),
        ((experts,), jnp.int32),
        ((room, HIDDEN), jnp.bfloat16),
    ]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split)) for shape, dtype in shapes]
    fn = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=split, out_specs=split))
    return fn.trace(*args).lower(lowering_platforms=("cuda",)).compile()


@pytest.mark.parametrize("experts", [4, 16])
@pytest.mark.parametrize("which", ["forward", "rows", "weights"])
def test_rows_meet_only_their_experts_matrix(which: str, experts: int) -> None:
    """Half again at most: what fills up tiles. The numbers of rows are not known, so this counts the tiles that there can be at most."""
    tiles = tiles_for(ROWS, experts, native=True)
    program = compiled(tiles.product, tiles.room(ROWS, experts), experts, which)
    text = program.as_text() or ""
    needed = 2 * ROWS * EMBED * HIDDEN
    assert needed <= product_flops(text) <= needed * tiles.room(ROWS, experts) / ROWS <= 1.5 * needed
    assert not [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line], "the host waits for each turn"
    analysis = program.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2**20, "copies of rows or weights"


def test_what_xla_makes_of_ragged_dot() -> None:
    """Why there are kernels: once XLA does better by itself, they can go."""
    text = compiled(_ragged_dot, ROWS, 4, "forward").as_text() or ""
    assert product_flops(text) == 4 * 2 * ROWS * EMBED * HIDDEN


def _ragged_dot(sizes: jax.Array) -> Product:
    return lambda rows, weights: jax.lax.ragged_dot(rows, weights, sizes)

"""A small training state on any mesh of eight devices, and scripts that run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import make_meta
from jaxpar.core.tree import named_leaves

CONFIG: dict[str, Any] = {
    "name": "test",
    "seed": 7,
    "model": {"num_layers": 4, "embed_dim": 16},
    "mesh": {"data": 8, "tensor": 1},
    "zero_stage": 3,
    "data": {"source": "stdlib", "path": None, "global_batch_size": 16, "prefetch": 2, "mixture": []},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 20},
    "param_dtype": "float32",
}


class Moments(NamedTuple):
    """Like an optax state: named tuples in the tree."""

    count: Any
    mu: Any


def mesh_of(*shape: int) -> Mesh:
    names = ("data", "context", "tensor")[: len(shape)]
    devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))


ZERO3 = {"kernel": P(None, "data"), "table": P("data"), "scale": P()}
MIXED = {"kernel": P(None, ("data", "context"), "tensor"), "table": P("tensor", "context"), "scale": P()}
WHOLE = {"kernel": P(), "table": P(), "scale": P()}


def state_like(mesh: Mesh, specs: dict[str, P], *, layers: int = 4) -> Any:
    """Abstract state: {"params": {"embed": {"table"}, "blocks": {"kernel", "scale"}}, "opt": (Moments, ()), "step"}."""

    def leaf(spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def params(dtype: Any = jnp.float32) -> dict[str, Any]:
        blocks = {"kernel": leaf(specs["kernel"], layers, 16, 32, dtype=dtype), "scale": leaf(specs["scale"], layers, 16)}
        return {"embed": {"table": leaf(specs["table"], 64, 16)}, "blocks": blocks}

    scalar = leaf(P(), dtype=jnp.int32)
    return {"params": params(), "opt": (Moments(scalar, params(jnp.bfloat16)), ()), "step": scalar}


def fill(like: Any, seed: int) -> Any:
    """Values drawn per path, so equal under every sharding."""

    def one(index: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.random.default_rng([seed, index]).standard_normal(leaf.shape) * 100
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(treedef, [one(i, leaf) for i, leaf in enumerate(leaves)])


def meta(step: int, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    return make_meta(config=config, fingerprint="sha256:abc", step=step, samples_seen=16 * step)


def same_bits(a: Any, b: Any) -> bool:
    """Equal trees, dtypes and bits."""
    left, right = named_leaves(a), named_leaves(b)
    return left.keys() == right.keys() and all(
        x.dtype == right[name].dtype and np.asarray(x).tobytes() == np.asarray(right[name]).tobytes() for name, x in left.items()
    )


PRELUDE = """
import os, resource, shutil, signal, sys, time
from pathlib import Path
from jaxpar.checkpoint import CheckpointError, CheckpointStore
from jaxpar.config.train import CheckpointConfig
from tests.checkpoint.helpers import *
folder = Path(sys.argv[1])
like = state_like(mesh_of(8), ZERO3)
store = CheckpointStore(folder, CheckpointConfig(keep_last=3))
"""


def run_script(body: str, *args: Any) -> subprocess.CompletedProcess[str]:
    """Run `PRELUDE + body` in a new Python."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", PRELUDE + body, *map(str, args)]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120, check=False)

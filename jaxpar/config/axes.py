"""The names of mesh axes and tensor dims, and which role each axis plays."""

from typing import Literal, get_args

Axis = Literal["pipe", "replica", "data", "expert", "context", "tensor"]

# Outer to inner: `tensor` is innermost so that it stays on the fastest links of a host.
AXES: tuple[str, ...] = get_args(Axis)
MESH_KEYS = tuple(f"mesh.{axis}" for axis in AXES)  # of a config
BATCH_AXES = ("replica", "data", "expert")  # split the rows of a batch
ZERO_AXES = ("data", "expert", "context")  # shard optimizer state, gradients, parameters; those of experts over data and context

# Dims that a parameter or an activation may name. A model of the user's own may add names under `rules:`.
# fmt: off
DIMS = (
    "layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "latent", "mlp", "experts", "router", "positions", "batch", "seq",
)
# fmt: on

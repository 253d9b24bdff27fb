"""Host rows -> device arrays: microbatches, the sequence order of the context method, and shardings."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.config.layout import Layout
from jaxpar.mesh.sequence import sequence_order
from jaxpar.mesh.specs import PER_TOKEN, batch_spec


@dataclass(frozen=True)
class Feed:
    """Places batches for the train and evaluation steps ([M, rows / M, S]) and for sampling ([rows, S])."""

    layout: Layout
    mesh: Mesh
    context_method: str
    seq_len: int
    packed: bool  # rows hold several documents: positions and segments are fed
    weights_dtype: str = "float32"

    @property
    def order(self) -> np.ndarray:
        """Natural position of the token at each slot of a row."""
        return sequence_order(self.seq_len, self.layout.size(self.layout.context_axes), self.context_method)

    def arrange(self, rows: Mapping[str, np.ndarray], num_microbatches: int | None) -> dict[str, np.ndarray]:
        """Rows in natural order -> arrays as the step takes them, still on the host."""
        names = [n for n in (*PER_TOKEN, "samples") if n in rows and (self.packed or n not in ("positions", "segments"))]
        out = {n: np.asarray(rows[n]) for n in names}
        if self.layout.context_axes:
            out = {n: a[:, self.order] if n in PER_TOKEN else a for n, a in out.items()}
        if "weights" in out:
            out["weights"] = out["weights"].astype(self.weights_dtype)
        if num_microbatches is None:
            return out
        return {n: a.reshape(num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:]) for n, a in out.items()}

    def place(self, rows: Mapping[str, np.ndarray], num_microbatches: int | None) -> dict[str, jax.Array]:
        """Device arrays of a batch; every process passes the whole global batch and keeps its part."""
        host = self.arrange(rows, num_microbatches)
        all_specs = batch_spec(self.layout, microbatched=num_microbatches is not None)
        put = {n: NamedSharding(self.mesh, all_specs[n]) for n in host}
        if jax.process_count() == 1:
            return jax.device_put(host, put)
        return {n: jax.make_array_from_callback(a.shape, put[n], lambda index, a=a: a[index]) for n, a in host.items()}

    def abstract(self, num_rows: int, num_microbatches: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of a training batch, for compiling ahead of the first one."""
        rows = {n: np.zeros((num_rows, self.seq_len), np.int32) for n in PER_TOKEN} | {"samples": np.zeros(num_rows, np.uint32)}
        all_specs = batch_spec(self.layout)
        host = self.arrange(rows, num_microbatches)
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(self.mesh, all_specs[n])) for n, a in host.items()}

"""FLOPs of a training step a token: exact for our transformer, 6 x matmul parameters for a model of the user's own."""

import math

from jaxpar.build import Parts
from jaxpar.config.flops import train_flops_per_token
from jaxpar.config.layout import is_vector
from jaxpar.core.tree import named_leaves
from jaxpar.mesh.specs import is_plan
from jaxpar.models.transformer import Transformer


def flops_per_token(parts: Parts) -> tuple[int, str]:
    """(FLOPs of forward and backward, in words how counted). Recomputation does not count: model FLOPs, not hardware FLOPs."""
    if isinstance(parts.model, Transformer):
        m = parts.config.model
        zeros = f", values {m.value_size} wide, which the kernel fills up to {m.head_size}" if m.value_size < m.head_size else ""
        return train_flops_per_token(m, parts.config.data.seq_len), f"matmuls and causal attention (config/flops.py){zeros}"
    return 6 * matmul_parameters(parts), "6 x matmul parameters: attention or other mixing of this model is not counted"


def matmul_parameters(parts: Parts) -> int:
    """Parameters outside `embed` that map one space to another; a bias over (heads, head_dim) is a vector."""
    plans = named_leaves(parts.placement.plans, is_leaf=is_plan)
    maps = [plan for path, plan in plans.items() if not path.startswith("embed.") and not is_vector(plan.names)]
    stages = parts.layout.stages
    # A pipeline may store rows that belong to no layer.
    used = 1.0 if stages is None else len(stages.row_of_layer) / stages.num_rows
    return sum(round(math.prod(plan.shape) * (used if plan.names[0] == "layers" else 1)) for plan in maps)

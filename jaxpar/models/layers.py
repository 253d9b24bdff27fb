"""Linear, embedding and norm layers: local maths on named dims. Collectives stand where a block asks for them."""

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jaxtyping import Array

from jaxpar.core.dtypes import wide
from jaxpar.models.param import normal, ones, param, zeros
from jaxpar.ops.lookup import look_up
from jaxpar.ops.norm import layer_norm, rms_norm

Dims = Mapping[str, int]  # dim name -> size, in order
Pick = Callable[[Array, int], Array]


class Linear(nnx.Module):
    """Contracts the trailing `in_dims` of its input and appends `out_dims`."""

    def __init__(self, in_dims: Dims, out_dims: Dims, *, std: float, bias: bool = False, valid_out: tuple[int, ...] | None = None) -> None:
        self.num_in = len(in_dims)
        shape, names = (*in_dims.values(), *out_dims.values()), (*in_dims, *out_dims)
        valid = (*in_dims.values(), *valid_out) if valid_out else None
        self.kernel = param(normal(std), shape, names, valid=valid)
        self.bias = param(zeros, tuple(out_dims.values()), tuple(out_dims)) if bias else None

    def __call__(self, x: Array, pick: Pick | None = None) -> Array:
        """x @ kernel + bias; `pick(w, array_dim)` may choose a part of the first output dim of both."""
        if pick is None:
            return self.add_bias(self.product(x))
        y = _contract(x, pick(self.kernel[...], self.num_in), self.num_in)
        return y if self.bias is None else _plus(y, pick(self.bias[...], 0))

    def product(self, x: Array) -> Array:
        """x @ kernel. Where the contracted dim is split this is a partial sum: the bias comes after `ctx.leave`, once."""
        return _contract(x, self.kernel[...], self.num_in)

    def add_bias(self, y: Array) -> Array:
        return y if self.bias is None else _plus(y, self.bias[...])


def _contract(x: Array, kernel: Array, num_in: int) -> Array:
    contract = (tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in)))
    return jax.lax.dot_general(x, kernel, (contract, ((), ())))


def _plus(y: Array, bias: Array) -> Array:
    """Added in float32 at least: the gradient of a bias is a sum over all tokens, which bfloat16 gets wrong by 4 % at 2048 of them."""
    dtype = wide(y.dtype)
    return (y.astype(dtype) + bias.astype(dtype)).astype(y.dtype)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over one dim."""

    def __init__(self, kind: str, dim: str, size: int, eps: float) -> None:
        self.eps = eps
        self.scale = param(ones, (size,), (dim,))
        self.bias = param(zeros, (size,), (dim,)) if kind == "layernorm" else None

    def __call__(self, x: Array) -> Array:
        if self.bias is None:
            return rms_norm(x, self.scale[...], self.eps)
        return layer_norm(x, self.scale[...], self.bias[...], self.eps)


class Table(nnx.Module):
    """Rows looked up by index."""

    def __init__(self, dim: str, size: int, embed_dim: int, *, std: float, valid: int | None = None) -> None:
        self.table = param(normal(std), (size, embed_dim), (dim, "embed"), valid=(valid or size, embed_dim))

    def rows(self, index: Array) -> Array:
        """Plain lookup in a table that is not split."""
        return look_up(self.table[...], index)

"""Array aliases and the letters that name dims in array names and annotations.

One legend for the whole project; capital letters are global sizes, and the same letter names the part of a dim that a
device holds (the layout decides how much that is):

B global batch rows   b rows of one microbatch on a device   M microbatches   S sequence
T keys of attention, or the tokens on the other side of `enter` or `leave`   N, n length of a list   W tokens of a window
D embed   H query heads   G key-value heads   K head dim   F mlp hidden   V vocabulary   L layers   P pipeline stages
E experts   C expert capacity   k experts a token (in ops/rope.py: half of K)

Of experts' rows: g routing groups of T tokens   t those of them on a device, or tiles   n tokens of a device   R rows of a buffer
p devices that exchange   e experts of a device. Latent attention has widths of its own (models/mla.py).
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, UInt

PyTree = Any
Params = dict[str, Any]
Terms = dict[str, tuple[Array, Array]]  # loss terms: name -> (sum, weight)

__all__ = ["Array", "Bool", "Float", "Int", "Params", "PyTree", "Terms", "UInt"]

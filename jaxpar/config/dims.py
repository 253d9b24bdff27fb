"""What the names of a parameter's dims say of its shape: which dims stack copies, and which make one space together.

Rank tells nothing: leaves are stacked over layers and experts, and one side of a matrix may be two dims (heads, head_dim).
"""

# Leading dims that only stack copies of a parameter.
STACK_DIMS = ("layers", "experts")
# A dim that is the second half of one space together with the dim before it.
_JOINS = {"head_dim": ("heads", "kv_heads")}


def dim_spaces(names: tuple[str, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """(stacking dims, spaces): ("layers", "embed", "heads", "head_dim") -> ((0,), [(1,), (2, 3)])."""
    start = 0
    while start < len(names) and names[start] in STACK_DIMS:
        start += 1
    spaces: list[tuple[int, ...]] = []
    for i in range(start, len(names)):
        if i > start and names[i - 1] in _JOINS.get(names[i], ()):
            spaces[-1] = (*spaces[-1], i)
        else:
            spaces.append((i,))
    return tuple(range(start)), spaces


def is_vector(names: tuple[str, ...]) -> bool:
    """True for norm scales and biases: parameters of one space."""
    return len(dim_spaces(names)[1]) <= 1


def computes_exactly(names: tuple[str, ...]) -> bool:
    """True for parameters that are used in the dtype in which they are stored: a router in bfloat16 merges near ties."""
    return "router" in names

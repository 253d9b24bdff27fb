"""Names of leaves, bytes, and the report of what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.core.tree import LeafType, leaf_types, named_leaves, tree_bytes, tree_differences

TREE = {"blocks": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros((3,), jnp.bfloat16)}, "opt": (np.zeros((), np.int32), ())}


def test_names_and_types() -> None:
    assert leaf_types(TREE) == {
        "blocks.bias": LeafType((3,), "bfloat16"),
        "blocks.kernel": LeafType((2, 3), "float32"),
        "opt.0": LeafType((), "int32"),
    }
    assert leaf_types(jax.eval_shape(lambda: TREE)) == leaf_types(TREE)
    assert tree_bytes(TREE) == 2 * 3 * 4 + 3 * 2 + 4


def test_two_leaves_of_one_name() -> None:
    with pytest.raises(ValueError, match=r"two leaves are both called 'a\.b'"):
        named_leaves({"a": {"b": 1}, "a.b": 2})


def test_every_difference_has_a_line() -> None:
    found = {
        "same": LeafType((1,), "float32"),
        "a": LeafType((1,), "float32"),
        "b": LeafType((1,), "float32"),
        "old": LeafType((), "int32"),
    }
    wanted = {
        "same": LeafType((1,), "float32"),
        "a": LeafType((2,), "bfloat16"),
        "b": LeafType((2,), "float32"),
        "new": LeafType((), "int32"),
    }
    assert tree_differences(found, wanted, found_in="checkpoint", wanted_in="run") == [
        "a: shape and dtype differ: checkpoint float32[1], run bfloat16[2]",
        "b: shape differs: checkpoint float32[1], run float32[2]",
        "new: missing in the checkpoint; the run has int32[]",
        "old: unknown to the run; the checkpoint has int32[]",
    ]
    assert tree_differences(wanted, wanted) == []
